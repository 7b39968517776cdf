"""A replica leads as soon as the API server grants the Lease, and releases it when it stops."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.control import leader as leader_module
from kvpilot_operator.control.leader import Replica, first_of, prepare
from kvpilot_operator.errors import ClusterError, NotLeader


class FakeLeader:
    """Stand-in for the operator's leader, which records its calls."""

    def __init__(self, fence: WriteFence) -> None:
        self._fence = fence
        self.told: list[str] = []

    async def ended(self) -> None:
        self.told.append("leads")
        await asyncio.Event().wait()

    async def quiet(self, seconds: float = 0.0) -> bool:
        self._fence.close()
        self.told.append("quiet")
        return True

    async def close(self) -> None:
        self.told.append("closed")


async def led(fence: WriteFence, failures: list[Exception]) -> FakeLeader:
    leader, stop = FakeLeader(fence), asyncio.Event()

    async def start() -> Any:
        if failures:
            raise failures.pop(0)
        return leader

    async def stop_soon() -> None:
        while not leader.told:
            await asyncio.sleep(0.01)
        stop.set()

    async with asyncio.timeout(5):
        await asyncio.gather(life(fence, start, stop), stop_soon())
    return leader


async def life(fence: WriteFence, start: Callable[[], Awaitable[Any]], stop: asyncio.Event) -> None:
    """Lead until told to stop, and then release the Lease, as the operator's process does."""
    one = Replica(fence, start)

    async def lead() -> None:
        await one.lead()
        await one.ended()

    try:
        await first_of(stop.wait(), lead())
    finally:
        await one.end()


async def test_a_replica_retries_if_the_api_server_refuses_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "_PAUSE_SECONDS", 0.05)
    began = time.monotonic()
    leader = await led(WriteFence(), [ClusterError("GET", "/version", code, "starting") for code in (500, 429, 0)])
    assert leader.told == ["leads", "quiet", "closed"]
    assert time.monotonic() - began >= 0.15


async def test_a_standby_replica_stops_when_told_to() -> None:
    stop = asyncio.Event()

    async def refused() -> Any:
        stop.set()
        raise ClusterError("GET", "/version", 503, "starting")

    async with asyncio.timeout(5):
        await life(WriteFence(), refused, stop)


async def test_a_stopping_replica_may_not_write() -> None:
    fence = WriteFence()
    await led(fence, [])
    with pytest.raises(NotLeader), fence.write("PATCH", "/x"):
        pass


async def test_an_unexpected_error_ends_the_operators_replica() -> None:
    with pytest.raises(KeyError):
        await led(WriteFence(), [KeyError("a defect")])


def test_pythons_garbage_collector_skips_objects_that_exist_from_the_start() -> None:
    before = len(gc.get_objects())
    prepare()
    try:
        assert gc.get_freeze_count() > before / 2
        assert len(gc.get_objects()) < before / 100
    finally:
        gc.unfreeze()
