"""Reasons for missing pods of a group come from StatefulSets' Events, which the operator reads at a limited rate."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe.api_reads import EVENT_SECONDS, ApiReads, refusal_of
from kvpilot_operator.state.objects import DeploymentView, PodView
from kvpilot_operator.state.snapshot import ServerFacts, ServiceKey
from support.answering_server import Server, status
from support.services import pod

KEY = ServiceKey("a", "chat")
GROUPS = DeploymentView("rev", "k4v4", 2, kind="LeaderWorkerSet", nodes=2)
QUOTA = "exceeded quota: team, requested: pods=1, used: pods=0, limited: pods=0"


def event(reason: str, time: str | None, name: str = "chat-rev-0", **more: Any) -> dict[str, Any]:
    message = f'create Pod {name} in StatefulSet chat-rev failed error: pods "{name}" is forbidden: {QUOTA}'
    return {"reason": reason, "message": message, "lastTimestamp": time, **more}


def at(minute: int) -> str:
    return f"2026-11-24T00:{minute:02}:00Z"


@pytest.mark.parametrize(
    ("events", "refusal"),
    [
        ([], None),
        ([event("FailedCreate", at(1))], QUOTA),
        ([event("FailedCreate", at(1)), event("SuccessfulCreate", at(2))], None),
        ([event("FailedCreate", at(3)), event("SuccessfulCreate", at(2))], QUOTA),
        ([event("RecreatePod", at(9)), event("FailedCreate", at(3))], QUOTA),
        ([event("FailedCreate", None, eventTime=at(3)), event("SuccessfulCreate", at(2))], QUOTA),
        ([event("FailedCreate", at(1), message="no more"), event("SuccessfulCreate", None)], "no more"),
        ([{"reason": "FailedCreate"}], "FailedCreate"),
    ],
)
def test_the_newest_refusal_is_the_reason_unless_a_pod_was_created_since(
    events: list[dict[str, Any]], refusal: str | None
) -> None:
    assert refusal_of(events) == refusal


def leader(number: int, workers: int) -> PodView:
    name = f"chat-rev-{number}"
    return pod("rev", name=name, workers=tuple(pod("rev", name=f"{name}-{i + 1}") for i in range(workers)))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server.up() as one:
        yield one


def answering(server: Server, *events: dict[str, Any]) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"items": list(events)})

    server.answer = answer


@pytest.mark.parametrize(
    ("leaders", "name"),
    [
        ([], "chat-rev"),
        ([leader(0, 1)], "chat-rev"),
        ([leader(0, 1), leader(1, 0)], "chat-rev-1"),
    ],
)
async def test_events_of_the_stateful_set_that_lacks_pods_are_read(
    server: Server, leaders: list[PodView], name: str
) -> None:
    answering(server, event("FailedCreate", at(1)))
    told = await ApiReads(server.cluster, ServerFacts(), lambda: 0.0).refusals(KEY, [GROUPS], leaders)
    assert told == {"rev": QUOTA}
    [asked] = server.asked
    assert asked.path == "/api/v1/namespaces/a/events"
    assert asked.query["fieldSelector"] == f"involvedObject.kind=StatefulSet,involvedObject.name={name}"


async def test_no_events_are_read_for_complete_groups_and_deployments(server: Server) -> None:
    deployment = DeploymentView("other", "k4v4", 3)
    events = ApiReads(server.cluster, ServerFacts(), lambda: 0.0)
    assert await events.refusals(KEY, [GROUPS, deployment], [leader(0, 1), leader(1, 1)]) == {}
    assert server.asked == []


async def test_events_are_cached_for_a_time_but_errors_are_not(server: Server) -> None:
    now = 0.0
    events = ApiReads(server.cluster, ServerFacts(), lambda: now)
    server.answer = status(403)
    with pytest.raises(ClusterError):
        await events.refusals(KEY, [GROUPS], [])
    answering(server, event("FailedCreate", at(1)))
    assert await events.refusals(KEY, [GROUPS], []) == {"rev": QUOTA}
    now = EVENT_SECONDS - 1
    assert await events.refusals(KEY, [GROUPS], []) == {"rev": QUOTA}
    answering(server, event("SuccessfulCreate", at(2)))
    now = EVENT_SECONDS
    assert await events.refusals(KEY, [GROUPS], []) == {}
    assert len(server.asked) == 3
