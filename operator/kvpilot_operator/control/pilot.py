"""Ties observe, decide and act together for the whole fleet."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.control.prober import Prober
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.control.workqueue import WorkQueue
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.questions import CONDITION
from kvpilot_operator.errors import Conflict, NotFound
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.windows import Windows
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot

log = logging.getLogger(__name__)

# Pages that are fetched in a second at most: a page with its part of a reconcile takes up to 2 ms of a core. A larger
# fleet is scraped less often, 6,000 pods every 13 s.
PAGES_PER_SECOND = 450.0


class Pilot:
    """All services of the fleet: one reconcile of one of them, and the loop that scrapes them."""

    def __init__(
        self,
        cache: InformerCache,
        observer: Observer,
        actor: Actor,
        prober: Prober,
        windows: Windows,
        telemetry: Telemetry,
        scrape_seconds: float,
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._actor = actor
        self._prober = prober
        self._windows = windows
        self._telemetry = telemetry
        self._scrape_seconds = scrape_seconds
        self._scraping: set[ServiceKey] = set()
        self.queue = WorkQueue(self._reconcile)
        telemetry.queue(lambda: self.queue.depth)
        cache.on_change = self.queue.add
        prober.on_result = self.queue.add

    async def run(self, ready: asyncio.Event) -> None:
        """Work until cancelled; nothing is decided before the cluster's state has been read once (`ready` is set)."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cache.run())
            await self._cache.filled()
            ready.set()
            group.create_task(self.queue.work())
            group.create_task(self._scrape_for_ever(group))

    async def _reconcile(self, key: ServiceKey) -> float | None:
        with self._telemetry.timed_reconcile():
            snapshot = await self._observer.snapshot(key, self._prober.result(key))
            if snapshot is None:
                self._forget(key)
                return None
            snapshot = replace(snapshot, rejections=self._actor.rejections(key))
            decision = decide(snapshot)
            try:
                await self._actor.perform(snapshot, decision)
            except (Conflict, NotFound):
                await self._observer.refresh(key)
                raise
            if snapshot.spec is not None and not decision.keeps_probe:
                self._prober.ensure(key, snapshot.spec, decision.probe)
        self._telemetry.decided(snapshot, decision)
        _tell(snapshot, decision)
        # What has just been refused, or is so no more, is decided upon at once.
        anew = (self._actor.rejections(key) or ()) != (snapshot.rejections or ())
        return 0.0 if anew else decision.again_seconds

    def _forget(self, key: ServiceKey) -> None:
        self.queue.forget(key)
        self._actor.forget(key)
        self._prober.forget(key)
        self._windows.forget(key)
        self._telemetry.forget(key)

    async def _scrape_for_ever(self, group: asyncio.TaskGroup) -> None:
        """Scrape every service once a cycle, evenly spread over it; one that still hangs from the last is left out."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            keys = [ServiceKey(*name) for name in sorted(self._cache.services.names())]
            seconds = max(self._scrape_seconds, self._observer.engines / PAGES_PER_SECOND)
            for i, key in enumerate(keys):
                if key not in self._scraping:
                    self._scraping.add(key)
                    group.create_task(self._scrape(key))
                await asyncio.sleep(max(0.0, began + seconds * (i + 1) / len(keys) - clock()))
            if not keys:
                await asyncio.sleep(seconds)
            self._telemetry.scraped(clock() - began)

    async def _scrape(self, key: ServiceKey) -> None:
        try:
            await self._observer.scrape(key)
        except Exception:
            # Whatever one service's engines say must not stop the fleet.
            log.exception("scrape failed", extra={"service": str(key)})
        finally:
            self._scraping.discard(key)
        self.queue.add_low_priority(key)


def _tell(s: Snapshot, decision: Decision) -> None:
    before, after = s.status.condition(CONDITION), decision.status.condition(CONDITION)
    if decision.unanswered and (before is None or after is None or before.message != after.message):
        for one in decision.unanswered:
            log.error(
                "%s: not answered: %s in %s", one.question, one.error, " > ".join(one.where) or "another's code",
                extra={"service": str(s.key), "reason": f"{one.question}Unanswered"},
            )  # fmt: skip
    for entry in decision.status.decisions:
        if entry.time == s.now and entry not in s.status.decisions:
            log.info(
                "%s: %s: %s",
                entry.action,
                entry.reason,
                entry.message,
                extra={
                    "service": str(s.key),
                    "action": entry.action,
                    "reason": entry.reason,
                    "from_dtype": entry.from_dtype,
                    "to_dtype": entry.to_dtype,
                },
            )
