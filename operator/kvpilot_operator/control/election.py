"""Leader election among the operator's replicas by a Lease: stand by, lead, let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from kvpilot_operator.cluster import lease
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.fence import WriteFence, steady_time
from kvpilot_operator.errors import ClusterError, Conflict, LeadershipLost

log = logging.getLogger(__name__)


class Election:
    """`stand_by` returns once this replica leads; `hold` then keeps the Lease, and raises when it cannot; `release`
    gives it to whoever looks next. The fence is open while, and only while, no other replica can lead; `observed` is
    set once the Lease, or that there is none, has been read.
    """

    def __init__(
        self,
        leases: Cluster,
        fence: WriteFence,
        identity: str,
        namespace: str,
        name: str,
        timing: lease.Timing,
        observed: asyncio.Event,
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self._leases = leases
        self._fence = fence
        self._namespace = namespace
        self._name = name
        self._timing = timing
        self._observed = observed
        self._clock = clock
        self._candidate = lease.Candidate(identity, namespace, name, timing)

    async def stand_by(self) -> None:
        """Wait until this replica leads."""
        told: str | None = None
        while not await self._attempt(self._timing.request):
            if self._observed.is_set() and self._candidate.holder != told:
                told = self._candidate.holder
                log.info("standing by: %s", f"{told} leads" if told else "nobody leads yet")
            # A look the moment the Lease runs out: no takeover waits for the next round.
            wait = self._candidate.wait(self._clock())
            await asyncio.sleep(min(self._timing.look, wait) if wait > 0 else self._timing.look)
        log.info("leading as %s", self._candidate.identity)

    async def hold(self) -> None:
        """Renew for ever.

        Raises:
            LeadershipLost: another replica leads, or the renew deadline has passed; the fence is closed.
        """
        while (left := self._candidate.left(self._clock())) > 0:
            await asyncio.sleep(min(self._timing.retry, left))
            left = self._candidate.left(self._clock())
            if left > 0:
                await self._attempt(min(self._timing.request, left))
            if self._candidate.lost():
                self._fence.close()
                holder = self._candidate.holder or "nobody"
                raise LeadershipLost(f"Lease {self._namespace}/{self._name} was taken away: {holder} holds it")
        self._fence.close()
        seconds = self._timing.renew_deadline
        raise LeadershipLost(f"Lease {self._namespace}/{self._name} could not be renewed for {seconds:g} s")

    async def release(self) -> None:
        """Let the Lease go. Call it when no write of this replica can reach the server any more."""
        self._fence.close()
        try:
            async with asyncio.timeout(self._timing.request):
                await self._read()
                if self._candidate.exists and not self._candidate.lost() and not self._candidate.blind:
                    await self._leases.replace(self._candidate.release(datetime.now(UTC)))
                    log.info("the Lease is released")
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease is not released and has to run out: %s", _words(error))

    async def _attempt(self, seconds: float) -> bool:
        """Claim or renew the Lease if that is possible now; True where it is ours from now on."""
        try:
            async with asyncio.timeout(seconds):
                await self._read()
                if self._candidate.wait(self._clock()) > 0:
                    return False
                sent = self._clock()
                claim = self._candidate.claim(datetime.now(UTC), sent)
                write = self._leases.replace if self._candidate.exists else self._leases.create
                answer = await write(claim)
        except Conflict:
            # Another replica was quicker, or a claim of ours whose answer was lost: the next look tells.
            return False
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease could not be read or written: %s", _words(error))
            return False
        if self._candidate.blind:
            self._candidate.observe(answer, self._clock())
            return False
        self._candidate.renewed(answer, sent)
        self._fence.open(sent + self._timing.renew_deadline, sent + self._timing.write_deadline)
        return True

    async def _read(self) -> None:
        found = await self._leases.find(lease.API_VERSION, lease.KIND, self._namespace, self._name)
        self._candidate.observe(found, self._clock())
        self._observed.set()


def _words(error: Exception) -> str:
    return str(error) or "no answer in time"
