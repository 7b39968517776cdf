"""Bucket bounds of vLLM 0.32's histograms, and finer bounds for reports. Times are in seconds, lengths in tokens."""

from bisect import bisect_left
from collections.abc import Sequence

from kvpilot_operator.state.histogram import Histogram

TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
"""Bounds for prompt and generation lengths: 1, 2 and 5 times each power of ten, as in vLLM."""

FINE = tuple(0.001 * 10 ** (i / 20) for i in range(125))
"""Twenty bounds a decade from 1 ms to 1600 s. A percentile computed from them is wrong by at most 6%."""


class Tally:
    """Histogram that collects values until the next call of `take`."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0.0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: float = 1.0) -> None:
        """Add a value to the histogram `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def take(self) -> Histogram:
        """Return the counts since the last call, and reset them."""
        taken = Histogram(self.bounds, tuple(self.counts), self.total)
        self.counts = [0.0] * (len(self.bounds) + 1)
        self.total = 0.0
        return taken
