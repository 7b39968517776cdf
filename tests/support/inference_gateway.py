"""Minimal gateway that splits requests by the weights of an HTTPRoute among InferencePools or Services.

For a pool it asks the pool's endpoint picker, as Envoy does. For a Service it uses the Ready pods in turn.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import httpx
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as BodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyResponse,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import Struct
from grpclib.client import Channel, Stream
from grpclib.const import Cardinality

from kvpilot_operator.api.names import HTTP_ROUTE_API
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from support.endpoint_picker import CHOICE, DESTINATION, PROCESSOR, SERVED, EndpointPicker
from support.inference_kinds import picker_name
from support.ready_pods import Backend, ReadyPods, follow

PATH = "/v1/completions"
_HEADERS = {"content-type": "application/json"}
_STREAMED = BodySendMode.FULL_DUPLEX_STREAMED

Sent = Callable[[str], Awaitable[None]]
"""Callback with the endpoint of a request, before the request goes there."""


class Way(Protocol):
    """A way in which a gateway sends requests to pods."""

    async def ask(self, http: httpx.AsyncClient, body: bytes, sent: Sent) -> bool:
        """Send a request with this body, and read the whole answer. Return False after a 503, which reached no pod.

        Raises:
            httpx.HTTPError: a pod did not answer properly.
        """


class ServiceWay:
    """Way to the Ready pods of a Service, used in turn."""

    def __init__(self, pods: ReadyPods) -> None:
        self._pods, self._turn = pods, itertools.count()

    async def ask(self, http: httpx.AsyncClient, body: bytes, sent: Sent) -> bool:
        endpoints = self._pods.endpoints()
        if not endpoints:
            return False
        endpoint = endpoints[next(self._turn) % len(endpoints)]
        await sent(endpoint)
        answer = await http.post(f"http://{endpoint}{PATH}", content=body, headers=_HEADERS)
        answer.raise_for_status()
        return True


class PickedWay:
    """Way to the endpoint that a picker chooses. Request and response pass through the picker."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def ask(self, http: httpx.AsyncClient, body: bytes, sent: Sent) -> bool:
        process = f"/{PROCESSOR}/Process"
        async with self._channel.request(
            process, Cardinality.STREAM_STREAM, ProcessingRequest, ProcessingResponse
        ) as stream:
            endpoint = await _destination(stream)
            if endpoint is None:
                return False
            await sent(endpoint)
            passed = await _told(stream, ProcessingRequest(request_body=HttpBody(body, end_of_stream=True)))
            request = http.stream(
                "POST", f"http://{endpoint}{PATH}", content=_body(passed.request_body), headers=_HEADERS
            )
            async with request as answer:
                await _told(stream, _answered(answer, endpoint))
                async for chunk in answer.aiter_raw():
                    came = await _told(stream, ProcessingRequest(response_body=HttpBody(chunk)))
                    assert _body(came.response_body) == chunk
                await _told(stream, ProcessingRequest(response_body=HttpBody(end_of_stream=True)))
            await stream.end()
            answer.raise_for_status()
        return True


def _headers(**more: str) -> HttpHeaders:
    pairs = [HeaderValue(key=key, raw_value=value.encode()) for key, value in (_HEADERS | more).items()]
    return HttpHeaders(HeaderMap(pairs))


async def _destination(stream: Stream[ProcessingRequest, ProcessingResponse]) -> str | None:
    """Return the endpoint that the picker chooses, or None for its 503."""
    answer = await _told(
        stream,
        ProcessingRequest(
            request_headers=_headers(**{":method": "POST", ":path": PATH}),
            protocol_config=ProtocolConfiguration(request_body_mode=_STREAMED, response_body_mode=_STREAMED),
        ),
    )
    if (refusal := answer.immediate_response) is not None:
        assert refusal.status.code == httpx.codes.SERVICE_UNAVAILABLE
        return None
    chosen: str = answer.dynamic_metadata.to_dict()[CHOICE][DESTINATION]
    [header] = answer.request_headers.response.header_mutation.set_headers
    assert (header.header.key, header.header.raw_value.decode()) == (DESTINATION, chosen)
    return chosen


def _answered(answer: httpx.Response, endpoint: str) -> ProcessingRequest:
    served = Metadata({CHOICE: Struct.from_dict({SERVED: endpoint})})
    return ProcessingRequest(response_headers=_headers(**{":status": str(answer.status_code)}), metadata_context=served)


async def _told(
    stream: Stream[ProcessingRequest, ProcessingResponse], message: ProcessingRequest
) -> ProcessingResponse:
    await stream.send_message(message)
    answer = await stream.recv_message()
    if answer is None:
        raise EOFError("the picker ended the stream of a request that it had not answered")
    return answer


def _body(response: BodyResponse) -> bytes:
    return bytes(response.response.body_mutation.streamed_response.body)


@contextlib.asynccontextmanager
async def picked(pods: ReadyPods) -> AsyncIterator[PickedWay]:
    """Start an endpoint picker for one InferencePool, and yield the way for requests to the endpoints that it picks."""
    async with EndpointPicker(pods.endpoints).listening() as port:
        channel = Channel("127.0.0.1", port)
        try:
            yield PickedWay(channel)
        finally:
            channel.close()


class InferenceGateway:
    """Gateway that sends each request to a backend of the route's first rule, drawn at random by weight.

    All backends have the same kind. Each pool names its own picker.
    """

    def __init__(self, cluster: Cluster, namespace: str, route: str, names: Sequence[str], kind: Backend) -> None:
        self._cluster, self._namespace, self._route, self._kind = cluster, namespace, route, kind
        self._pods = {name: ReadyPods(cluster, namespace, name, kind) for name in names}
        self._ways: dict[str, Way] = {}
        self._routes: dict[str, Object] = {}
        self._random = random.Random(0)

    @contextlib.asynccontextmanager
    async def following(self) -> "AsyncIterator[InferenceGateway]":
        """Follow the route and its backends until the block ends."""
        async with contextlib.AsyncExitStack() as stack:
            for name, pods in self._pods.items():
                await stack.enter_async_context(pods.following())
                if self._kind == "Service":
                    self._ways[name] = ServiceWay(pods)
                else:
                    self._ways[picker_name(name)] = await stack.enter_async_context(picked(pods))
            task = asyncio.create_task(
                follow(self._cluster, HTTP_ROUTE_API, "HTTPRoute", self._namespace, self._routes)
            )
            try:
                yield self
            finally:
                task.cancel()

    @property
    def is_ready(self) -> bool:
        """True if each backend of the route has a pod."""
        refs = self._refs()
        return bool(refs) and all(self._pods[ref["name"]].endpoints() for ref in refs)

    async def ask(self, http: httpx.AsyncClient, body: bytes, sent: Sent) -> bool:
        """Send a request, as `Way.ask` does."""
        refs = self._refs()
        if not refs:
            return False
        drawn = self._random.choices(refs, [ref.get("weight", 1) for ref in refs])[0]["name"]
        backend = self._pods[drawn].backend()
        if backend is None:
            return False
        name = drawn if self._kind == "Service" else backend["spec"]["endpointPickerRef"]["name"]
        return await self._ways[name].ask(http, body, sent)

    def _refs(self) -> list[Object]:
        route = self._routes.get(self._route)
        refs: list[Object] = route["spec"]["rules"][0]["backendRefs"] if route else []
        assert all(ref.get("kind", "Service") == self._kind for ref in refs)
        return refs
