"""Limit on the share of cached tokens that an engine step reads at 8 bits. It follows from the engine's step times.

A request meets its objective for inter-token latency (ITL) if the mean of its gaps between tokens is small enough. Each
gap is one step. So the rule compares means over the last steps with fractions of the objective. A fast mean lowers the
share before step times reach the objective. A slow mean keeps the share low after a busy time, because more tokens at 8
bits would delay the requests of the next peak.
"""

from dataclasses import dataclass, replace
from math import exp

FULL, NONE = 0.25, 0.3
"""Two limits on the mean step time, as fractions of the ITL objective.

If the mean is at most FULL, steps read all tokens at 8 bits. If it is NONE or more, they read only the floor at 8 bits.
"""

FAST, SLOW = 256, 32768
"""Number of steps after which the weight of a step has fallen to 1/e, in the fast and in the slow mean."""


@dataclass(frozen=True, slots=True)
class Limit:
    """State of the limit after the steps so far. Times are in seconds."""

    objective: float
    """Objective of a request: the largest mean gap between tokens."""
    fast: float = 0.0
    """Exponential moving average of the step time over about FAST steps."""
    slow: float = 0.0
    """Exponential moving average of the step time over about SLOW steps."""

    @property
    def share(self) -> float:
        """Return the largest share of the cached tokens, 0 to 1, that the next engine step may read at 8 bits."""
        busy = max(self.fast, self.slow) / self.objective
        return min(1.0, max(0.0, (NONE - busy) / (NONE - FULL)))

    def after(self, seconds: float, steps: int = 1) -> "Limit":
        """Return the limit after `steps` more engine steps, which took `seconds` each."""
        return replace(self, fast=_mean(self.fast, seconds, steps / FAST), slow=_mean(self.slow, seconds, steps / SLOW))


def _mean(mean: float, seconds: float, weight: float) -> float:
    return seconds + (mean - seconds) * exp(-weight)
