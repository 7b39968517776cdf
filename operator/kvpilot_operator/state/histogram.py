"""A Prometheus histogram as counts per bucket: a window of latencies or lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of observations in each bucket, and the sum of their values (`total`).

    `counts[i]` observations lie in (bounds[i-1], bounds[i]]. The last count is of observations above all bounds. The
    bounds are finite and increasing.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = (0.0,)
    total: float = 0.0

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError(f"counts: {len(self.counts)}; give one more than the {len(self.bounds)} bounds")

    @property
    def count(self) -> float:
        """The number of observations in all buckets."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Return the `q`-quantile (0 to 1), interpolated like PromQL's histogram_quantile; NaN if it is empty."""
        if self.count <= 0:
            return float("nan")
        rank = q * self.count
        for i, reached in enumerate(accumulate(self.counts)):
            if reached >= rank and self.counts[i] > 0:
                if i == len(self.bounds):
                    break
                low = self.bounds[i - 1] if i else 0.0
                return low + (self.bounds[i] - low) * (rank - (reached - self.counts[i])) / self.counts[i]
        return self.bounds[-1] if self.bounds else float("nan")

    @classmethod
    def together(cls, histograms: Sequence["Histogram"]) -> "Histogram":
        """Return the sum of the histograms that have the same buckets as the last non-empty histogram.

        Leave out histograms with other buckets, because they come from another engine version.
        """
        full = [h for h in histograms if any(h.counts)]
        same = [h for h in full if h.bounds == full[-1].bounds]
        if len(same) < 2:
            return same[0] if same else cls()
        counts = tuple(sum(column) for column in zip(*(h.counts for h in same), strict=True))
        return cls(same[0].bounds, counts, sum(h.total for h in same))
