"""Leader election among the operator's replicas by a Lease: wait as a standby, lead, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from kvpilot_operator.cluster import lease
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.fence import WriteFence, steady_time
from kvpilot_operator.errors import ClusterError, Conflict, LeadershipLost

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Election:
    """An election by a Lease. The fence is open only while no other replica can lead.

    `observed` is set once the Lease was looked for.
    """

    leases: Cluster
    fence: WriteFence
    candidate: lease.Candidate
    observed: asyncio.Event
    clock: Callable[[], float] = steady_time

    async def stand_by(self) -> None:
        """Wait until this replica leads."""
        told: str | None = None
        while not await self._attempt(self.candidate.timing.request):
            if self.observed.is_set() and self.candidate.holder != told:
                told = self.candidate.holder
                log.info("standing by: %s", f"{told} leads" if told else "nobody leads yet")
            # Look at the moment when the Lease expires, so that a takeover does not wait for the next round.
            wait = self.candidate.wait(self.clock())
            await asyncio.sleep(min(self.candidate.timing.look, wait) if wait > 0 else self.candidate.timing.look)
        log.info("leading as %s", self.candidate.identity)

    async def hold(self) -> None:
        """Renew the Lease until it is lost; then close the fence and raise LeadershipLost."""
        while (left := self.candidate.left(self.clock())) > 0:
            await asyncio.sleep(min(self.candidate.timing.retry, left))
            left = self.candidate.left(self.clock())
            if left > 0:
                await self._attempt(min(self.candidate.timing.request, left))
            if self.candidate.lost():
                self.fence.close()
                holder = self.candidate.holder or "nobody"
                raise LeadershipLost(f"Lease {self.candidate} was taken away: {holder} holds it")
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
            log.warning("the Lease is not released and has to run out: %s", _words(error))

    async def _attempt(self, seconds: float) -> bool:
        """Claim or renew the Lease if that is possible now; return True if it is ours from now on."""
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
