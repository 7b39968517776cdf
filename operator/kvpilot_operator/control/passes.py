"""One idempotent pass over one service at a time; every edge only asks for another one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from kvpilot_operator.errors import ClusterError, Conflict
from kvpilot_operator.state.snapshot import ServiceKey

log = logging.getLogger(__name__)

WORKERS = 8
_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 60.0


class Passes:
    """A queue of services to look at. A service that is asked for twice waits once; one that is being looked at is
    looked at again afterwards; one whose pass failed comes back with exponential back-off.
    """

    def __init__(self, run: Callable[[ServiceKey], Awaitable[float | None]]) -> None:
        self._run = run
        self._queue: asyncio.Queue[ServiceKey] = asyncio.Queue()
        self._queued: set[ServiceKey] = set()
        self._running: set[ServiceKey] = set()
        self._again: set[ServiceKey] = set()
        self._failures: dict[ServiceKey, int] = {}
        self._timers: dict[ServiceKey, asyncio.TimerHandle] = {}

    @property
    def depth(self) -> int:
        """How many services wait for a pass."""
        return len(self._queued)

    def ask(self, key: ServiceKey) -> None:
        """Ask for a pass as soon as a worker is free."""
        if key in self._running:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._queue.put_nowait(key)

    def ask_in(self, key: ServiceKey, seconds: float) -> None:
        """Ask for a pass after a while; an earlier timer of the same service is replaced."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._ring, key)

    async def work(self) -> None:
        """Run passes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._worker())

    def _ring(self, key: ServiceKey) -> None:
        self._timers.pop(key, None)
        self.ask(key)

    async def _worker(self) -> None:
        while True:
            key = await self._queue.get()
            self._queued.discard(key)
            self._running.add(key)
            try:
                await self._one(key)
            finally:
                self._running.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.ask(key)

    async def _one(self, key: ServiceKey) -> None:
        began = time.monotonic()
        try:
            again = await self._run(key)
        except Conflict:
            # Somebody wrote first (a user, a kubelet, our own last pass): observe again.
            self._again.add(key)
        except ClusterError as error:
            self._retry(key, str(error))
        except Exception:
            log.exception("pass failed", extra={"service": str(key)})
            self._retry(key, "unexpected error")
        else:
            self._failures.pop(key, None)
            if again is not None:
                self.ask_in(key, again)
            log.debug("pass took %.3f s", time.monotonic() - began, extra={"service": str(key)})

    def _retry(self, key: ServiceKey, why: str) -> None:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = min(_FIRST_RETRY_SECONDS * 2**failures, _LAST_RETRY_SECONDS)
        log.warning("pass failed, again in %.1f s: %s", wait, why, extra={"service": str(key)})
        self.ask_in(key, wait)
