"""Run the control loop of the fleet: `observe` makes snapshots, `decide` makes decisions, and `act` writes."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.engine_defaults import NO_DEFAULTS
from kvpilot_operator.api.words import ConditionType, Reason
from kvpilot_operator.control.prober import Probe, Prober
from kvpilot_operator.control.service_metrics import ServiceSeries, news
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.control.workqueue import Attempts, WorkQueue
from kvpilot_operator.decide import decide
from kvpilot_operator.errors import Conflict, NotFound
from kvpilot_operator.observe.gather import Observations, Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.questions import keeps_probe
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot
from kvpilot_operator.state.status import Canary

log = logging.getLogger(__name__)

# A metrics page and its share of a reconcile take up to 2 ms of one core, so one core reads 450 pages a second. At this
# rate, 6,000 pods are scraped every 13 s.
PAGES_PER_SECOND = 450.0


@dataclass(slots=True, eq=False)
class ServiceRecord:
    """The operator's state of one service while it is in the cache."""

    key: ServiceKey
    uid: str
    observations: Observations
    actor: Actor
    probe: Probe
    series: ServiceSeries = field(default_factory=ServiceSeries)
    attempts: Attempts = field(default_factory=Attempts)
    scraping: bool = False
    rolling: bool = False
    """True while a canary of the same dtype, such as one with another image, replaces the service's pods."""

    def close(self) -> None:
        """Stop all background tasks: the service is gone."""
        self.probe.close()
        self.attempts.stop()


@dataclass(eq=False)
class Pilot:
    """All services of the fleet: their records, their reconciles, and the loop that scrapes them."""

    cache: InformerCache
    observer: Observer
    make_actor: Callable[[], Actor]
    prober: Prober
    telemetry: Telemetry
    scrape_seconds: float

    def __post_init__(self) -> None:
        self.records: dict[ServiceKey, ServiceRecord] = {}
        self.queue = WorkQueue(self._reconcile, self._attempts)
        self.telemetry.queue.set_function(lambda: self.queue.depth)
        self.telemetry.services(lambda: ((record.key, record.series) for record in self._all()))
        self.cache.on_change = self._changed

    async def run(self, ready: asyncio.Event) -> None:
        """Work until cancelled. Start to reconcile once all watched objects have been read, and then set `ready`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.cache.run())
            await self.cache.filled()
            ready.set()
            group.create_task(self.queue.work())
            group.create_task(self._scrape_for_ever(group))

    async def close(self) -> None:
        """Stop all background tasks of the services, and wait for them."""
        for record in self._all():
            record.close()
        await asyncio.gather(*(record.probe.ended() for record in self._all()))

    def _all(self) -> list[ServiceRecord]:
        return list(self.records.values())

    def _attempts(self, key: ServiceKey) -> Attempts | None:
        record = self.records.get(key)
        return record.attempts if record is not None else None

    def _changed(self, key: ServiceKey) -> None:
        """Process a change in the cache: a service may have been created, deleted or replaced."""
        service, known = self.cache.services.get(*key), self.records.get(key)
        if known is not None and (service is None or known.uid != service.uid):
            self.records.pop(key).close()
        if service is not None:
            record = self.records.get(key)
            if record is None:
                probe = Probe(key, partial(self.prober.probe, uid=service.uid), self.queue.add)
                seen = Observations(key, service.uid)
                record = self.records[key] = ServiceRecord(key, service.uid, seen, self.make_actor(), probe)
            record.rolling = record.rolling or _rolls(service.status.canary)
        self.queue.add(key)

    async def _reconcile(self, key: ServiceKey) -> float | None:
        record = self.records.get(key)
        if record is None:
            return None
        with self.telemetry.timed_reconcile():
            snapshot = await self.observer.snapshot(record.observations, record.probe.result)
            if snapshot is None:
                return None
            defaults = self.cache.engines != NO_DEFAULTS
            rolling = self._rolling_beside(key) if defaults else None
            snapshot = replace(snapshot, rejections=record.actor.rejections, engine_defaults=defaults, rolling=rolling)
            decision = decide(snapshot)
            # Add no `await` between the read of `rolling` and here: two services could then replace pods at once.
            record.rolling = _rolls(decision.status.canary)
            try:
                await record.actor.perform(snapshot, decision)
            except (Conflict, NotFound):
                await self.observer.refresh(key)
                raise
            if snapshot.spec is not None and not keeps_probe(decision.unanswered):
                record.probe.ensure(snapshot.spec, decision.probe)
        record.series.show(snapshot, decision)
        _tell(snapshot, decision)
        # Reconcile again at once if the set of refused objects has changed.
        anew = (record.actor.rejections or ()) != (snapshot.rejections or ())
        return 0.0 if anew else decision.again_seconds

    def _rolling_beside(self, key: ServiceKey) -> str | None:
        """Return the name of another service that is replacing its pods in the same namespace, or None."""
        others = (one.key for one in self._all() if one.rolling and one.key != key)
        return min((one.name for one in others if one.namespace == key.namespace), default=None)

    async def _scrape_for_ever(self, group: asyncio.TaskGroup) -> None:
        """Scrape every service once a cycle, evenly spread over it. Skip a service whose last scrape still runs."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            records = sorted(self._all(), key=lambda record: record.key)
            seconds = max(self.scrape_seconds, len(self.cache.pods) / PAGES_PER_SECOND)
            for i, record in enumerate(records):
                if not record.scraping:
                    record.scraping = True
                    group.create_task(self._scrape(record))
                await asyncio.sleep(max(0.0, began + seconds * (i + 1) / len(records) - clock()))
            if not records:
                await asyncio.sleep(seconds)
            self.telemetry.scraped(clock() - began)

    async def _scrape(self, record: ServiceRecord) -> None:
        try:
            await self.observer.scrape(record.observations)
        except Exception:
            # The engines of one service must not stop the fleet.
            log.exception("scrape failed", extra={"service": str(record.key)})
        finally:
            record.scraping = False
        self.queue.add(record.key, changed=False)


def _tell(s: Snapshot, decision: Decision) -> None:
    before = s.status.condition(ConditionType.READY)
    for one in decision.unanswered:
        if before is None or str(one) not in before.message:
            log.error(
                "the rule %s raised %s in %s", one.question, one.error, " > ".join(one.where) or "a library",
                extra={"service": str(s.key), "reason": Reason.RECONCILE_INCOMPLETE},
            )  # fmt: skip
    for entry in news(s, decision):
        words = {name: getattr(entry, name) for name in ("action", "reason", "from_dtype", "to_dtype")}
        extra = {"service": str(s.key), **words}
        log.info("%s: %s: %s", entry.action, entry.reason, entry.message, extra=extra)


def _rolls(canary: Canary | None) -> bool:
    """Return True if this canary keeps the dtype, and so changes something else, such as the image."""
    return canary is not None and canary.dtype == canary.from_dtype
