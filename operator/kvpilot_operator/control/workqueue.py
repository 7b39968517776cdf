"""The work queue. A service has at most one reconcile at a time."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.errors import ClusterError, Conflict, Throttled
from kvpilot_operator.state.snapshot import ServiceKey

log = logging.getLogger(__name__)

# A reconcile mostly waits for the API server. With this many workers, a few slow services do not block the others.
WORKERS = 32
_BACKOFF = Backoff(0.5, 60.0)
# Longest pause before a retry if the server could not be reached, so that its return is noticed soon.
_LAST_UNREACHED_SECONDS = 5.0
# One in this many reconciles is of a service that is merely due, even if many changed services wait.
_LOW_PRIORITY_EACH = 4


@dataclass(slots=True)
class Attempts:
    """The state that the queue keeps of one service between two reconciles."""

    failures: int = 0
    """Consecutive failures of the request `failed`. If another request fails, the count restarts at one."""
    failed: str = ""
    """The request that failed, or the name of the operator's own error."""
    held: bool | None = None
    """None outside a back-off. In a back-off, True if the API server requested the pause, else False."""
    again: bool | None = None
    """None unless the service was added while its reconcile ran. Then True if a change was the reason, else False."""
    timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Stop the timer of this service's next retry."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class WorkQueue:
    """Two queues of services: changed ones, and those that are merely due.

    Changed services mostly come first. Within a queue, the next service is the oldest one of the namespaces with the
    fewest running reconciles. A change ends a back-off early, unless the API server requested the pause.

    `run` reconciles a service, and returns the seconds until its next reconcile, or None to wait for a change.
    `attempts` returns the queue's memory of a service, or None if the service is gone.
    """

    def __init__(
        self, run: Callable[[ServiceKey], Awaitable[float | None]], attempts: Callable[[ServiceKey], Attempts | None]
    ) -> None:
        self._run = run
        self._attempts = attempts
        # Dicts serve as ordered sets.
        self._changed: dict[ServiceKey, None] = {}
        self._due: dict[ServiceKey, None] = {}
        self._any = asyncio.Event()
        self._taken = 0
        self._running: set[ServiceKey] = set()
        self._under_way: Counter[str] = Counter()

    @property
    def depth(self) -> int:
        """The number of services that wait for a reconcile."""
        return len(self._changed) + len(self._due)

    def add(self, key: ServiceKey, *, changed: bool = True) -> None:
        """Reconcile a service as soon as a worker is free.

        Services that have `changed` are reconciled before most others.
        """
        known = self._attempts(key)
        if known is None:
            return
        if known.held is not None and (known.held or not changed):
            return  # the retry timer of this service adds it later
        if key in self._running:
            known.again = changed or known.again or False
        elif changed:
            self._due.pop(key, None)
            self._changed.setdefault(key)
        elif key not in self._changed:
            self._due.setdefault(key)
        self._any.set()

    async def work(self) -> None:
        """Take services from the queue and reconcile them, one after another, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._worker())

    async def _next(self) -> ServiceKey:
        while not self.depth:
            self._any.clear()
            await self._any.wait()
        self._taken += 1
        low = not self._changed or (self._due and self._taken % _LOW_PRIORITY_EACH == 0)
        queue = self._due if low else self._changed
        key = min(queue, key=lambda one: self._under_way[one.namespace])
        del queue[key]
        return key

    async def _worker(self) -> None:
        while True:
            key = await self._next()
            known = self._attempts(key)
            if known is None:
                continue
            self._running.add(key)
            self._under_way[key.namespace] += 1
            try:
                await self._one(key, known)
            finally:
                self._running.discard(key)
                self._under_way -= Counter((key.namespace,))
                # Look up the attempts again, because another service may have taken the name during the reconcile.
                known = self._attempts(key)
                if known is not None and known.again is not None:
                    changed, known.again = known.again, None
                    self.add(key, changed=changed)

    async def _one(self, key: ServiceKey, known: Attempts) -> None:
        began = time.monotonic()
        try:
            again = await self._run(key)
        except Conflict as error:
            # Another client (a user, an autoscaler) wrote first. Reconcile again, without a delay the first time.
            if known.failures:
                self._retry(key, known, error.request, error)
            else:
                known.failures, known.failed, known.again = 1, error.request, True
        except Throttled as error:
            self._retry(key, known, error.request, error, at_least=error.retry_after)
        except ClusterError as error:
            at_most = _LAST_UNREACHED_SECONDS if error.away else math.inf
            self._retry(key, known, error.request, error, at_most=at_most)
        except Exception as error:
            log.exception("reconcile failed", extra={"service": str(key)})
            self._retry(key, known, type(error).__name__, "unexpected error")
        else:
            known.failures, known.failed, known.held = 0, "", None
            if again is not None:
                self._add_after(key, known, again)
            log.debug("reconcile took %.3f s", time.monotonic() - began, extra={"service": str(key)})

    def _retry(
        self, key: ServiceKey, known: Attempts, failed: str, why: object, *, at_least: float = 0.0,
        at_most: float = math.inf,
    ) -> None:  # fmt: skip
        before = known.failures if failed == known.failed else 0
        wait = max(at_least, min(_BACKOFF.pause(before), at_most))
        known.failures, known.failed, known.held = before + 1, failed, at_least > 0
        log.warning("reconcile failed, again in %.1f s: %s", wait, why, extra={"service": str(key)})
        self._add_after(key, known, wait)

    def _add_after(self, key: ServiceKey, known: Attempts, seconds: float) -> None:
        """Add the service after `seconds`, and cancel an earlier timer."""
        known.stop()
        if self._attempts(key) is known:
            known.timer = asyncio.get_running_loop().call_later(seconds, self._ring, key, known)

    def _ring(self, key: ServiceKey, known: Attempts) -> None:
        known.timer, known.held = None, None
        self.add(key)
