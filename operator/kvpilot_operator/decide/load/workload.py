"""Find the resource that limits a service from its engines' metrics: memory, prompts, the batch, or none.

A smaller dtype only saves memory, so this module tells a lack of memory from other limits. Metrics that are old, full
of gaps, or from too few of the pods give no result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from operator import attrgetter

from kvpilot_operator.api.kv_cache import Pressure
from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.api.words import ObjectiveState, WorkloadKind
from kvpilot_operator.decide.load.binding import SHARE, STALLED, what_binds
from kvpilot_operator.decide.load.objectives import ObjectiveResult, judge_objectives
from kvpilot_operator.decide.load.surge import DRAIN_SECONDS, Surge, find
from kvpilot_operator.decide.load.window import (
    GAP,
    SPAN,
    Sums,
    add_up,
    best_rate,
    computed,
    plausible,
    since_it_grew,
    thrown_out,
)
from kvpilot_operator.state.samples import Sample, names

# A mean below one request in a thousand scrapes counts as none. Pages may report tiny values such as 5e-324.
_LEAST_RUNNING = 1e-3
# Write the usage to the API server only if it changed by at least this many percentage points.
USAGE_STEP_PERCENT = 5
_UNREACHED = "in the last minute no scrape reached enough engines"
_TIME = attrgetter("time")
_BOUND = (WorkloadKind.MEMORY_BOUND, WorkloadKind.PREFILL_BOUND, WorkloadKind.COMPUTE_BOUND)


@dataclass(frozen=True, slots=True)
class Workload:
    """The findings of a window. Counts cover all replicas, including those without a metrics page."""

    kind: WorkloadKind
    message: str = ""
    """The evidence, in words and numbers."""
    usage_percent: int = 0
    """Mean share of KV blocks in use, in percent."""
    waiting: float = 0.0
    """Mean number of waiting requests."""
    running: float = 0.0
    """Mean number of running requests."""
    pods: int = 0
    """Ready replicas at the newest scrape."""
    capacity_tokens: int = 0
    demand_tokens: int = 0
    """Tokens of the running requests, plus tokens of the requests that must also run to drain the queue in two minutes.

    If prefixes are evicted, at least twice the capacity: their size is unknown, and a smaller gain is not worth a
    restart.
    """
    prompts_in_hand: float | None = None
    """Mean number of prompts that one replica computes at a time."""
    gpu_hits: float | None = None
    """Share of prompt tokens (0 to 1) that a GPU's prefix cache held. None if no prompt was looked up."""
    host_hits: float | None = None
    """Share of prompt tokens that came from host memory, or from a disk below it."""
    disk_hits: float | None = None
    """Share of prompt tokens that came from the disk."""
    thrown_out: bool = False
    """True if memory is the limit because prefixes are evicted."""
    mean_prompt: float | None = None
    """Mean prompt length in tokens."""
    mean_generation: float | None = None
    """Mean answer length in tokens."""
    requests_per_second: float | None = None
    """Finished requests per second of one replica."""
    best_requests_per_second: float | None = None
    """Largest request rate of one replica over any window of this length in the samples. Only set if requests wait."""
    best_computed_prompt: float | None = None
    """Mean uncached tokens of a prompt at that best rate."""
    itl_seconds: float | None = None
    """Mean time between two tokens of one request."""
    calm: bool = False
    """True if the last `calm_seconds` have no gap in the metrics and hardly any waiting request."""
    peak_load: float = 0.0
    """Largest use of KV cache in the calm time, in replicas: 1.5 is the whole cache of one and a half replicas."""
    surge: Surge | None = None
    """The surge, if there is one."""
    computed_prompt: float | None = None
    """Mean uncached tokens of a prompt."""
    memory: bool = False
    """True if prefixes were evicted or blocks ran out, even for less than a window."""
    implausible: tuple[str, ...] = ()
    """Pods with implausible pages, and the reasons."""
    stalled: tuple[str, ...] = ()
    """Pods with engines that have work but make no progress, and the reasons."""
    objectives: tuple[ObjectiveResult, ...] = ()

    @property
    def bound(self) -> bool:
        """Return True if requests wait for a resource."""
        return self.kind in _BOUND

    @property
    def missed(self) -> str:
        """Name the objectives that are missed, in words and numbers; empty if none is."""
        return "; ".join(str(one) for one in self.objectives if one.state == ObjectiveState.MISSED)

    @property
    def in_time(self) -> bool:
        """Return True if every objective is met, and one of them limits the wait of a request."""
        held = all(one.state == ObjectiveState.HELD for one in self.objectives)
        return self.surge is None and held and any(one.objective.metric == "TTFT" for one in self.objectives)

    @property
    def capacity_per_pod(self) -> float:
        """Return the tokens that one replica holds."""
        return self.capacity_tokens / self.pods if self.pods else 0.0


