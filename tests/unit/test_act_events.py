"""A repeated event raises a count instead of adding an object. Failed events never block the work that they report."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from kvpilot_operator.act.events import MAX_REMEMBERED, SAME_SECONDS, Events, event_manifest
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ClusterError, NotFound
from kvpilot_operator.state.decision import Event
from support.services import KEY, NOW, manifest, snapshot

S = snapshot(manifest())
PRESSURED = Event("Warning", "MemoryPressured", "KV use 91%")
RELAXED = Event("Normal", "MemoryRelaxed", "KV use 20%")


class Board:
    """API server that keeps events."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.broken = False

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise ClusterError("POST", "/events", 500, "etcd is away")
        name = f"{manifest['metadata']['generateName']}{len(self.events)}"
        self.events[name] = {**manifest, "metadata": {**manifest["metadata"], "name": name}}
        return self.events[name]

    async def merge(self, ref: Ref, patch: dict[str, Any]) -> None:
        if ref.name not in self.events:
            raise NotFound("PATCH", ref.name, 404, "not found")
        self.events[ref.name] |= patch

    @property
    def counts(self) -> list[tuple[str, int]]:
        return [(event["message"], event["count"]) for event in self.events.values()]


async def post(events: Events, *told: Event, seconds: int = 0, **changes: Any) -> None:
    for event in told:
        await events.post(replace(S, now=NOW + timedelta(seconds=seconds), **changes), event)


def test_an_event_names_the_service_the_reporter_and_the_time():
    made = event_manifest(S, PRESSURED)
    about = made["involvedObject"]
    assert (about["kind"], about["namespace"], about["name"], about["uid"]) == (
        "QuantizedLLMService", KEY.namespace, KEY.name, S.uid,
    )  # fmt: skip
    assert (made["type"], made["reason"], made["message"]) == ("Warning", "MemoryPressured", "KV use 91%")
    assert made["source"]["component"] == made["reportingComponent"] == "kvpilot-operator"
    assert made["firstTimestamp"] == made["lastTimestamp"] == "2026-11-21T12:00:00Z"


async def test_the_same_words_raise_the_count_and_the_time_of_the_first_event():
    board = Board()
    events = Events(board)
    for seconds in (0, 60, 120):
        await post(events, PRESSURED, seconds=seconds)
    await post(events, RELAXED)
    assert board.counts == [("KV use 91%", 3), ("KV use 20%", 1)]
    first = next(iter(board.events.values()))
    assert (first["firstTimestamp"], first["lastTimestamp"]) == ("2026-11-21T12:00:00Z", "2026-11-21T12:02:00Z")


async def test_other_words_and_a_later_day_are_other_events():
    board = Board()
    events = Events(board)
    await post(events, PRESSURED, replace(PRESSURED, message="KV use 95%"))
    await post(events, PRESSURED, seconds=SAME_SECONDS)
    assert [count for _, count in board.counts] == [1, 1, 1]


async def test_an_event_that_was_deleted_meanwhile_is_posted_anew():
    board = Board()
    events = Events(board)
    await post(events, PRESSURED)
    board.events.clear()
    await post(events, PRESSURED)
    assert board.counts == [("KV use 91%", 1)]


async def test_a_refused_event_is_no_failure_and_is_posted_the_next_time():
    board = Board()
    events = Events(board)
    board.broken = True
    await post(events, PRESSURED)
    board.broken = False
    await post(events, PRESSURED)
    assert board.counts == [("KV use 91%", 1)]


async def test_what_is_remembered_is_bounded():
    board = Board()
    events = Events(board)
    numbered = [replace(RELAXED, message=str(number)) for number in range(MAX_REMEMBERED + 1)]
    await post(events, *numbered, numbered[-1], numbered[0])
    assert board.counts[-2:] == [(str(MAX_REMEMBERED), 2), ("0", 1)]
