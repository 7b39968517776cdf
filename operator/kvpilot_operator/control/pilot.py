"""Ties observe, decide and act together for the whole fleet."""

from __future__ import annotations

import asyncio
import logging

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.control.passes import Passes
from kvpilot_operator.control.prober import Prober
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.windows import Windows
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot

log = logging.getLogger(__name__)


class Pilot:
    """All services of the fleet: who they are, one pass over one of them, and the loop that scrapes them."""

    def __init__(
        self,
        observer: Observer,
        actor: Actor,
        prober: Prober,
        windows: Windows,
        telemetry: Telemetry,
        scrape_seconds: float,
    ) -> None:
        self._observer = observer
        self._actor = actor
        self._prober = prober
        self._windows = windows
        self._telemetry = telemetry
        self._scrape_seconds = scrape_seconds
        self._services: set[ServiceKey] = set()
        self.passes = Passes(self._pass)
        prober.on_result = self.passes.ask

    def seen(self, key: ServiceKey) -> None:
        """Something about this service changed."""
        self._services.add(key)
        self.passes.ask(key)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.passes.work())
            group.create_task(self._scrape_for_ever())

    async def _pass(self, key: ServiceKey) -> float | None:
        with self._telemetry.timed_pass(self.passes.depth):
            snapshot = await self._observer.snapshot(key, self._prober.result(key))
            if snapshot is None:
                self._forget(key)
                return None
            decision = decide(snapshot)
            await self._actor.perform(snapshot, decision)
            if snapshot.spec is not None:
                self._prober.ensure(key, snapshot.spec, decision.probe)
        self._telemetry.decided(snapshot, decision)
        _tell(snapshot, decision)
        return decision.again_seconds

    def _forget(self, key: ServiceKey) -> None:
        self._services.discard(key)
        self._actor.forget(key)
        self._prober.forget(key)
        self._windows.forget(key)
        self._telemetry.forget(key)

    async def _scrape_for_ever(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            await asyncio.gather(*(self._scrape(key) for key in sorted(self._services)))
            self._telemetry.scraped(clock() - began)
            await asyncio.sleep(max(0.0, self._scrape_seconds - (clock() - began)))

    async def _scrape(self, key: ServiceKey) -> None:
        try:
            await self._observer.scrape(key)
        except ClusterError as error:
            log.warning("scrape failed: %s", error, extra={"service": str(key)})
        self.passes.ask(key)


def _tell(s: Snapshot, decision: Decision) -> None:
    for entry in decision.status.decisions:
        if entry.time == s.now and entry not in s.status.decisions:
            log.info(
                "%s: %s: %s",
                entry.action,
                entry.reason,
                entry.message,
                extra={"service": str(s.key), "from_dtype": entry.from_dtype, "to_dtype": entry.to_dtype},
            )
