"""Judge by the engines' metrics what limits a service: KV memory, prefill of prompts, the decode batch, or nothing."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from operator import attrgetter

from kvpilot_formats.arguments import whole_number
from kvpilot_operator.api.kv_cache import Pressure
from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import ObjectiveState, WorkloadKind
from kvpilot_operator.decide.load import window as windows
from kvpilot_operator.decide.load.binding import SHARE, STALLED, what_binds
from kvpilot_operator.decide.load.objectives import judge_objectives
from kvpilot_operator.decide.load.surge import DRAIN_SECONDS, Surge, find
from kvpilot_operator.decide.load.window import GAP, SPAN, Sums, plausible
from kvpilot_operator.gpus import by_product
from kvpilot_operator.state.decision import ObjectiveResult
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import NodeFacts

# A mean below one request in a thousand scrapes counts as 0, because engines may report tiny values such as 5e-324.
_LEAST_RUNNING = 1e-3
# Write the usage to the API server only if it changed by at least this many percentage points.
USAGE_STEP_PERCENT = 5
_UNREACHED = "in the last minute no scrape reached enough engines"
# vLLM's default token budget of an engine step depends on the GPU's memory (EngineArgs.get_batch_defaults).
_LARGEST_MIB, _LARGE_MIB = 160 * 1024, 70 * 1024
_MAX_TOKENS = 2**31 - 1
_TIME = attrgetter("time")
_BOUND = (WorkloadKind.MEMORY_BOUND, WorkloadKind.PREFILL_BOUND, WorkloadKind.COMPUTE_BOUND)


@dataclass(frozen=True, slots=True)
class Workload:
    """The load of a service in a window of scrapes. Counts include replicas whose metrics could not be read."""

    kind: WorkloadKind
    message: str = ""
    usage_percent: int = 0
    """Mean share of KV blocks in use, in percent."""
    waiting: float = 0.0
    """Mean number of waiting requests, of all replicas."""
    running: float = 0.0
    """Mean number of running requests, of all replicas."""
    pods: int = 0
    """Ready replicas at the newest scrape."""
    capacity_tokens: int = 0
    demand_tokens: int = 0
    """KV tokens of the running requests, and of the waiting ones that must run to drain the queue in two minutes. If
    prefixes are evicted, it is at least twice the capacity, because a smaller gain is not worth a restart."""
    prompts_in_hand: float | None = None
    """Mean number of prompts that one replica computes at a time."""
    mean_prompt: float | None = None
    mean_generation: float | None = None
    requests_per_second: float | None = None
    """Finished requests per second of one replica."""
    best_requests_per_second: float | None = None
    """Best mean request rate of one replica over any stretch as long as the window; None if no request waits or is
    late."""
    best_computed_prompt: float | None = None
    itl_seconds: float | None = None
    """Mean time between two tokens of one request."""
    calm: bool = False
    """True if KV use stays low: for `calm_seconds`, hardly any request waited and no metrics were missing."""
    peak_load: float = 0.0
    """Peak KV cache use in the calm time, in replicas: 1.5 fills the caches of one and a half replicas."""
    surge: Surge | None = None
    computed_prompt: float | None = None
    """Mean number of a request's prompt tokens that were in no cache. `best_computed_prompt` is this mean in the
    stretch of `best_requests_per_second`."""
    memory: bool = False
    """True if prefixes were evicted or KV blocks ran out, even for less than a window."""
    implausible: tuple[str, ...] = ()
    """Pods with implausible metrics, and the reasons."""
    stalled: tuple[str, ...] = ()
    """Pods whose engines have work but make no progress, and the reasons."""
    objectives: tuple[ObjectiveResult, ...] = ()

    @property
    def bound(self) -> bool:
        """Return True if requests wait for KV memory, for the prefill of prompts or for the decode batch."""
        return self.kind in _BOUND

    @property
    def missed(self) -> str:
        """Describe the missed objectives in words and numbers; empty if none is missed."""
        return "; ".join(str(one) for one in self.objectives if one.state == ObjectiveState.MISSED)

    @property
    def in_time(self) -> bool:
        """Return True if there is no surge, every latency objective is met, and at least one of them is about TTFT."""
        held = all(one.state == ObjectiveState.HELD for one in self.objectives)
        return self.surge is None and held and any(one.objective.metric == "TTFT" for one in self.objectives)

    @property
    def capacity_per_pod(self) -> float:
        """Return the KV tokens that one replica can hold."""
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
    """Judge the load by the samples (oldest first) of the last `sustainedSeconds`. A new replica restarts the window.

    A service is memory-bound if all of this holds:

    - Nearly every sample's KV use is at or above `highPercent`.
    - Requests wait or are preempted.
    - Prompts do not fill the engine steps, or prefixes are evicted.

    If memory was the limit before (`was_bound`), it stays the limit until mean KV use falls below `lowPercent`, or
    until no request waits. If the cache has room, requests wait for prefill or for the batch, and no dtype can help.

    calm_seconds: seconds that `Workload.calm` looks back.
    step_tokens: token budget of an engine step (max_num_batched_tokens).
    """
    end = bisect_right(samples, now, key=_TIME)
    while end and not plausible(samples[end - 1]):
        end -= 1
    if not end or now - samples[end - 1].time > GAP:
        unknown = _unknown(samples[-1] if samples else None)
        return replace(unknown, objectives=judge_objectives(objectives, (), sustained=False))
    start = bisect_left(samples, now - timedelta(seconds=pressure.sustained_seconds), hi=end, key=_TIME)
    window = samples[windows.since_it_grew(samples, min(start, max(end - 2, 0)), end) : end]
    seen = windows.add_up(window, pressure)
    lost = windows.thrown_out(seen, samples[:end], pressure.sustained_seconds)
    kind, message = what_binds(seen, pressure, was_bound, step_tokens, lost, window[-1].spread)
    peak = None
    if kind in (WorkloadKind.IDLE, WorkloadKind.RELAXED) and seen.usage * 100 < pressure.low_percent:
        start = bisect_left(samples, now - timedelta(seconds=calm_seconds), hi=end, key=_TIME)
        peak = _calm(samples[start:end], calm_seconds, pressure)
    sustained = seen.covered >= SPAN * pressure.sustained_seconds
    measured = judge_objectives(objectives, window, sustained=sustained)
    surge = None if kind == WorkloadKind.ENGINES_STALLED else find(window, pressure, objectives)
    waits = kind in _BOUND or surge is not None or any(one.state == ObjectiveState.MISSED for one in measured)
    best = windows.best_rate(samples[:end], pressure.sustained_seconds) if waits else (None, None)
    f = seen.flows
    return Workload(
        kind=kind,
        message=message,
        usage_percent=round(seen.usage * 100),
        waiting=round(seen.waiting, 2),
        running=round(seen.running, 2),
        pods=seen.pods,
        capacity_tokens=seen.capacity,
        demand_tokens=_demand(seen) if lost is None else max(_demand(seen), 2 * seen.capacity),
        prompts_in_hand=seen.prompts_in_hand if f.seconds else None,
        memory=kind == WorkloadKind.MEMORY_BOUND or lost is not None,
        computed_prompt=_ratio(f.computed, f.finished),
        mean_prompt=_ratio(f.prompt_tokens, f.finished),
        mean_generation=_ratio(f.generation_tokens, f.finished),
        requests_per_second=_ratio(f.finished, f.seconds),
        best_requests_per_second=best[0],
        best_computed_prompt=best[1],
        itl_seconds=_ratio(f.decode_seconds, f.generation_tokens),
        calm=peak is not None,
        peak_load=peak or 0.0,
        surge=surge,
        implausible=window[-1].implausible,
        stalled=window[-1].stalled,
        objectives=measured,
    )


def step_tokens(spec: Spec, node: NodeFacts) -> int:
    """Return max_num_batched_tokens: the value in spec.engine.extraArgs, else the default of vLLM 0.32's server."""
    with suppress(ValueError):  # Ignore a value that is not a number, because vLLM refuses it.
        asked = whole_number(spec.engine.arguments.value("--max-num-batched-tokens") or "")
        if 0 < asked <= _MAX_TOKENS:
            return asked
    gpu = by_product(node.gpu)
    memory = node.memory_mib or (gpu.memory_mib if gpu is not None else 0)
    if memory >= _LARGEST_MIB:
        return 16_384
    return 8192 if memory >= _LARGE_MIB and "a100" not in node.gpu.lower() else 2048


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _unknown(newest: Sample | None) -> Workload:
    """Return a load without figures. Its message has the cause: the engines are stalled, or too few answered."""
    if newest is None:
        return Workload(WorkloadKind.NO_METRICS, _UNREACHED)
    groups = (("implausible", newest.implausible), ("stalled", newest.stalled))
    doubts = "".join(f"; {word}: {'; '.join(pods)}" for word, pods in groups if pods)
    # The service counts as stalled if its stalled pods are as many as a scrape needs to represent the service.
    stalled = bool(newest.stalled) and plausible(replace(newest, pods=len(newest.stalled)))
    kind, message = (WorkloadKind.ENGINES_STALLED, STALLED) if stalled else (WorkloadKind.NO_METRICS, _UNREACHED)
    return Workload(kind, f"{message}{doubts}", implausible=newest.implausible, stalled=newest.stalled)


def _calm(window: Sequence[Sample], calm_seconds: int, pressure: Pressure) -> float | None:
    """Return the peak KV cache use, in replicas. Return None if requests waited, or a replica's metrics are missing."""
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


def _demand(seen: Sums) -> int:
    """Return the KV tokens of the running requests, and of the waiting ones that must run to drain the queue in time.

    Let W requests wait, let the queue grow by g requests per second, and let T be the seconds in which it must drain.
    By Little's law, this needs (g + W / T) * (seconds per request) more running requests, but never more than W.
    """
    if seen.running < _LEAST_RUNNING:
        return round(seen.held)
    more = seen.waiting
    if seen.flows.finished and seen.covered:
        each = (seen.flows.prefill_seconds + seen.flows.decode_seconds) / seen.flows.finished
        more = min(more, (max(0.0, seen.growth) / seen.covered + more / DRAIN_SECONDS) * each)
    return round(seen.held * (1 + more / seen.running))
