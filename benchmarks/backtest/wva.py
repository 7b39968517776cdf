"""Simulate llm-d's Workload Variant Autoscaler (WVA) with one variant: its saturation rules, and the HPA behind it.

The rules and defaults are those of its documentation (docs/saturation-analyzer.md and
docs/integrations/hpa-integration.md of llm-d-workload-variant-autoscaler):

- A replica is saturated at 80% of its KV cache or at five waiting requests.
- The spare room below these limits is averaged over the replicas that are not saturated.
- If the spare room is below 10 percentage points of KV cache or 3 requests, the WVA adds one replica, unless one is
  starting.
- If the spare room would reach both values even with one replica fewer, the WVA removes one.
- The rules run each minute, on each replica's peaks of that minute.
- The HPA applies a recommendation that has not changed for 240 s, up or down.

Version 0.9 and later count tokens by default, which is not modelled here.
"""

from collections import deque
from collections.abc import Sequence

KV_THRESHOLD, QUEUE_THRESHOLD = 0.80, 5.0
KV_SPARE, QUEUE_SPARE = 0.10, 3.0
LOOP_SECONDS, STABILIZATION_SECONDS = 60.0, 240.0

Gauges = tuple[float, float]
"""KV cache usage of one replica from 0 to 1, and the number of its waiting requests."""


def recommend(peaks: Sequence[Gauges], replicas: int) -> int:
    """Return the number of replicas that the rules recommend, from the peaks of the replicas that answer.

    `replicas` is the number of all replicas, including those that start.
    """
    room = [(KV_THRESHOLD - kv, QUEUE_THRESHOLD - queue) for kv, queue in peaks]
    room = [(kv, queue) for kv, queue in room if kv > 0 and queue > 0]
    count = len(room)
    kv, queue = (sum(column) / count for column in zip(*room, strict=True)) if room else (0.0, 0.0)
    if kv < KV_SPARE or queue < QUEUE_SPARE:
        return replicas + 1 if len(peaks) >= replicas else replicas
    if count < 2:
        return replicas
    share = count / (count - 1)
    kv_left, queue_left = (limit - share * (limit - x) for limit, x in ((KV_THRESHOLD, kv), (QUEUE_THRESHOLD, queue)))
    return replicas - 1 if kv_left >= KV_SPARE and queue_left >= QUEUE_SPARE else replicas


class Wva:
    """Simulated WVA of one service, whose recommendations an HPA applies. Call `judge` every `sync_seconds`."""

    def __init__(self, *, minimum: int, maximum: int, sync_seconds: float) -> None:
        self.minimum, self.maximum = minimum, maximum
        self._loop = max(1, round(LOOP_SECONDS / sync_seconds))
        self._seen: deque[Sequence[Gauges]] = deque(maxlen=self._loop)
        self._asked: deque[int] = deque(maxlen=max(1, round(STABILIZATION_SECONDS / sync_seconds)))
        self._calls, self._wanted = 0, 0

    def judge(self, gauges: Sequence[Gauges], replicas: int) -> int:
        """Return the number of replicas to run from now on. `gauges` must keep the order of the replicas."""
        self._seen.append(gauges)
        self._calls += 1
        if self._calls % self._loop == 0 or not self._asked:
            peaks = [
                tuple(map(max, zip(*(page[i] for page in self._seen if len(page) > i), strict=True)))
                for i in range(len(gauges))
            ]
            self._wanted = recommend([(kv, queue) for kv, queue in peaks], replicas)
        self._asked.append(self._wanted)
        if len(self._asked) < (self._asked.maxlen or 0):
            return replicas
        lowest, highest = min(self._asked), max(self._asked)
        wanted = lowest if lowest > replicas else min(highest, replicas)
        return max(self.minimum, min(self.maximum, wanted))
