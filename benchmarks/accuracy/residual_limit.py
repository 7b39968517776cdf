"""Limit on the share of the cached tokens that a step reads at 8 bits, from the engine's own step times.

A request meets its ITL objective by the mean of its gaps, and each gap is a step. So the rule compares means of the
last steps with fractions of the objective. A fast mean lowers the share before steps reach the objective. A slow mean
keeps the share low after a busy time, because more tokens at 8 bits would delay the next peak's requests.
"""

from dataclasses import dataclass, replace
from math import exp

FULL, NONE = 0.25, 0.3
"""Limits of the mean step time, as fractions of the ITL objective.

Up to FULL, steps read everything at 8 bits. From NONE on, they read only the floor at 8 bits.
"""

FAST, SLOW = 256, 32768
"""Number of further steps after which a step's weight has fallen to 1/e, in the fast and in the slow mean."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit after the steps so far. Times are in seconds."""

    objective: float
    """Largest mean gap between the tokens of a good request."""
    fast: float = 0.0
    """Mean over the last FAST steps."""
    slow: float = 0.0
    """Mean over the last SLOW steps."""

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
