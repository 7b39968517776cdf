"""The life of one replica: it leads alone, or stands by, leads while it holds the Lease, and hands over."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from kvpilot_operator.cluster.gate import Gate
from kvpilot_operator.control.election import Election
from kvpilot_operator.control.leader import DRAIN_SECONDS, Leader
from kvpilot_operator.errors import ClusterError

log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0

Start = Callable[[], Awaitable[Leader]]


async def alone(gate: Gate, start: Start, stop: asyncio.Event) -> None:
    """Lead until `stop` is set, without asking anybody."""
    gate.open(math.inf, math.inf)
    begun: list[Leader] = []
    try:
        await first_of(stop.wait(), _lead(start, begun))
    finally:
        for leader in begun:
            await leader.quiet()
            await leader.close()


async def elected(election: Election, start: Start, stop: asyncio.Event) -> None:
    """Stand by, then lead, until `stop` is set; the Lease is let go as soon as the last write has its answer.

    Raises:
        LeadershipLost: it led and may not any more.
    """
    await first_of(stop.wait(), election.stand_by())
    if stop.is_set():
        # The claim may have come through in the same moment.
        await election.release()
        return
    hold = asyncio.create_task(election.hold())
    begun: list[Leader] = []
    try:
        await first_of(stop.wait(), _lead(start, begun), asyncio.shield(hold))
    finally:
        lost = hold.done()
        # First of all: a renewal would open the gate again.
        hold.cancel()
        await asyncio.gather(hold, return_exceptions=True)
        # Who has lost the Lease has nothing to hand over, and ends at once.
        quiet = all([await leader.quiet(0 if lost else DRAIN_SECONDS) for leader in begun])
        if quiet and not lost:
            await election.release()
        elif not lost:
            log.warning("the Lease has to run out: a write that got no answer may still arrive")
        for leader in begun:
            await leader.close()


async def _lead(start: Start, begun: list[Leader]) -> None:
    while not begun:
        try:
            begun.append(await start())
        except ClusterError as error:
            # An API server that has just come back refuses some requests: no reason to give the Lease away.
            log.warning("not leading yet, again in %g s: %s", PAUSE_SECONDS, error)
            await asyncio.sleep(PAUSE_SECONDS)
    await begun[0].ended()


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
