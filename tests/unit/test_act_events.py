"""Events name the service. Failed events never block the work that they report."""

from typing import Any

import pytest

from kvpilot_operator.act.events import event_manifest, post
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.decision import Event
from support.services import KEY, manifest, snapshot

S = snapshot(manifest())
PRESSURED = Event("Warning", "MemoryPressured", "KV use 91%")
RELAXED = Event("Normal", "MemoryRelaxed", "KV use 20%")


class Board:
    """API server that keeps events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.broken = False

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise ClusterError("POST", "/events", 500, "etcd is away")
        self.events.append(manifest)
        return manifest


def test_an_event_names_the_service_the_reporter_and_the_time():
    made = event_manifest(S, PRESSURED)
    about = made["involvedObject"]
    assert (about["kind"], about["namespace"], about["name"], about["uid"]) == (
        "QuantizedLLMService", KEY.namespace, KEY.name, S.uid,
    )  # fmt: skip
    assert (made["type"], made["reason"], made["message"]) == ("Warning", "MemoryPressured", "KV use 91%")
    assert made["source"]["component"] == made["reportingComponent"] == "kvpilot-operator"
    assert made["firstTimestamp"] == made["lastTimestamp"] == "2026-11-21T12:00:00Z"


async def test_each_event_is_one_object_and_a_refused_event_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    await post(board, S, PRESSURED)  # type: ignore[arg-type]
    board.broken = True
    await post(board, S, PRESSURED)  # type: ignore[arg-type]
    assert "event not posted" in caplog.text
    board.broken = False
    await post(board, S, RELAXED)  # type: ignore[arg-type]
    assert [one["message"] for one in board.events] == ["KV use 91%", "KV use 20%"]
