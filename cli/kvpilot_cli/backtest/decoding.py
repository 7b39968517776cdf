"""Decoding requests of an engine: the blocks of their next tokens, and their ends.

Requests are grouped by their length modulo the block size, and all grow by one token a step. So one look-up gives the
blocks that a step needs, for any number of requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvpilot_cli.backtest.request import Request


class Decoding:
    """Decoding requests over blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.tokens = 0
        """Tokens in the contexts of all decoding requests."""
        self._size = block_size
        self._held: dict[int, tuple[Request, int]] = {}  # the request, and its length less the count of steps
        self._by_remainder = [0] * block_size
        self._ends: list[tuple[int, int, int]] = []  # step at which a request ends, its number and epoch
        self._steps = 0

    def __len__(self) -> int:
        return len(self._held)

    def lengths(self) -> Iterator[tuple[Request, int]]:
        """Yield each request with the tokens in its context."""
        return ((request, offset + self._steps) for request, offset in self._held.values())

    def add(self, request: Request) -> None:
        """Let the request decode from the next step on."""
        offset = request.computed - self._steps
        self._held[request.number] = (request, offset)
        self._by_remainder[offset % self._size] += 1
        self.tokens += request.computed
        heapq.heappush(self._ends, (self._steps + request.output - request.generated, request.number, request.epoch))

    def leave(self, request: Request) -> bool:
        """Remove the request and store its progress in it. Return False if it does not decode."""
        entry = self._held.pop(request.number, None)
        if entry is None:
            return False
        offset = entry[1]
        request.computed = offset + self._steps
        request.generated = request.computed - request.prompt + 1
        request.blocks = -(-request.computed // self._size)
        request.epoch += 1
        self._by_remainder[offset % self._size] -= 1
        self.tokens -= request.computed
        return True

    def step(self, count: int, requests: int) -> None:
        """Record `steps` in which each request got a token."""
        self._steps += count
        self.tokens += requests * count

    def needed(self) -> int:
        """Return the blocks for the next token: one for each request with full blocks."""
        return self._by_remainder[-self._steps % self._size]

    def needed_for(self, count: int) -> int:
        """Return the blocks for that many steps."""
        whole, rest = divmod(count, self._size)
        return whole * len(self) + sum(self._by_remainder[-(self._steps + i) % self._size] for i in range(rest))

    def until_one_ends(self) -> int:
        """Return the steps until the first request ends. There must be one."""
        while self._void(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._steps

    def ended(self) -> Iterator[Request]:
        """Yield each request that has all its tokens."""
        while self._ends and self._ends[0][0] <= self._steps:
            end = heapq.heappop(self._ends)
            if not self._void(end):
                yield self._held[end[1]][0]

    def _void(self, end: tuple[int, int, int]) -> bool:
        entry = self._held.get(end[1])
        return entry is None or entry[0].epoch != end[2]
