"""The operator is killed (SIGKILL) at many moments of the story, and the final state is always the same.

This test is marked `long`. Two faster tests run in CI: tests/unit/test_decide_rollout.py kills between any two writes,
and tests/faults/test_unprobed_pods.py uses a real API server and the operator's process.
"""

import asyncio
import contextlib

import pytest

from kvpilot_demo.screen import Screen
from kvpilot_demo.story import BAD, GOOD, Story
from kvpilot_demo.world import World
from kvpilot_operator.errors import ClusterError

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def at(status, *path):
    here = status
    for name in path:
        here = here.get(name) if isinstance(here, dict) else None
    return here


def condition(status, kind):
    return next((c["status"] for c in status.get("conditions", []) if c["type"] == kind), None)


def canary(dtype, stage):
    return lambda s: at(s, "canary", "dtype") == dtype and at(s, "canary", "stage") == stage


# The operator is killed once for each entry, in any order: an observation, and the seconds from it to the kill.
MOMENTS = [
    ("the object is new", lambda s: True, 0.0),
    ("the first revision is chosen", lambda s: bool(at(s, "stable")), 0.0),
    ("the engine starts", lambda s: bool(at(s, "stable")), 8.0),
    ("the service is ready", lambda s: condition(s, "Ready") == "True", 0.0),
    ("the baseline is being captured", lambda s: condition(s, "Ready") == "True", 4.0),
    ("the baseline is kept", lambda s: bool(at(s, "accuracy", "baseline")), 0.0),
    ("memory is pressured", lambda s: condition(s, "MemoryPressured") == "True", 0.0),
    ("the canary is decided", canary(GOOD, "Starting"), 0.0),
    ("the canary starts", canary(GOOD, "Starting"), 15.0),
    ("the canary answers", canary(GOOD, "Probing"), 0.0),
    ("the canary is being probed", canary(GOOD, "Probing"), 6.0),
    ("the canary is being promoted", canary(GOOD, "Promoting"), 0.0),
    ("the canary is promoted", lambda s: "canary" not in s and "history" in s, 0.0),
    ("the bad canary is decided", canary(BAD, "Starting"), 0.0),
    ("the bad canary is being probed", canary(BAD, "Probing"), 3.0),
    ("the bad canary is rolled back", canary(BAD, "RollingBack"), 0.0),
]


async def kill_at_each_moment(world: World, killed: list[str]) -> None:
    left = list(MOMENTS)
    while left:
        await asyncio.sleep(0.05)
        with contextlib.suppress(ClusterError):
            service = await world.service()
            if service is None:
                continue
            status = service.get("status") or {}
            due = next((m for m in left if m[1](status)), None)
            if due is None:
                continue
            left.remove(due)
            await asyncio.sleep(due[2])
            world.kill_operator()
            killed.append(due[0])
            world.start_operator()


async def test_if_the_operator_is_killed_a_service_reaches_the_same_state(tmp_path):
    killed: list[str] = []
    async with World.up(tmp_path, lambda label, fraction: None) as world:
        killer = asyncio.create_task(kill_at_each_moment(world, killed))
        try:
            record = await Story(world, Screen(plain=True)).run()
        finally:
            killer.cancel()
        service = await world.service()
        pods = await world.pods()
    assert len(killed) >= 10, killed
    assert record.failed_requests == 0, record.failures
    assert record.capacity_ratio >= 3.6  # the same bound as in test_demo
    status = service["status"]
    assert status["kvCache"]["activeDtype"] == GOOD
    assert [d["dtype"] for d in status["kvCache"]["denied"]] == [BAD]
    assert (status["history"][0]["dtype"], status["history"][0]["verdict"]) == (BAD, "Failed")
    assert "canary" not in status
    assert len([p for p in pods if not p["metadata"].get("deletionTimestamp")]) == 1
