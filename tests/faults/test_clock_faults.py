"""The operator's clock jumps by an hour in either direction. No decision changes, and pressure stays visible."""

import asyncio
import time

import pytest
import pytest_asyncio

from kvpilot_localcluster.toolbox.faketime import libfaketime
from support.faulty_record import record
from support.faulty_world import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SUSTAINED = 10


class Clock:
    """Wall clock of one process. As on a real machine, setting it does not change the monotonic clock."""

    def __init__(self, file) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the machine's clock."""
        self._file.write_text(f"{seconds:+d}\n")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(libfaketime()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


@pytest_asyncio.fixture(loop_scope="session")
async def clock(world, tmp_path):
    """Start the operator again under a clock of its own."""
    shown = Clock(tmp_path / "clock")
    await world.stop_operator()
    await world.start_operator(await asyncio.to_thread(lambda: shown.environment))
    yield shown
    await world.stop_operator()
    await world.start_operator()


async def test_a_clock_that_jumps_changes_no_decision_and_stops_no_observation(world, clock):
    pressure = {"highPercent": 80, "sustainedSeconds": SUSTAINED}
    await world.serving("timed", 1, kvCache={"mode": "Recommend", "ladder": ["k4v4"], "pressure": pressure})

    async def calm() -> bool:
        return await world.condition("timed", "MemoryPressured") == ("False", "Idle")

    await until(calm, "a window is full and shows that nothing runs")
    before = await world.status("timed")
    for jump, words in ((3600, "forward"), (0, "back")):
        clock.set(jump)

        async def moved(jump: int = jump) -> bool:
            """Return True once the newest scrape has the new clock's time."""
            return abs(await world.newest_scrape("timed") - time.time() - jump) < 60

        taken = await until(moved, f"scrapes continue after the clock went {words}")
        taken += await world.dial()
        await until(calm, f"the window is full after the clock went {words}")
        after = await world.status("timed")
        assert after.get("decisions") == before.get("decisions")
        assert await world.condition("timed", "Serving") == ("True", "Serving")
        record(
            f"clock set {words} by an hour",
            taken,
            what="scrapes continue by the new clock, and a changed replica count takes effect",
        )
    pod = (await world.pods("timed"))[0]
    await world.make_ill(pod, usage=0.95, running=8, waiting=6)

    async def pressured() -> bool:
        return (await world.condition("timed", "MemoryPressured"))[0] == "True"

    noticed = await until(pressured, "pressure is noticed although the clock went back")
    record(
        "memory pressure after a clock was set back",
        noticed,
        what=f"MemoryPressured turns True (sustainedSeconds: {SUSTAINED})",
    )
    await world.delete("timed")