def classify(
    samples: Sequence[Sample],
    pressure: Pressure,
    now: datetime,
    *,
    was_bound: bool = False,
    calm_seconds: int = 600,
    step_tokens: int = 8192,
    objectives: Sequence[Objective] = (),
) -> Workload:
    """Judge the samples (oldest first) of the last `sustainedSeconds`.

    `calm` looks back over `calm_seconds`; `step_tokens` is the engine's max_num_batched_tokens.

    A service is memory-bound if three things are true. Nearly every sample is at or above `highPercent`. Requests wait
    (on average at least `waitingPerReplica` a replica) or are preempted (at least `preemptionsPerMinute` a replica).
    And prompts do not fill the engine's steps, or only fill them since a full cache evicts prefixes. A full cache
    without waiting requests is no problem. If the cache has room, requests wait for prompts or for the batch, which no
    dtype changes. A service that `was_bound` stays bound until its average use falls below `lowPercent` or no request
    waits, so that a quiet moment does not end the pressure. A new replica restarts the window, because earlier samples
    do not describe the present service.
    """
    end = bisect_right(samples, now, key=_TIME)
    while end and not plausible(samples[end - 1]):
        end -= 1
    if not end or now - samples[end - 1].time > GAP:
        unknown = _unknown(samples[-1] if samples else None)
        return replace(unknown, objectives=judge_objectives(objectives, (), sustained=False))
    start = bisect_left(samples, now - timedelta(seconds=pressure.sustained_seconds), hi=end, key=_TIME)
    start = since_it_grew(samples, min(start, max(end - 2, 0)), end)
    window = samples[start:end]
    seen = add_up(window, pressure)
    lost = thrown_out(seen, samples[:end], pressure.sustained_seconds)
    kind, message = what_binds(seen, pressure, was_bound, step_tokens, lost, window[-1].spread)
    calm = None
    if kind in (WorkloadKind.IDLE, WorkloadKind.RELAXED) and seen.usage * 100 < pressure.low_percent:
        start = bisect_left(samples, now - timedelta(seconds=calm_seconds), hi=end, key=_TIME)
        calm = _calm(samples[start:end], calm_seconds, pressure)
    sustained = seen.covered >= SPAN * pressure.sustained_seconds
    measured = judge_objectives(objectives, window, sustained=sustained)
    surge = None if kind == WorkloadKind.ENGINES_STALLED else find(window, pressure, objectives)
    waits = kind in _BOUND or surge is not None or any(one.state == ObjectiveState.MISSED for one in measured)
    best = best_rate(samples[:end], pressure.sustained_seconds) if waits else (None, None)
    workload = _workload(kind, message, seen, window[-1], calm, best, lost)
    return replace(workload, objectives=measured, surge=surge)


def _unknown(newest: Sample | None) -> Workload:
    """Explain the unknown load: every engine that answered is stalled, or too few answered."""
    if newest is None:
        return Workload(WorkloadKind.NO_METRICS, _UNREACHED)
    groups = (("implausible", newest.implausible), ("stalled", newest.stalled))
    doubts = "".join(f"; {word}: {names(pods)}" for word, pods in groups if pods)
    # Enough stalled pods represent the revision: the same share as for working pods.
    stalled = bool(newest.stalled) and plausible(replace(newest, pods=len(newest.stalled)))
    kind, message = (WorkloadKind.ENGINES_STALLED, STALLED) if stalled else (WorkloadKind.NO_METRICS, _UNREACHED)
    return Workload(kind, f"{message}{doubts}", implausible=newest.implausible, stalled=newest.stalled)


def _calm(window: Sequence[Sample], calm_seconds: int, pressure: Pressure) -> float | None:
    """Return the peak of cache use, in replicas. Return None if requests waited, or if metrics of replicas are
    missing."""
    whole = [s for s in window if s.pods and not s.implausible and not s.unanswered and not s.stalled]
    if len(whole) < SHARE * len(window) or not whole:
        return None
    times = [s.time for s in whole]
    covered = times[-1] - times[0] - sum((b - a for a, b in pairwise(times) if b - a > GAP), timedelta())
    if covered.total_seconds() < SPAN * calm_seconds:
        return None
    if sum(s.waiting / s.pods for s in whole) > 0.5 * pressure.waiting_per_replica * len(whole):
        return None
    return max(s.usage * s.pods for s in whole)


def _workload(
    kind: WorkloadKind,
    message: str,
    seen: Sums,
    newest: Sample,
    calm: float | None,
    best: tuple[float | None, float | None],
    lost: str | None,
) -> Workload:
    seconds, finished = seen.seconds, seen.finished
    return Workload(
        kind=kind,
        message=message,
        usage_percent=round(seen.usage * 100),
        waiting=round(seen.waiting, 2),
        running=round(seen.running, 2),
        pods=seen.pods,
        capacity_tokens=seen.capacity,
        demand_tokens=_demand(seen) if lost is None else max(_demand(seen), 2 * seen.capacity),
        prompts_in_hand=seen.prefill / seconds if seconds else None,
        gpu_hits=seen.gpu_hits / seen.queried if seen.queried else None,
        host_hits=seen.host_hits / seen.queried if seen.queried else None,
        disk_hits=min(seen.disk_hits, seen.host_hits) / seen.queried if seen.queried else None,
        thrown_out=kind == WorkloadKind.MEMORY_BOUND and lost is not None,
        memory=lost is not None or kind == WorkloadKind.MEMORY_BOUND,
        computed_prompt=computed(seen) / finished if finished else None,
        mean_prompt=seen.prompted / finished if finished else None,
        mean_generation=seen.generated / finished if finished else None,
        requests_per_second=finished / seconds if seconds else None,
        best_requests_per_second=best[0],
        best_computed_prompt=best[1],
        itl_seconds=seen.decode / seen.generated if seen.generated else None,
        calm=calm is not None,
        peak_load=calm if calm is not None else 0.0,
        implausible=newest.implausible,
        stalled=newest.stalled,
    )


def _demand(seen: Sums) -> int:
    """Return the tokens of running requests, plus those of the further requests that must run for the queue to drain.

    Little's law: if a queue grows by g requests a second and must lose W requests in a time T, then (g + W / T) * (time
    of one request) more requests must run in parallel, at most all waiting ones. If the time of a request is unknown,
    all waiting requests count.
    """
    if seen.running < _LEAST_RUNNING:
        return round(seen.held)
    more = seen.waiting
    if seen.finished and seen.covered:
        each = (seen.prefill + seen.decode) / seen.finished
        more = min(more, (max(0.0, seen.growth) / seen.covered + more / DRAIN_SECONDS) * each)
    return round(seen.held * (1 + more / seen.running))
