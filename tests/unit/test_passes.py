"""Passes: one a service at a time, changes first but never alone, and nobody hammers a server that says no."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from kvpilot_operator.control import passes as module
from kvpilot_operator.control.passes import WORKERS, Passes
from kvpilot_operator.errors import ClusterError, Conflict, Throttled
from kvpilot_operator.state.snapshot import ServiceKey

REFUSED = ClusterError("PATCH", "/x", 500, "no")


def key(name: str | int) -> ServiceKey:
    return ServiceKey("a", str(name))


class Log:
    """Notes every pass, and fails it while `error` is set."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.done: list[str] = []
        self.running: Counter[str] = Counter()
        self.most = 0
        self.error: Exception | None = None
        self.seconds = seconds
        self.begin: Callable[[ServiceKey], None] = lambda _: None
        self.hook: Callable[[ServiceKey], None] = lambda _: None

    async def __call__(self, one: ServiceKey) -> float | None:
        self.running[one.name] += 1
        self.most = max(self.most, self.running[one.name])
        self.begin(one)
        await asyncio.sleep(self.seconds)
        self.running[one.name] -= 1
        self.done.append(one.name)
        self.hook(one)
        if self.error is not None:
            raise self.error
        return None


async def worked(passes: Passes, enough: Callable[[], bool]) -> None:
    """Work until it is enough, and a moment longer, in which too much would show."""
    task = asyncio.create_task(passes.work())
    async with asyncio.timeout(30):
        while not enough():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off is longer than any test."""
    monkeypatch.setattr(module, "_FIRST_RETRY_SECONDS", 60.0)


async def test_a_service_that_is_asked_for_many_times_waits_once() -> None:
    log = Log()
    passes = Passes(log)
    for _ in range(100):
        passes.ask(key("x"))
        passes.look(key("x"))
    assert passes.depth == 1
    await worked(passes, lambda: bool(log.done))
    assert log.done == ["x"]


async def test_what_changes_during_a_pass_is_looked_at_after_it_and_never_beside_it() -> None:
    log = Log(0.05)
    passes = Passes(log)
    log.begin = lambda one: passes.ask(one) if not log.done else None
    passes.ask(key("x"))
    await worked(passes, lambda: len(log.done) >= 2)
    assert log.done == ["x", "x"]
    assert log.most == 1


async def test_changes_come_first_and_looks_are_not_starved() -> None:
    log = Log()
    passes = Passes(log)
    for i in range(40):
        passes.look(key(f"look-{i}"))
    for i in range(40):
        passes.ask(key(f"change-{i}"))
    passes.ask(key("look-39"))  # it has changed meanwhile
    await worked(passes, lambda: len(log.done) >= 80)
    assert len(log.done) == 80
    first = log.done[: 40 + WORKERS]
    assert sum(name.startswith("change") for name in first) >= 30
    assert sum(name.startswith("look") for name in first) >= 8
    assert log.done.index("look-39") < 60


@pytest.mark.usefixtures("patient")
async def test_a_failed_pass_backs_off_and_a_look_does_not_shorten_that() -> None:
    log = Log()
    log.error = REFUSED
    passes = Passes(log)
    passes.ask(key("x"))
    await worked(passes, lambda: bool(log.done))
    passes.look(key("x"))
    assert passes.depth == 0
    log.error = None
    passes.ask(key("x"))  # a user's edit may well be the cure
    await worked(passes, lambda: len(log.done) >= 2)
    assert len(log.done) == 2


@pytest.mark.usefixtures("patient")
async def test_a_pause_that_the_server_asks_for_is_kept_even_when_something_changes() -> None:
    log = Log()
    log.error = Throttled("PATCH", "/x", 429, "too many", 60.0)
    passes = Passes(log)
    passes.ask(key("x"))
    await worked(passes, lambda: bool(log.done))
    passes.ask(key("x"))
    assert passes.depth == 0
    passes._ring(key("x"))
    assert passes.depth == 1


@pytest.mark.usefixtures("patient")
async def test_conflicts_are_repeated_at_once_and_then_with_a_pause() -> None:
    log = Log()
    log.error = Conflict("PATCH", "/x", 409, "changed")
    passes = Passes(log)
    passes.ask(key("x"))
    await worked(passes, lambda: len(log.done) >= 2)
    assert len(log.done) == 2


@pytest.mark.parametrize(("status", "longest"), [(0, 5.0), (500, 60.0)])
async def test_a_server_that_cannot_be_reached_is_tried_more_often(
    status: int, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.error = ClusterError("PATCH", "/x", status, "no")
    passes = Passes(log)
    waits: list[float] = []

    def soon(one: ServiceKey, seconds: float) -> None:
        waits.append(seconds)
        asyncio.get_running_loop().call_later(0.001, passes._ring, one)

    monkeypatch.setattr(passes, "ask_in", soon)
    passes.ask(key("x"))
    await worked(passes, lambda: len(waits) >= 12)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(waits) == longest


async def test_a_pass_that_breaks_on_a_bug_stops_nobody() -> None:
    log = Log()
    log.error = ZeroDivisionError()
    passes = Passes(log)
    passes.ask(key("x"))
    passes.ask(key("y"))
    await worked(passes, lambda: len(log.done) >= 2)
    assert sorted(log.done) == ["x", "y"]
