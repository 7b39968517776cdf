"""A probe of an engine with users rests, so that few of the users' steps carry one of its prefills."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_probes import pace
from kvpilot_probes.client import untold
from kvpilot_probes.pace import LOOK_SECONDS, MOST_SECONDS, REST_SECONDS, SHARE, Pace
from kvpilot_probes.run import measure
from kvpilot_probes.session import GiveWay, Settings
from support.probe_engine import baseline, counting, engine

STEP = 0.005
DECODES = 32 * STEP


class Clock:
    """Clock that moves only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.rests: list[float] = []
        monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(pace, "asyncio", SimpleNamespace(sleep=self.sleep))

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rests.append(seconds)

    async def ask(self, one: Pace, prefill: float) -> None:
        """Send a request that reads its prompt in `prefill` seconds, and then decodes."""
        await one.rest(untold)
        self.now += prefill
        one.read(prefill)
        self.now += DECODES


def beside_users() -> Pace:
    one = Pace()
    one.see(32)
    return one


@given(st.lists(st.floats(STEP, REST_SECONDS * SHARE), min_size=1, max_size=20))
async def test_prefills_take_at_most_their_share_of_the_users_time(prefills: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock, one = Clock(patch), beside_users()
        for prefill in prefills:
            await clock.ask(one, prefill)
        await one.rest(untold)
    assert sum(prefills) <= SHARE * (clock.now - 100.0) * (1 + 1e-9)


async def test_a_probe_of_217_requests_changes_less_than_1_in_20_of_the_users_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The figures are those of the run without rests in decision 111: a step takes 5 ms, and with a prefill 15 ms."""
    clock, one = Clock(monkeypatch), beside_users()
    for _ in range(217):
        await clock.ask(one, 3 * STEP)
    assert (clock.now - 100.0) / STEP > 100 * 217
    assert clock.now - 100.0 < 170


async def test_a_probe_does_not_rest_without_users(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = Clock(monkeypatch), Pace()
    with one.request():
        one.see(1)  # the request of the probe itself
        await clock.ask(one, 0.1)
        await clock.ask(one, 0.1)
    assert clock.rests == []


def test_a_request_that_the_probe_has_closed_does_not_count_as_a_users(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Pace()
    with pytest.raises(GeneratorExit), one.request():
        raise GeneratorExit
    one.see(1)
    assert not one.busy
    with one.request():
        pass
    one.see(1)
    assert one.busy


async def test_rests_are_bounded_and_report_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one, told = Clock(monkeypatch), beside_users(), list[float]()
    one.read(60.0)
    await one.rest(lambda: told.append(clock.now))
    assert clock.now == pytest.approx(100.0 + REST_SECONDS)
    assert len(told) == len(clock.rests) and max(clock.rests) <= LOOK_SECONDS
    for _ in range(1000):
        one.read(60.0)
        await one.rest(untold)
    assert sum(clock.rests) == pytest.approx(MOST_SECONDS)


@pytest.mark.parametrize(("running", "rests"), [(0.0, True), (7.0, True), (7.0, False)])
async def test_a_run_rests_only_if_requested_and_while_users_requests_run(
    monkeypatch: pytest.MonkeyPatch, running: float, rests: bool
) -> None:
    clock = Clock(monkeypatch)

    async def load() -> tuple[float, float]:
        return 0.0, running

    async with engine(counting) as url:
        settings = Settings(tokens=8, concurrency=1, give_way=GiveWay(load, 1.0, rests))
        found = await measure(url, "m", baseline(prompts=3), settings=settings)
    assert len(clock.rests) >= found.requests - 1 if running and rests else not clock.rests


async def test_a_waiting_run_continues_once_users_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, loads = Clock(monkeypatch), [(5.0, 7.0)]

    async def load() -> tuple[float, float]:
        return loads.pop() if loads else (0.0, 0.0)

    async with engine(counting) as url:
        settings = Settings(tokens=8, concurrency=1, give_way=GiveWay(load, 0.0, rests=True))
        found = await measure(url, "m", baseline(prompts=3), settings=settings)
    assert found.prompts == 3
    assert clock.rests == []
