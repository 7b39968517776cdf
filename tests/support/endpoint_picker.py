"""Minimal endpoint picker that speaks the gRPC protocol of the Gateway API Inference Extension.

A gateway reports each HTTP request in a stream of Envoy's external processing. The picker names an endpoint of its pool
in a header and in dynamic metadata, or answers 503. Bodies pass through unchanged, one chunk at a time. At the end the
gateway reports the endpoint that served the request. The picker also answers gRPC health checks.

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/004-endpoint-picker-protocol
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Metadata,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as BodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    ExternalProcessorBase,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Struct
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_grpc import HealthBase
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpclib.server import Server, Stream

from kvpilot_localcluster.addresses import free_port

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
CHOICE, HINT = "envoy.lb", "envoy.lb.subset_hint"
"""Metadata namespaces: the first holds the chosen and the serving endpoint, the second the candidates."""
PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"


class EndpointPicker(ExternalProcessorBase):  # type: ignore[misc]
    """Picker that chooses the endpoints in turn.

    Args:
        endpoints: endpoints that may be picked now, or None while they are unknown.

    Attributes:
        served: number of requests that each endpoint served, as gateways report.
    """

    def __init__(self, endpoints: Callable[[], Sequence[str] | None]) -> None:
        self._endpoints, self._turn = endpoints, itertools.count()
        self.served: Counter[str] = Counter()

    @property
    def is_ready(self) -> bool:
        """True if the endpoints of the pool are known."""
        return self._endpoints() is not None

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Serve on a port of this machine until the block ends."""
        server, port = Server([self, _Health(self)]), free_port()
        await server.start("127.0.0.1", port)
        try:
            yield port
        finally:
            server.close()
            await server.wait_closed()

    async def process(self, messages: AsyncIterator[ProcessingRequest]) -> AsyncIterator[ProcessingResponse]:
        """Handle one stream of Envoy messages: one HTTP request and its response."""
        streamed = {"request_body": False, "response_body": False}
        async for message in messages:
            if config := message.protocol_config:
                streamed = {
                    "request_body": config.request_body_mode == BodySendMode.FULL_DUPLEX_STREAMED,
                    "response_body": config.response_body_mode == BodySendMode.FULL_DUPLEX_STREAMED,
                }
            if message.request_headers is not None:
                endpoint = self._pick(message.metadata_context)
                if endpoint is None:
                    yield _refusal()
                    return
                yield _destination(endpoint)
            elif message.response_headers is not None:
                self.served[_served(message.metadata_context)] += 1
                yield ProcessingResponse(response_headers=HeadersResponse())
            elif message.request_body is not None:
                yield ProcessingResponse(request_body=_passed(message.request_body, streamed["request_body"]))
            elif message.response_body is not None:
                yield ProcessingResponse(response_body=_passed(message.response_body, streamed["response_body"]))
            elif message.request_trailers is not None:
                yield ProcessingResponse(request_trailers=TrailersResponse())
            elif message.response_trailers is not None:
                yield ProcessingResponse(response_trailers=TrailersResponse())

    def _pick(self, context: Metadata | None) -> str | None:
        hint, eligible = told(context, HINT), self._endpoints() or ()
        if SUBSET in hint:
            eligible = [one for one in eligible if one in hint[SUBSET]]
        return eligible[next(self._turn) % len(eligible)] if eligible else None


def told(context: Metadata | None, namespace: str) -> dict[str, Any]:
    """Return the fields of one metadata namespace of Envoy's message."""
    found = context.filter_metadata.get(namespace) if context is not None else None
    return found.to_dict() if found is not None else {}


def _destination(endpoint: str) -> ProcessingResponse:
    # A header from the client must not choose the endpoint.
    over = HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    header = HeaderValueOption(header=HeaderValue(key=DESTINATION, raw_value=endpoint.encode()), append_action=over)
    response = CommonResponse(header_mutation=HeaderMutation(set_headers=[header]), clear_route_cache=True)
    chosen = Struct.from_dict({CHOICE: {DESTINATION: endpoint}})
    return ProcessingResponse(request_headers=HeadersResponse(response), dynamic_metadata=chosen)


def _refusal() -> ProcessingResponse:
    status = HttpStatus(code=StatusCode.ServiceUnavailable)
    return ProcessingResponse(immediate_response=ImmediateResponse(status=status, details="no endpoint is ready"))


def _passed(chunk: HttpBody, streamed: bool) -> BodyResponse:
    if not streamed:
        return BodyResponse(CommonResponse())
    same = StreamedBodyResponse(body=chunk.body, end_of_stream=chunk.end_of_stream)
    return BodyResponse(CommonResponse(body_mutation=BodyMutation(streamed_response=same)))


def _served(context: Metadata | None) -> str:
    endpoint = told(context, CHOICE).get(SERVED)
    if not isinstance(endpoint, str):
        raise GRPCError(Status.INVALID_ARGUMENT, f"metadata {CHOICE} {SERVED}: {endpoint!r}; say which endpoint served")
    return endpoint


class _Health(HealthBase):
    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker

    async def Check(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:  # noqa: N802
        request = await stream.recv_message()
        assert request is not None
        ready = HealthCheckResponse.SERVING if self._picker.is_ready else HealthCheckResponse.NOT_SERVING
        states = {"liveness": HealthCheckResponse.SERVING, "readiness": ready, PROCESSOR: ready}
        if request.service not in states:
            raise GRPCError(Status.NOT_FOUND, f"no service {request.service!r}; ask for one of {', '.join(states)}")
        await stream.send_message(HealthCheckResponse(status=states[request.service]))

    async def Watch(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:  # noqa: N802
        raise GRPCError(Status.UNIMPLEMENTED, "ask by Check")
