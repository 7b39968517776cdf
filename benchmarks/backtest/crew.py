"""Run kvpilot's pilots for all services of a simulated fleet, on each service's recent metrics."""

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from benchmarks.backtest.interval import Minute
from benchmarks.backtest.moments import Array, Moments
from kvpilot_cli.backtest.engine import EPOCH
from kvpilot_cli.backtest.loads import STEP
from kvpilot_cli.backtest.pilot import Pilot
from kvpilot_operator.decide.steps.policy import PolicyDecision
from kvpilot_operator.state.samples import Flows, Sample


class Crew:
    """All pilots of a fleet, one per service. Each decides once a minute."""

    def __init__(self, pilots: Sequence[Pilot], moments: Sequence[Moments]) -> None:
        self.pilots, self._moments = list(pilots), moments
        self.asked = 0
        spec = pilots[0].spec
        longest = max(spec.kv_cache.pressure.sustained_seconds, spec.scaling.scale_down_stabilization_seconds)
        self._samples: list[deque[Sample]] = [deque(maxlen=int(longest // STEP) + 1) for _ in pilots]
        self._minute = -1

    def take(self, minute: Minute, pods: Array) -> None:
        """Store this minute's metrics of every service, as samples that pilots read. `pods` has the ready replicas."""
        self._minute += 1
        for i, samples in enumerate(self._samples):
            samples.append(self._sample(i, minute, float(pods[i])))

    def flipped(self, i: int, dtype: str) -> None:
        """Record that service `i` has changed its dtype. Drop its earlier metrics, which describe the old dtype."""
        self.pilots[i].dtype = dtype
        self.pilots[i].dtype_changed = self._now()
        self._samples[i].clear()

    def scaled(self, i: int) -> None:
        """Record that service `i` has changed its number of replicas."""
        self.pilots[i].replicas_changed = self._now()

    def judge(self, asked: Array, ready: Array, busy: NDArray[np.bool_]) -> Iterator[tuple[int, PolicyDecision]]:
        """Let every pilot decide. Yield the index of each service whose decision is not Stay, and the decision.

        Args:
            asked: replicas of each service, including those that start.
            ready: ready replicas of each service.
            busy: True for services with a canary, whose pilots must not change anything.
        """
        for i, pilot in enumerate(self.pilots):
            why = "a canary is in flight" if busy[i] else None
            decision, _ = pilot.rule(list(self._samples[i]), self._now(), int(asked[i]), int(ready[i]), why)
            self.asked += 1
            if decision.chosen.action != "Stay":
                yield i, decision

    def _sample(self, i: int, minute: Minute, pods: float) -> Sample:
        finished = float(minute.finished[i])
        return Sample(
            time=self._now(), pods=int(pods), usage=float(minute.usage[i]), running=float(minute.running[i]),
            waiting=float(minute.waiting[i]), capacity_tokens=int(minute.capacity[i]),
            observed_dtype=self.pilots[i].dtype,
            flows=Flows(
                seconds=STEP * pods, preemptions=float(minute.preemptions[i]),
                prompt_tokens=finished * self._moments[i].prompt,
                generation_tokens=finished * self._moments[i].output, finished=finished,
                prefill_seconds=float(minute.prefill_seconds[i]), decode_seconds=float(minute.decode_seconds[i]),
            ),
        )  # fmt: skip

    def _now(self) -> datetime:
        return EPOCH + timedelta(seconds=self._minute * STEP)
