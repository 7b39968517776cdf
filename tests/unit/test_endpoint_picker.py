"""The tests' endpoint picker follows the endpoint picker protocol. gRPC's own client checks this."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as BodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    ExternalProcessorAsyncStub,
    ExternalProcessorSyncStub,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import Struct
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from support.endpoint_picker import CHOICE, DESTINATION, HINT, PROCESSOR, SERVED, SUBSET, EndpointPicker

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
STREAMED = BodySendMode.FULL_DUPLEX_STREAMED
DUPLEX = ProtocolConfiguration(request_body_mode=STREAMED, response_body_mode=STREAMED)


class Pool:
    """Settings of a test's pool, and the picker's port."""

    def __init__(self) -> None:
        self.endpoints: Sequence[str] | None = (A, B)
        self.picker = EndpointPicker(lambda: self.endpoints)
        self.port = 0
        self.channel: Channel


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool()
    async with made.picker.listening() as made.port:
        made.channel = Channel("127.0.0.1", made.port)
        yield made
        made.channel.close()


def headers(subset: Sequence[str] | None = None, **more: Any) -> ProcessingRequest:
    """Return request headers that list the candidates of the picker."""
    hint = None if subset is None else Metadata({HINT: Struct.from_dict({SUBSET: list(subset)})})
    own = HeaderValue(key=DESTINATION, raw_value=C.encode())
    return ProcessingRequest(request_headers=HttpHeaders(HeaderMap([own])), metadata_context=hint, **more)


async def told(pool: Pool, *messages: ProcessingRequest) -> list[ProcessingResponse]:
    """Send all messages at once, and return the picker's answers."""
    return [one async for one in ExternalProcessorAsyncStub(pool.channel).process(messages)]


def chosen(answer: ProcessingResponse) -> str:
    """Return the chosen endpoint, on which header and metadata must agree."""
    assert answer.immediate_response is None
    [option] = answer.request_headers.response.header_mutation.set_headers
    assert option.append_action.name == "OVERWRITE_IF_EXISTS_OR_ADD"
    header = option.header
    metadata = answer.dynamic_metadata.to_dict()
    assert metadata == {CHOICE: {DESTINATION: header.raw_value.decode()}}
    assert header.key == DESTINATION
    return str(metadata[CHOICE][DESTINATION])


async def test_header_and_metadata_name_the_same_endpoint_and_endpoints_take_turns(pool: Pool) -> None:
    picked = [chosen((await told(pool, headers()))[0]) for _ in range(4)]
    assert picked == [A, B, A, B]
    pool.endpoints = (C,)
    assert chosen((await told(pool, headers()))[0]) == C


@pytest.mark.parametrize("endpoints", [(), None])
async def test_without_a_ready_endpoint_the_answer_is_503_and_nothing_more(
    pool: Pool, endpoints: Sequence[str] | None
) -> None:
    pool.endpoints = endpoints
    [answer] = await told(pool, headers(protocol_config=DUPLEX), ProcessingRequest(request_body=HttpBody(b"x")))
    assert answer.immediate_response.status.code == httpx.codes.SERVICE_UNAVAILABLE
    assert answer.dynamic_metadata is None


@pytest.mark.parametrize(("subset", "allowed"), [([B], {B}), ([C, A], {A}), ([A, B], {A, B})])
async def test_only_endpoints_of_the_subset_are_picked(pool: Pool, subset: list[str], allowed: set[str]) -> None:
    assert {chosen((await told(pool, headers(subset)))[0]) for _ in range(4)} == allowed


@pytest.mark.parametrize("subset", [[], [C]])
async def test_a_subset_that_is_empty_or_has_no_ready_endpoint_is_503(pool: Pool, subset: list[str]) -> None:
    [answer] = await told(pool, headers(subset))
    assert answer.immediate_response.status.code == httpx.codes.SERVICE_UNAVAILABLE


def whole_request(config: ProtocolConfiguration | None) -> list[ProcessingRequest]:
    """Return the messages with which a gateway reports a request and its response, in chunks and with trailers."""
    served = Metadata({CHOICE: Struct.from_dict({SERVED: A})})
    return [
        headers(protocol_config=config),
        ProcessingRequest(request_body=HttpBody(b"ask")),
        ProcessingRequest(request_body=HttpBody(b"ed", end_of_stream=True)),
        ProcessingRequest(request_trailers=HttpTrailers()),
        ProcessingRequest(response_headers=HttpHeaders(), metadata_context=served),
        ProcessingRequest(response_body=HttpBody(b"told", end_of_stream=True)),
        ProcessingRequest(response_trailers=HttpTrailers()),
    ]


async def test_streamed_bodies_pass_unchanged_and_the_serving_endpoint_is_known(pool: Pool) -> None:
    first, *answers = await told(pool, *whole_request(DUPLEX))
    assert chosen(first) == A
    streamed = [
        (one.request_body or one.response_body).response.body_mutation.streamed_response
        for one in answers
        if one.request_body or one.response_body
    ]
    assert [(one.body, one.end_of_stream) for one in streamed] == [(b"ask", False), (b"ed", True), (b"told", True)]
    assert answers[2].request_trailers is not None
    assert answers[3].response_headers is not None
    assert answers[5].response_trailers is not None
    assert pool.picker.served == {A: 1}


async def test_bodies_that_are_not_streamed_pass_unchanged(pool: Pool) -> None:
    answers = await told(pool, *whole_request(None))
    assert len(answers) == 7
    assert all(
        (one.request_body or one.response_body).response.body_mutation is None
        for one in answers
        if one.request_body or one.response_body
    )


async def test_a_response_without_the_serving_endpoint_ends_the_stream_with_an_error(pool: Pool) -> None:
    with pytest.raises(GRPCError, match="say which endpoint served") as refused:
        await told(pool, headers(), ProcessingRequest(response_headers=HttpHeaders()))
    assert refused.value.status is Status.INVALID_ARGUMENT


async def test_the_picker_is_alive_at_once_and_ready_once_it_knows_the_pool(pool: Pool) -> None:
    async def asked() -> list[int]:
        stub = HealthStub(pool.channel)
        names = ("liveness", "readiness", PROCESSOR)
        return [(await stub.Check(HealthCheckRequest(service=name))).status for name in names]

    serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
    assert await asked() == [serving, serving, serving]
    pool.endpoints = None
    assert await asked() == [serving, not_serving, not_serving]
    with pytest.raises(GRPCError, match="ask for one of liveness, readiness"):
        await HealthStub(pool.channel).Check(HealthCheckRequest(service="chat"))


async def test_grpcs_own_client_understands_the_picker(pool: Pool) -> None:
    def ask() -> list[ProcessingResponse]:
        with grpc.insecure_channel(f"127.0.0.1:{pool.port}") as channel:
            return list(ExternalProcessorSyncStub(channel).process(whole_request(DUPLEX)))

    answers = await asyncio.to_thread(ask)
    assert chosen(answers[0]) == A
    assert len(answers) == 7
