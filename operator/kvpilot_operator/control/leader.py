"""What only the replica that leads runs: watches, passes, scrapes and probes. One that stands by has none of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import kopf

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.schema import apply_defaults, faults
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.gate import Gate
from kvpilot_operator.control.pilot import Pilot
from kvpilot_operator.control.prober import Prober
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.control.watches import registry
from kvpilot_operator.observe.fleet import Fleet
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.windows import Windows
from kvpilot_operator.render.names import API_VERSION, HTTP_ROUTE_API, KIND
from kvpilot_operator.state.snapshot import ServerFacts

log = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
# Every write has a time-out of its own, well below this.
DRAIN_SECONDS = 20.0


class Leader:
    """Made anew whenever a replica begins to lead, so that nothing is believed that was seen before."""

    def __init__(
        self,
        cluster: Cluster,
        gate: Gate,
        telemetry: Telemetry,
        server: ServerFacts,
        namespaces: Sequence[str],
        scrape: float,
    ) -> None:
        self._gate = gate
        self._telemetry = telemetry
        windows = Windows()
        self._fleet = Fleet(cluster, namespaces)
        self._observer = Observer(cluster, self._fleet, windows, server, _now, telemetry.engine_scraped)
        self._prober = Prober(cluster)
        actor = Actor(cluster.telling(self._fleet.wrote), self._fleet)
        self._pilot = Pilot(self._fleet, self._observer, actor, self._prober, windows, telemetry, scrape)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        cluster: Cluster,
        gate: Gate,
        telemetry: Telemetry,
        *,
        namespaces: Sequence[str],
        scrape_seconds: float,
        ready: asyncio.Event,
        obey_signals: Callable[[], None],
    ) -> Leader:
        """Begin to lead; `ready` is set once the watches are about to start."""
        server = ServerFacts(
            pod_disruption_budgets=await cluster.serves("policy/v1"),
            http_routes=await cluster.serves(HTTP_ROUTE_API),
            unhealthy_pod_eviction=await cluster.version() >= (1, 27),
        )
        leader = cls(cluster, gate, telemetry, server, namespaces, scrape_seconds)
        leader._tasks = [
            asyncio.create_task(leader._watch(namespaces, ready, obey_signals)),
            asyncio.create_task(leader._pilot.run()),
        ]
        telemetry.leads(True)
        return leader

    async def _watch(self, namespaces: Sequence[str], ready: asyncio.Event, obey_signals: Callable[[], None]) -> None:
        """Run kopf until cancelled, and again when it gives up: what it reads anew does no harm."""
        while True:
            stopped = asyncio.Event()
            tasks = await kopf.spawn_tasks(
                registry=registry(self._fleet),
                # Else kopf asks for the user's name, and an image need not have one.
                identity=cast(Any, "kvpilot-operator"),
                clusterwide=not namespaces,
                namespaces=namespaces,
                standalone=True,
                stop_flag=stopped,
                ready_flag=ready,
            )
            # kopf takes the signals, and would cut off writes that are under way; so would its own way to end, which
            # cancels whatever else runs.
            obey_signals()
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.set()
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [f"{type(end).__name__}: {end}" for end in ends if isinstance(end, Exception)]
            log.warning(
                "the watch of services ended, again in %g s: %s", PAUSE_SECONDS, "; ".join(errors) or "no error"
            )
            await asyncio.sleep(PAUSE_SECONDS)

    async def ended(self) -> None:
        """Return, or raise, when something ends that should run for ever."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def quiet(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Let no write start, and wait for those under way; True where none can reach the API server any more."""
        self._gate.close()
        self._telemetry.leads(False)
        drained = await self._gate.drained(seconds)
        watch, work = self._tasks
        work.cancel()
        await self._prober.close()
        await asyncio.gather(work, return_exceptions=True)
        watch.cancel()
        return drained

    async def close(self) -> None:
        """Wait for the watches' end and close the connections; after `quiet`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._observer.close()


def prepare() -> None:
    """Do what takes long once (the API's schema, its CEL rules) before it is needed: a takeover is quicker for it."""
    spec = {"model": {"source": "hf://kvpilot/none"}, "engine": {"image": "none"}}
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "none", "namespace": "none"},
        "spec": spec,
    }
    faults(apply_defaults(manifest))


def _now() -> datetime:
    return datetime.now(UTC)
