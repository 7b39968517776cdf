"""The back-off of container restarts, as in a kubelet. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """The first and the longest wait in seconds. A run that lasted twice the longest wait resets the count."""

    initial: float = 10.0
    cap: float = 300.0

    def delay(self, runs: Sequence[float]) -> float:
        """Return the seconds from the last end to the next start.

        The first restart is immediate. The next wait is the initial one, and then the wait doubles up to the maximum.

        Args:
            runs: durations of the runs so far, in seconds, oldest first.
        """
        crashes = 0
        for seconds in runs:
            crashes = 1 if seconds >= 2 * self.cap else crashes + 1
        if crashes <= 1:
            return 0.0
        # Bound the exponent, because the power would overflow after a thousand crashes.
        return min(self.cap, self.initial * 2.0 ** min(crashes - 2, 60))
