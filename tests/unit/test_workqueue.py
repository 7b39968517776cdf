"""The work queue: one reconcile per service at a time, changed services first but none starved, and back-off."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.control import workqueue as module
from kvpilot_operator.control.workqueue import WORKERS, Attempts, WorkQueue
from kvpilot_operator.errors import ClusterError, Conflict, Throttled
from kvpilot_operator.state.snapshot import ServiceKey

REFUSED = ClusterError("PATCH", "/x", 500, "no")


def key(name: str | int) -> ServiceKey:
    return ServiceKey("a", str(name))


class Log:
    """Handler that records every reconcile, and fails it while `error` is set."""

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


def queue_of(log: Callable[[ServiceKey], Awaitable[float | None]]) -> WorkQueue:
    """Return a work queue of services that all exist and have records."""
    known: dict[ServiceKey, Attempts] = {}
    return WorkQueue(log, lambda one: known.setdefault(one, Attempts()))


async def worked(queue: WorkQueue, enough: Callable[[], bool]) -> None:
    """Work until the condition holds, and a little longer to catch surplus reconciles."""
    task = asyncio.create_task(queue.work())
    async with asyncio.timeout(30):
        while not enough():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a back-off longer than any test."""
    monkeypatch.setattr(module, "_BACKOFF", Backoff(60.0, 60.0))


async def test_a_service_added_many_times_waits_once() -> None:
    log = Log()
    queue = queue_of(log)
    for _ in range(100):
        queue.add(key("x"))
        queue.add(key("x"), changed=False)
    assert queue.depth == 1
    await worked(queue, lambda: bool(log.done))
    assert log.done == ["x"]


async def test_a_change_during_a_reconcile_starts_another_one_afterwards() -> None:
    log = Log(0.05)
    queue = queue_of(log)
    log.begin = lambda one: queue.add(one) if not log.done else None
    queue.add(key("x"))
    await worked(queue, lambda: len(log.done) >= 2)
    assert log.done == ["x", "x"]
    assert log.most == 1


async def test_changed_services_are_reconciled_first_and_unchanged_ones_are_not_starved() -> None:
    log = Log()
    queue = queue_of(log)
    for i in range(40):
        queue.add(key(f"look-{i}"), changed=False)
    for i in range(40):
        queue.add(key(f"change-{i}"))
    queue.add(key("look-39"))  # the service changed during its reconcile
    await worked(queue, lambda: len(log.done) >= 80)
    assert len(log.done) == 80
    first = log.done[: 40 + WORKERS]
    assert sum(name.startswith("change") for name in first) >= 30
    assert sum(name.startswith("look") for name in first) >= 8
    assert log.done.index("look-39") < 60


@pytest.mark.usefixtures("patient")
async def test_a_due_reconcile_does_not_shorten_the_back_off() -> None:
    log = Log()
    log.error = REFUSED
    queue = queue_of(log)
    queue.add(key("x"))
    await worked(queue, lambda: bool(log.done))
    queue.add(key("x"), changed=False)
    assert queue.depth == 0
    log.error = None
    queue.add(key("x"))  # the user's edit may fix the failure
    await worked(queue, lambda: len(log.done) >= 2)
    assert len(log.done) == 2


async def test_a_pause_requested_by_the_server_is_kept_even_after_a_change() -> None:
    log = Log()
    log.error = Throttled("PATCH", "/x", 429, "too many", 0.6)
    queue = queue_of(log)
    queue.add(key("x"))
    await worked(queue, lambda: bool(log.done))
    queue.add(key("x"))
    assert queue.depth == 0
    await worked(queue, lambda: len(log.done) >= 2)
    assert len(log.done) == 2


@pytest.mark.usefixtures("patient")
async def test_conflicts_are_retried_at_once_and_then_with_a_pause() -> None:
    log = Log()
    log.error = Conflict("PATCH", "/x", 409, "changed")
    queue = queue_of(log)
    queue.add(key("x"))
    await worked(queue, lambda: len(log.done) >= 2)
    assert len(log.done) == 2


@pytest.mark.parametrize(("status", "longest"), [(0, 5.0), (500, 60.0)])
async def test_a_reconcile_is_retried_at_shorter_intervals_while_the_server_is_unreachable(
    status: int, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.error = ClusterError("PATCH", "/x", status, "no")
    queue = queue_of(log)
    waits: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def soon(seconds: float, call: Callable[..., object], *rest: object, **more: Any) -> asyncio.TimerHandle:
        if key("x") not in rest:
            return later(seconds, call, *rest, **more)
        waits.append(seconds)
        return later(0.001, call, *rest)

    monkeypatch.setattr(loop, "call_later", soon)
    queue.add(key("x"))
    await worked(queue, lambda: len(waits) >= 12)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(waits) == longest


async def test_an_unexpected_error_in_a_reconcile_stops_no_other_service() -> None:
    log = Log()
    log.error = ZeroDivisionError()
    queue = queue_of(log)
    queue.add(key("x"))
    queue.add(key("y"))
    await worked(queue, lambda: len(log.done) >= 2)
    assert sorted(log.done) == ["x", "y"]


async def test_a_namespace_with_many_slow_services_leaves_the_next_worker_to_another() -> None:
    began: list[ServiceKey] = []
    ends: list[asyncio.Future[None]] = []

    async def slow(one: ServiceKey) -> None:
        began.append(one)
        ends.append(asyncio.get_running_loop().create_future())
        await ends[-1]

    queue = queue_of(slow)
    task = asyncio.create_task(queue.work())
    for i in range(3 * WORKERS):
        queue.add(key(i))
    while len(began) < WORKERS:
        await asyncio.sleep(0)
    others = [ServiceKey("b", "x"), ServiceKey("c", "x"), ServiceKey("b", "y")]
    for other in others:
        queue.add(other)
    for i, _ in enumerate(others):
        ends[i].set_result(None)
    while len(began) < WORKERS + len(others):
        await asyncio.sleep(0)
    assert began[WORKERS:] == [others[0], others[1], others[2]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_namespace_gets_all_workers_if_no_other_namespace_waits() -> None:
    log = Log(0.01)
    queue = queue_of(log)
    for i in range(2 * WORKERS):
        queue.add(key(i))
    most = 0

    def count(_: ServiceKey) -> None:
        nonlocal most
        most = max(most, log.running.total())

    log.begin = count
    await worked(queue, lambda: len(log.done) >= 2 * WORKERS)
    assert most == WORKERS


class Counted(Backoff):
    """Back-off without waiting that records the failure count before each pause."""

    seen: ClassVar[list[int]] = []

    def pause(self, failures: int) -> float:
        self.seen.append(failures)
        return 0.0


async def test_pauses_grow_while_the_same_request_fails_and_restart_after_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counted, "seen", [])
    monkeypatch.setattr(module, "_BACKOFF", Counted(0.0, 0.0))
    log, paths = Log(), ["/a", "/a", "/a", "/b", "/b", "/a", "", "/a"]
    queue = queue_of(log)

    def fail(one: ServiceKey) -> None:
        path = paths[len(log.done) - 1] if len(log.done) <= len(paths) else ""
        log.error = ClusterError("PATCH", path, 500, "no") if path else None
        if log.error is None and len(log.done) < len(paths):
            queue.add(one)

    log.hook = fail
    queue.add(key("x"))
    await worked(queue, lambda: len(log.done) > len(paths))
    assert Counted.seen == [0, 1, 2, 0, 1, 0, 0]
