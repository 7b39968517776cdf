"""A service's probe: at most one at a time, its result kept until a reconcile has taken it in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.backoff import Backoff
from kvpilot_operator.errors import KvpilotError
from kvpilot_operator.state.decision import Found, ProbeFailed, ProbeResult, Request
from kvpilot_operator.state.snapshot import ServiceKey

log = logging.getLogger(__name__)

# A probe that failed and that nobody counts (a baseline captured ahead of need) is tried again after this long, twice
# as long each time it fails again.
BACKOFF = Backoff(15.0, 900.0)

Run = Callable[[ServiceKey, Spec, Request], Awaitable[Found]]


class Probe:
    """`ensure` starts what a decision asks for; `on_result` is called with the service when something was found."""

    __slots__ = ("_closed", "_failures", "_key", "_on_result", "_result", "_retry", "_run", "_running", "_task")

    def __init__(self, key: ServiceKey, run: Run, on_result: Callable[[ServiceKey], None]) -> None:
        self._key = key
        self._run = run
        self._on_result = on_result
        self._running: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._result: ProbeResult | None = None
        self._failures = 0
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def result(self) -> ProbeResult | None:
        """One that is done and still of interest, or the one that runs."""
        return self._result or (ProbeResult(self._running, None) if self._running is not None else None)

    def ensure(self, spec: Spec, request: Request | None) -> None:
        """Make `request` the only probe: start it unless it runs or is done, cancel what is not asked for."""
        wanted = request.identity if request is not None else None
        if self._running is not None and self._running.identity != wanted:
            self._cancel()
        if self._result is not None and self._result.request.identity != wanted:
            self._drop()
        if request is not None and self.result is None and not self._closed:
            self._running = request
            self._task = asyncio.create_task(self._probe(spec, request))

    def close(self) -> None:
        """The service is gone: cancel its probe, and start no other."""
        self._closed = True
        self._cancel()
        self._drop()

    async def ended(self) -> None:
        """Wait for a probe that was cancelled."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _cancel(self) -> None:
        self._running = None
        if self._task is not None:
            self._task.cancel()

    def _drop(self) -> None:
        self._result = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    async def _probe(self, spec: Spec, request: Request) -> None:
        extra = {"service": str(self._key), "probe": request.identity}
        log.info("probe starts", extra=extra)
        outcome: Found
        try:
            outcome = await self._run(self._key, spec, request)
        except KvpilotError as error:
            outcome = ProbeFailed(type(error).__name__, str(error))
            log.warning("probe failed: %s", error, extra=extra)
        except Exception as error:
            outcome = ProbeFailed("ProbeCrashed", f"{type(error).__name__}: {error}")
            log.exception("probe crashed", extra=extra)
        else:
            log.info("probe is done", extra=extra)
        if self._running is not request:
            return  # it was cancelled in the moment in which it ended
        self._running, self._result = None, ProbeResult(request, outcome)
        if isinstance(outcome, ProbeFailed):
            self._retry = asyncio.get_running_loop().call_later(BACKOFF.pause(self._failures), self._again)
            self._failures += 1
        else:
            self._failures = 0
        self._on_result(self._key)

    def _again(self) -> None:
        self._drop()
        self._on_result(self._key)
