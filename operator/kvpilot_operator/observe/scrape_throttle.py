"""The pace at which a service's engines are scraped: slower for those whose pages fail or take long to read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.budget import METRICS_WORK_PER_SECOND

# The first failure may be chance and makes no pause.
BACKOFF = Backoff(2.0, 30.0)


@dataclass(frozen=True, slots=True)
class _Failed:
    times: int
    until: float
    why: str


class ScrapeThrottle:
    """The throttle of one service. Times are seconds on a clock that never goes back."""

    def __init__(self) -> None:
        self._failed: dict[str, _Failed] = {}
        self._asked = 0
        self._paid_at = 0.0

    @property
    def backed_off(self) -> Mapping[str, str]:
        """Pods that failed more than once in a row and are asked less often, each with the reason."""
        return {pod: one.why for pod, one in self._failed.items() if one.times > 1}

    def due(self, pods: Collection[str], now: float) -> list[str]:
        """Return the ready pods to ask now; all other pods of the service are forgotten."""
        for gone in self._failed.keys() - pods:
            del self._failed[gone]
        if now < self._paid_at:
            return []
        due = [pod for pod in pods if pod not in self._failed or self._failed[pod].until <= now]
        self._asked = len(due)
        return due

    def spend(self, work: int, now: float) -> None:
        """Count the work of a page, whether it was good or not.

        The next scrape of the service waits until the budget of all its pods covers their work, so that no pod with a
        large page looks silent.
        """
        self._paid_at = max(self._paid_at, now) + work / (METRICS_WORK_PER_SECOND * max(1, self._asked))

    def answered(self, pod: str) -> None:
        """Forget a pod's failures: its page was good."""
        self._failed.pop(pod, None)

    def failed(self, pod: str, now: float, why: str) -> None:
        """Count a pod that gave no page, or one that was refused."""
        known = self._failed.get(pod)
        times = known.times + 1 if known is not None else 1
        pause = BACKOFF.pause(times - 2) if times > 1 else 0.0
        self._failed[pod] = _Failed(times, now + pause, why)
