"""A fence that every write to the API server must pass. It closes at a set time, so no delayed process writes late."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpilot_operator.errors import ClusterError, NotLeader


def steady_time() -> float:
    """Return the seconds of a clock that is never set, and that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WriteFence:
    """A gate for API writes, closed at first. It tracks writes that are in progress or whose outcome is unknown."""

    def __init__(self, clock: Callable[[], float] = steady_time) -> None:
        self._clock = clock
        self._starts_before = -math.inf
        self._ends_before = -math.inf
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._uncertain_until = -math.inf

    @classmethod
    def opened(cls) -> "WriteFence":
        """Return a fence that is always open, for a process without other replicas."""
        fence = cls()
        fence.open(math.inf, math.inf)
        return fence

    def open(self, starts_before: float, ends_before: float) -> None:
        """Allow writes that start before `starts_before` and end before `ends_before`, in seconds of the clock."""
        self._starts_before, self._ends_before = starts_before, ends_before

    def close(self) -> None:
        """Close the fence: no further write starts until `open` is called."""
        self.open(-math.inf, -math.inf)

    @contextmanager
    def write(self, method: str, path: str) -> Iterator[float]:
        """Guard one write, and yield the seconds until it must end. Raise NotLeader if the fence is closed."""
        now, ends_before = self._clock(), self._ends_before
        if now >= min(self._starts_before, ends_before):
            raise NotLeader(method, path)
        self._under_way += 1
        self._idle.clear()
        try:
            yield ends_before - now
        except BaseException as error:
            # The server has not answered, so the write may still take effect until its deadline.
            if not isinstance(error, ClusterError) or error.status == 0:
                self._uncertain_until = max(self._uncertain_until, ends_before)
            raise
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle.set()

    async def drained(self, seconds: float) -> bool:
        """Wait at most `seconds` for writes in progress. Return True if no earlier write can still reach the server."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return self._clock() >= self._uncertain_until
