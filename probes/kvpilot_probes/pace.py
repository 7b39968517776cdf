"""Rest between requests, so that users of the engine seldom wait for a probe's prefill.

An engine computes in steps. A step with a prefill takes longer than others, and all users wait for that step. So if the
probe's prefills take at most SHARE of the time, they lengthen at most that share of the users' steps. Below 5%, the
95th percentile of the users' time between tokens hardly changes.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.02
# Longest rest after one request: a prefill of seconds has few steps, each with many tokens. Longest time that a run
# rests in all; then it continues like one more user. Time between two reports of progress.
REST_SECONDS, MOST_SECONDS, LOOK_SECONDS = 30.0, 900.0, 1.0


class Pace:
    """Rests of one run between its requests, while other requests run in the engine (`busy`)."""

    def __init__(self) -> None:
        self._open, self._cut, self.busy = 0, False, False
        self._next, self._left = 0.0, MOST_SECONDS

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request of this run while the block runs."""
        self._open, self._cut = self._open + 1, True
        try:
            yield
            self._cut = False
        finally:
            self._open -= 1

    def see(self, running: float) -> None:
        """Rest from now on if more requests run in the engine than those of this run."""
        # An idle vLLM may still count a request that was closed before its end.
        self.busy = running > self._open + self._cut

    async def rest(self, progress: Callable[[], None]) -> None:
        """Wait until the next request may be sent: without users, at once."""
        while self.busy and (rest := min(self._next - time.monotonic(), self._left, LOOK_SECONDS)) > 0:
            progress()
            self._left -= rest
            await asyncio.sleep(rest)

    def read(self, seconds: float) -> None:
        """Plan the next rest after a request whose first token took this long."""
        self._next = time.monotonic() + min(seconds * (1 / SHARE - 1), REST_SECONDS)
