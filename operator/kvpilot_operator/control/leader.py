"""Lifecycle of one replica of the operator: it stands by, leads while it holds the Lease, and hands over."""

import asyncio
import gc
import logging
import math
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from kvpilot_operator.act.perform import Actor
from kvpilot_operator.api.names import OPENSHIFT_SECURITY_API
from kvpilot_operator.cluster import lease
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.fence import WriteFence, steady_time
from kvpilot_operator.control.pilot import Pilot
from kvpilot_operator.control.prober import Prober
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.errors import ClusterError, Conflict, LeadershipLost
from kvpilot_operator.mesh import Identity
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServerFacts

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
# Longest wait for the writes in progress, each of which has a shorter timeout.
DRAIN_SECONDS = 20.0


@dataclass(eq=False)
class Leader:
    """The watches, reconciles, scrapes and probes of a leading replica."""

    cluster: Cluster
    fence: WriteFence
    telemetry: Telemetry
    options: Namespace
    ready: asyncio.Event
    """Event for /readyz. It is set when all watched objects have been read, or earlier by the election."""

    async def start(self) -> "Leader":
        """Start watches, reconciles, scrapes and probes."""
        cluster, telemetry, options = self.cluster, self.telemetry, self.options
        server = ServerFacts(assigns_users=await cluster.serves(OPENSHIFT_SECURITY_API))
        identity = Identity(options.mesh_certificates) if options.mesh_certificates is not None else None
        hosts, mesh, engines = options.allow_host_access, identity is not None, options.engine_defaults
        cache = InformerCache(cluster, options.namespace, hosts, mesh=mesh, engines=engines)
        self.services = cache.feed
        self._scraper = Scraper(identity)
        clock, scraped = partial(datetime.now, UTC), telemetry.engine_scraped
        observer = Observer(cluster, cache, self._scraper, server, clock, scraped)
        cluster.on_write = cache.wrote
        make_actor = partial(Actor, cluster)
        prober = Prober(cluster, self._scraper)
        pilot = Pilot(cache, observer, make_actor, prober, telemetry, options.scrape_seconds)
        self._pilot = pilot
        self._work = asyncio.create_task(pilot.run(self.ready))
        telemetry.leader.set(1)
        return self

    async def ended(self) -> None:
        """Wait until this work fails, and raise its error."""
        await asyncio.shield(self._work)

    async def quiet(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Stop all work, and wait for the writes in progress. Return True if no write can still reach the server."""
        self.fence.close()
        self.telemetry.leader.set(0)
        drained = await self.fence.drained(seconds)
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await self._pilot.close()
        return drained

    async def close(self) -> None:
        """Close the connections to engines. Call `quiet` first."""
        await self._scraper.close()


@dataclass(eq=False)
class Election:
    """An election by a Lease. It opens the write fence only while no other replica can lead.

    It sets `observed` once it has read the Lease, which makes a standby ready.
    """

    leases: Cluster
    fence: WriteFence
    candidate: lease.Candidate
    observed: asyncio.Event
    clock: Callable[[], float] = steady_time

    async def stand_by(self) -> None:
        """Wait as a standby until this replica holds the Lease."""
        told: str | None = None
        while not await self._attempt(self.candidate.timing.request):
            if self.observed.is_set() and self.candidate.holder != told:
                told = self.candidate.holder
                log.info("standing by: %s", f"{told} leads" if told else "nobody leads yet")
            # Wake up when the Lease expires, so that a takeover does not wait for the next round.
            wait = self.candidate.wait(self.clock())
            await asyncio.sleep(min(self.candidate.timing.look, wait) if wait > 0 else self.candidate.timing.look)
        log.info("leading as %s", self.candidate.identity)

    async def hold(self) -> None:
        """Renew the Lease until it is lost. Then close the fence and raise LeadershipLost."""
        while (left := self.candidate.left(self.clock())) > 0:
            await asyncio.sleep(min(self.candidate.timing.retry, left))
            left = self.candidate.left(self.clock())
            if left > 0:
                await self._attempt(min(self.candidate.timing.request, left))
            if self.candidate.lost():
                self.fence.close()
                holder = self.candidate.holder or "nobody"
                raise LeadershipLost(f"Lease {self.candidate} was lost: {holder} holds it now")
        self.fence.close()
        seconds = self.candidate.timing.renew_deadline
        raise LeadershipLost(f"Lease {self.candidate} could not be renewed for {seconds:g} s")

    async def release(self) -> None:
        """Release the Lease. Call this only when no write of this replica can still reach the server."""
        self.fence.close()
        try:
            async with asyncio.timeout(self.candidate.timing.request):
                await self._read()
                if self.candidate.exists and not self.candidate.lost() and not self.candidate.blind:
                    await self.leases.replace(self.candidate.release(datetime.now(UTC)))
                    log.info("the Lease is released")
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease is not released, so the next leader waits until it expires: %s", _words(error))

    async def _attempt(self, seconds: float) -> bool:
        """Claim or renew the Lease if that is possible now. Return True if this replica now holds it."""
        try:
            async with asyncio.timeout(seconds):
                await self._read()
                if self.candidate.wait(self.clock()) > 0:
                    return False
                sent = self.clock()
                claim = self.candidate.claim(datetime.now(UTC), sent)
                write = self.leases.replace if self.candidate.exists else self.leases.create
                answer = await write(claim)
        except Conflict:
            # Another replica was quicker, or the answer to our own claim was lost: the next read shows which.
            return False
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease could not be read or written: %s", _words(error))
            return False
        if self.candidate.blind:
            self.candidate.observe(answer, self.clock())
            return False
        self.candidate.renewed(answer, sent)
        self.fence.open(sent + self.candidate.timing.renew_deadline, sent + self.candidate.timing.write_deadline)
        return True

    async def _read(self) -> None:
        self.candidate.observe(await self.leases.find(self.candidate.ref), self.clock())
        self.observed.set()


def _words(error: Exception) -> str:
    return str(error) or "no answer in time"


class Replica:
    """One replica of the operator. Without an election it leads from its start to its end."""

    def __init__(
        self, fence: WriteFence, start: Callable[[], Awaitable[Leader]], election: Election | None = None
    ) -> None:
        self._fence = fence
        self._start = start
        self._election = election
        self._hold: asyncio.Task[None] | None = None
        self.leader: Leader | None = None

    async def lead(self) -> Leader:
        """Wait as a standby until this replica leads, and return its work."""
        if self._election is None:
            self._fence.open(math.inf, math.inf)
            return await self._begin()
        await self._election.stand_by()
        self._hold = asyncio.create_task(self._election.hold())
        await first_of(self._begin(), asyncio.shield(self._hold))
        assert self.leader is not None  # noqa: S101 - `first_of` raises if the hold ends first
        return self.leader

    async def ended(self) -> None:
        """Wait until the work fails or the Lease is lost, and raise the error."""
        assert self.leader is not None  # noqa: S101 - `lead` has returned
        holding = [asyncio.shield(self._hold)] if self._hold is not None else []
        await first_of(self.leader.ended(), *holding)

    async def end(self) -> None:
        """Stop working. Release the Lease if every write has an answer, otherwise let it expire."""
        lost = self._hold is not None and self._hold.done()
        if self._hold is not None:
            # Stop renewals first, because a renewal would let this replica write again.
            self._hold.cancel()
            await asyncio.gather(self._hold, return_exceptions=True)
        # A replica that lost the Lease has nothing to hand over, so it does not wait for its writes.
        quiet = self.leader is None or await self.leader.quiet(0 if lost else DRAIN_SECONDS)
        self._fence.close()
        if self._election is not None and not lost:
            if quiet:
                # Release even as a standby, because the last claim may have succeeded.
                await self._election.release()
            else:
                log.warning("the Lease is not released: a write without an answer may still reach the API server")
        if self.leader is not None:
            await self.leader.close()

    async def _begin(self) -> Leader:
        while self.leader is None:
            try:
                self.leader = await self._start()
            except ClusterError as error:
                # An API server refuses some requests right after an outage, so try again.
                log.warning("not leading yet, again in %g s: %s", _PAUSE_SECONDS, error)
                await asyncio.sleep(_PAUSE_SECONDS)
        return self.leader


async def first_of(*ends: Awaitable[object]) -> None:
    """Wait for the first awaitable to end, cancel the others, and raise its error."""
    tasks = [asyncio.ensure_future(end) for end in ends]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def prepare() -> None:
    """Exclude modules and other permanent objects from garbage collection, which otherwise takes 80 ms each time."""
    gc.collect()
    gc.freeze()
