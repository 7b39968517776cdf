"""Run the requests of a probe, with limits on how many are in flight and on their tokens."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvpilot_probes.errors import ProbeError
from kvpilot_probes.session import TOKENS_IN_FLIGHT

A = TypeVar("A")
B = TypeVar("B")


async def bounded(
    items: Sequence[A], work: Callable[[A], Awaitable[B]], concurrency: int, size: Callable[[A], int] = lambda _: 0
) -> list[B]:
    """Run `work` on all items, at most `concurrency` at a time. The first `ProbeError` cancels the others.

    `size` returns the number of tokens of an item. All items in flight have at most TOKENS_IN_FLIGHT tokens together.
    An item counts as at most half of that, so two long prompts may be in flight, or many short ones. Short items go
    first, because some damage shows only in large batches.
    """
    shares = [min(size(item), TOKENS_IN_FLIGHT // 2) for item in items]
    short_first = sorted(range(len(items)), key=lambda index: shares[index] > TOKENS_IN_FLIGHT // concurrency)
    in_flight: set[int] = set()
    tasks: dict[int, asyncio.Task[B]] = {}
    ended = asyncio.Event()

    def fits(share: int) -> bool:
        return len(in_flight) < concurrency and sum(shares[i] for i in in_flight) + share <= TOKENS_IN_FLIGHT

    async def one(index: int) -> B:
        try:
            return await work(items[index])
        finally:
            in_flight.remove(index)
            ended.set()

    try:
        async with asyncio.TaskGroup() as group:
            for index in short_first:
                while not fits(shares[index]):
                    ended.clear()
                    await ended.wait()
                in_flight.add(index)
                tasks[index] = group.create_task(one(index))
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        if isinstance(first, ProbeError):
            raise first from None
        raise
    return [tasks[index].result() for index in range(len(items))]
