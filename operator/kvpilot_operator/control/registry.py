"""All that the operator remembers of services, one record each: it lasts as long as the service is in the cache.

What must outlive the process stands in a service's status; a record is what would only be measured, asked or written
once more without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.control.prober import Probe
from kvpilot_operator.control.service_metrics import ServiceSeries
from kvpilot_operator.control.workqueue import Attempts
from kvpilot_operator.observe.gather import Observations
from kvpilot_operator.state.snapshot import ServiceKey


@dataclass(slots=True, eq=False)
class ServiceRecord:
    """One service: what was observed of it and written for it, its probe, its series, and its place in the queue."""

    key: ServiceKey
    uid: str
    observations: Observations
    actor: Actor
    probe: Probe
    series: ServiceSeries = field(default_factory=ServiceSeries)
    attempts: Attempts = field(default_factory=Attempts)
    scraping: bool = False

    def close(self) -> None:
        """The service is gone: nothing of it goes on by itself."""
        self.probe.close()
        self.attempts.stop()


class Registry:
    """The records of the services in the cache; `make` makes a new one of a service's key and uid."""

    def __init__(self, make: Callable[[ServiceKey, str], ServiceRecord]) -> None:
        self._make = make
        self._records: dict[ServiceKey, ServiceRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ServiceRecord]:
        return iter(list(self._records.values()))

    def get(self, key: ServiceKey) -> ServiceRecord | None:
        """The record of a service, None where it is gone."""
        return self._records.get(key)

    def follow(self, key: ServiceKey, uid: str | None) -> ServiceRecord | None:
        """The record of the service that has this name now, None where none has.

        Here alone a service is forgotten: when it is gone, or when another one with its name has taken its place.
        """
        known = self._records.get(key)
        if known is not None and known.uid != uid:
            del self._records[key]
            known.close()
            known = None
        if known is None and uid is not None:
            known = self._records[key] = self._make(key, uid)
        return known

    async def close(self) -> None:
        """Let nothing go on by itself, and wait until nothing does."""
        for record in self:
            record.close()
        await asyncio.gather(*(record.probe.ended() for record in self))
