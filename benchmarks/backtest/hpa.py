"""Simulate the Kubernetes HorizontalPodAutoscaler on mean KV use, for many services at once.

The rules follow Kubernetes 1.34's documentation:

- desired = ceil(current * use / target). If use / target is within 0.1 of 1, nothing changes.
- In a scale-out, a pod that is not ready counts as 0% used.
- A scale-out adds at most four pods within 15 s, or as many as there are, if that is more.
- A scale-in uses the highest recommendation of the last 300 s. It may remove any number of replicas at once.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOLERANCE = 0.1 + 1e-9  # 0.55 / 0.5 is slightly above 1.1 in floating point, but must be within the tolerance.
STABILIZATION_SECONDS = 300.0


def recommend(use: Floats, ready: Ints, replicas: Ints, target: float) -> Ints:
    """Return the number of replicas by the HPA's formula, before its limits on the speed of changes.

    Args:
        use: mean KV-cache usage of each service's ready pods, 0 to 1.
        ready: number of ready pods of each service.
        replicas: number of all pods of each service.
        target: KV-cache usage that the HPA aims at, 0 to 1.
    """
    ratio = use / target
    pending = replicas - ready
    plain = np.where(np.abs(ratio - 1) <= TOLERANCE, replicas, _ceil(ratio * ready))
    # In a scale-out, pods that are not ready count as 0% used. If that would turn the scale-out into a scale-in, change
    # nothing.
    ratio_all = use * ready / (target * np.maximum(replicas, 1))
    damped = np.where((np.abs(ratio_all - 1) <= TOLERANCE) | (ratio_all < 1), replicas, _ceil(ratio_all * replicas))
    wanted = np.where((pending > 0) & (ratio > 1), np.maximum(damped, replicas), plain)
    return np.where(ready > 0, wanted, replicas)


def _ceil(x: Floats) -> Ints:
    # 0.9 / 0.6 * 2 is slightly above 3 in floating point, and must not become 4.
    return np.ceil(x - 1e-9).astype(np.int64)


class Hpa:
    """Simulated HorizontalPodAutoscaler of many services. Call `judge` every `sync_seconds`."""

    def __init__(
        self, replicas: Ints, *, target: float, minimum: int, maximum: int, sync_seconds: float = 15.0
    ) -> None:
        self.target, self.minimum, self.maximum = target, minimum, maximum
        self._periods = sync_seconds / 15.0
        keep = max(1, round(STABILIZATION_SECONDS / sync_seconds))
        self._recent = np.tile(replicas, (keep, 1))
        self._at = 0

    def judge(self, use: Floats, ready: Ints, replicas: Ints) -> Ints:
        """Return the number of replicas to run from now on."""
        wanted = recommend(use, ready, replicas, self.target)
        self._recent[self._at] = wanted
        self._at = (self._at + 1) % len(self._recent)
        stable = np.where(wanted < replicas, np.minimum(self._recent.max(axis=0), replicas), wanted)
        grown = replicas.astype(np.float64)
        for _ in range(max(1, round(self._periods))):
            grown = np.maximum(grown * 2, grown + 4)
        return np.asarray(np.clip(np.minimum(stable, grown.astype(np.int64)), self.minimum, self.maximum))
