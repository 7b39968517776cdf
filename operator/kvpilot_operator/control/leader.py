"""What only the leading replica runs: watches, reconciles, scrapes and probes. One that stands by has none of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.names import OPENSHIFT_SECURITY_API
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.control.pilot import Pilot
from kvpilot_operator.control.prober import Prober
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.mesh import Identity
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.server import ServerFacts

# Every write has a time-out of its own, well below this.
DRAIN_SECONDS = 20.0


@dataclass(eq=False)
class Leader:
    """Made anew whenever a replica begins to lead, so that nothing is believed that was seen before."""

    cluster: Cluster
    fence: WriteFence
    telemetry: Telemetry
    namespaces: Sequence[str]
    host_access: Collection[str]
    """What engines may have of their nodes (api.pod_template.KINDS)."""
    scrape_seconds: float
    prices: Mapping[str, int]
    """What a GPU costs an hour, as gpus.prices gives it."""
    identity: Identity | None
    """In a mesh, for its engines; None where all engines are reached in the clear."""
    ready: asyncio.Event
    """Set, at the latest, once all that is watched has been read."""

    async def start(self) -> Leader:
        """Begin to lead."""
        cluster, telemetry = self.cluster, self.telemetry
        server = ServerFacts(assigns_users=await cluster.serves(OPENSHIFT_SECURITY_API))
        cache = InformerCache(cluster, self.namespaces, self.host_access, mesh=self.identity is not None)
        self.services = cache.feed
        self._scraper = Scraper(self.identity)
        clock, scraped = partial(datetime.now, UTC), telemetry.engine_scraped
        observer = Observer(
            cluster, cache, self._scraper, server, clock, scraped, prices=self.prices, tracer=telemetry.tracer
        )
        make_actor = partial(Actor, cluster.telling(cache.wrote))
        prober = Prober(cluster, self._scraper, telemetry.tracer)
        pilot = Pilot(cache, observer, make_actor, prober, telemetry, self.scrape_seconds)
        self._registry = pilot.registry
        self._work = asyncio.create_task(pilot.run(self.ready))
        telemetry.leads(True)
        return self

    async def ended(self) -> None:
        """Return, or raise, when the work ends that should go on for ever."""
        await asyncio.shield(self._work)

    async def quiet(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Let no write start, and wait for those under way; True where none can reach the API server any more."""
        self.fence.close()
        self.telemetry.leads(False)
        drained = await self.fence.drained(seconds)
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await self._registry.close()
        return drained

    async def close(self) -> None:
        """Close the connections to engines; after `quiet`."""
        await self._scraper.close()


def prepare() -> None:
    """Take modules and other objects that stay for ever out of garbage collection, which took 80 ms each time."""
    gc.collect()
    gc.freeze()
