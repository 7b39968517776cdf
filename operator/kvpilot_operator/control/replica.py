"""The life of one replica: it leads alone, or stands by, leads while it holds the Lease, and hands over."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.control.election import Election
from kvpilot_operator.control.leader import DRAIN_SECONDS, Leader
from kvpilot_operator.errors import ClusterError

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0

Start = Callable[[], Awaitable[Leader]]


class Replica:
    """`lead` returns once this replica leads, `ended` when it may or can no longer, and `end` hands over in order.

    Without an election it leads at once, and for ever.
    """

    def __init__(self, fence: WriteFence, start: Start, election: Election | None = None) -> None:
        self._fence = fence
        self._start = start
        self._election = election
        self._hold: asyncio.Task[None] | None = None
        self.leader: Leader | None = None

    async def lead(self) -> Leader:
        """Stand by, then begin to lead.

        Raises:
            LeadershipLost: it led and may not any more.
        """
        if self._election is None:
            self._fence.open(math.inf, math.inf)
            return await self._begin()
        await self._election.stand_by()
        self._hold = asyncio.create_task(self._election.hold())
        await first_of(self._begin(), asyncio.shield(self._hold))
        assert self.leader is not None  # noqa: S101 - a hold that is over has raised
        return self.leader

    async def ended(self) -> None:
        """Wait until the work or the Lease has ended, and raise why.

        Raises:
            LeadershipLost: it led and may not any more.
        """
        assert self.leader is not None  # noqa: S101 - `lead` has returned
        holding = [asyncio.shield(self._hold)] if self._hold is not None else []
        await first_of(self.leader.ended(), *holding)

    async def end(self) -> None:
        """Stop working; the Lease is let go as soon as the last write has its answer."""
        lost = self._hold is not None and self._hold.done()
        if self._hold is not None:
            # First of all: a renewal would open the fence again.
            self._hold.cancel()
            await asyncio.gather(self._hold, return_exceptions=True)
        # Who has lost the Lease has nothing to hand over, and ends at once.
        quiet = self.leader is None or await self.leader.quiet(0 if lost else DRAIN_SECONDS)
        self._fence.close()
        if self._election is not None and not lost:
            if quiet:
                # Also one that stood by: its claim may have come through in the moment that it was told to stop.
                await self._election.release()
            else:
                log.warning("the Lease has to run out: a write that got no answer may still arrive")
        if self.leader is not None:
            await self.leader.close()

    async def _begin(self) -> Leader:
        while self.leader is None:
            try:
                self.leader = await self._start()
            except ClusterError as error:
                # An API server that has just come back refuses some requests: no reason to give the Lease away.
                log.warning("not leading yet, again in %g s: %s", PAUSE_SECONDS, error)
                await asyncio.sleep(PAUSE_SECONDS)
        return self.leader


async def first_of(*ends: Awaitable[object]) -> None:
    """Wait for whatever ends first, cancel the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(end) for end in ends]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
