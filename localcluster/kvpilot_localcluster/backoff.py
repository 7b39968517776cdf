"""Back-off of container restarts, as in a kubelet. This module does no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """`initial`, `cap`: shortest and longest wait before a restart, in seconds. A run of 2 * `cap` resets the wait."""

    initial: float = 10.0
    cap: float = 300.0

    def delay(self, runs: Sequence[float]) -> float:
        """Return how many seconds to wait between the end of the last run and the next start.

        The first restart is immediate. The next one waits for `initial` seconds. Each further wait is twice as long, up
        to `cap`.

        Args:
            runs: durations of the runs so far in seconds, oldest first.
        """
        crashes = 0
        for seconds in runs:
            crashes = 1 if seconds >= 2 * self.cap else crashes + 1
        if crashes <= 1:
            return 0.0
        # Limit the exponent: after a thousand crashes the power would overflow.
        return min(self.cap, self.initial * 2.0 ** min(crashes - 2, 60))
