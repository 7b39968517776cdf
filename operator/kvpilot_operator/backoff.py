"""Compute the pauses between retries of failed work."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses in seconds that double from `first` up to `last`. Iterating over them never ends."""

    first: float
    last: float

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a failure that follows `failures` other failures in a row."""
        return min(self.first * 2.0 ** min(failures, 64), self.last)

    def __iter__(self) -> Iterator[float]:
        return map(self.pause, itertools.count())
