"""List the steps that the policy can choose from, each with its capacity, KV use and inter-token latency (ITL)."""

import math
from dataclasses import dataclass
from datetime import timedelta

from kvpilot_formats import dtypes
from kvpilot_operator.api.words import Action, Outcome, WorkloadKind
from kvpilot_operator.decide.load.saturation import SHARE, able, backing_off, beyond
from kvpilot_operator.decide.load.surge import DRAIN_SECONDS
from kvpilot_operator.decide.steps.capacity import gain, smaller, window_share
from kvpilot_operator.decide.steps.ladder import Rung, rungs
from kvpilot_operator.decide.steps.latency import Expected, expected_itl_change, would_miss
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.status import MAX_OPTIONS, Option, clip

# Largest percentage shown. It also stands for infinity, when a capacity is 0.
_MOST_PERCENT = 1_000_000
# A scale-out at most doubles the replicas, because the present demand is only an estimate.
_MOST_GROWTH = 2
# In a surge, a step may add this many replicas, even if that more than doubles them: late replicas are no help.
_QUICK = 4
# Largest mean number of prompts in prefill on each replica after a scale-in. At 1, an engine computes prompts all the
# time and can take no more (Little's law; docs/pilot-rules.md). The limit is lower, because the number grows faster
# than the load.
_MOST_PROMPTS = 0.6
ALONE = "less than one request runs on each replica: another replica would not make requests faster"
Closed = tuple[Outcome, str]
"""The outcome of a step that is ruled out, and the reason in words."""
_EXTERNAL = (Outcome.NOT_OWNER, "scaling.mode is External: an autoscaler or a person writes /scale")


@dataclass(frozen=True, slots=True)
class Weighed:
    """A step that the policy compares. `open`: nothing rules it out. `fits`: it meets the demand."""

    option: Option
    open: bool
    fits: bool


@dataclass(frozen=True, slots=True)
class Effect:
    """Forecast for the time after a step. Capacity (`tokens`) is in KV tokens; its `use` and `limit` are in percent."""

    tokens: int
    use: int
    limit: int
    itl: Expected
    times: float | None = None
    """Factor by which a change of the dtype multiplies the capacity; None if the dtype stays."""
    late: str | None = None
    """The latency objective that would be missed, or None."""


def weighed(action: Action, dtype: str, replicas: int, effect: Effect, closed: Closed | None) -> Weighed:
    """Turn a step into an option: its outcome, the reason if it is ruled out, and its forecast in words."""
    fits = effect.use <= effect.limit and effect.late is None
    outcome, why = closed or (Outcome.POSSIBLE if fits else Outcome.INSUFFICIENT, effect.late or "")
    who, gained = (f"{replicas} replicas", "") if effect.times is None else (dtype, f" ({effect.times:.2f}x)")
    when = " at the peak" if action in (Action.SCALE_IN, Action.DTYPE_UP) else ""
    text = f"{who} would hold {effect.tokens} tokens{gained} and be {effect.use}% full{when}; {effect.itl.message}"
    option = _option(action, (dtype, replicas), outcome, f"{why}; {text}" if why else text, effect.tokens)
    return Weighed(option, closed is None, fits)


def percent(part: float, whole: float) -> int:
    """Return a share in whole percent, rounded up, at most `_MOST_PERCENT`."""
    if whole <= 0:
        return 0 if part <= 0 else _MOST_PERCENT
    return min(_MOST_PERCENT, math.ceil(100 * part / whole - 1e-9))


def _option(action: Action, to: tuple[str, int], outcome: Outcome, message: str, tokens: int) -> Option:
    text = clip(message)
    return Option(action=action, dtype=to[0], replicas=to[1], outcome=outcome, message=text, capacity_tokens=tokens)


def stay(s: PolicyInput, outcome: Outcome, message: str) -> Option:
    """Return the option to keep dtype and replicas, with this outcome and message."""
    return _option(Action.STAY, (s.dtype, s.replicas), outcome, message, int(s.workload.capacity_per_pod * s.counted))


def down(s: PolicyInput) -> list[Weighed]:
    """Weigh every smaller dtype of the ladder. Return none in mode Fixed, in which the user chooses the dtype."""
    return [_down(s, rung) for rung in _rungs(s) if smaller(rung.dtype, s.dtype)]


def instead_of_replicas(s: PolicyInput) -> list[Weighed]:
    """Weigh smaller dtypes, the safest first, for a calm service that keeps a replica only for its memory."""
    w, scaling = s.workload, s.spec.scaling
    known = next((k for k in s.saturations if k.dtype == s.dtype), None)
    if known is None or not known.memory or not known.requests_per_hour or scaling.mode == "External":
        return []
    if not w.requests_per_second or _too_many_prompts(s, s.replicas - 1) is not None:
        return []
    enough = w.requests_per_second * 3600 * w.pods / SHARE / known.requests_per_hour
    return [_down(s, rung, enough) for rung in _rungs(s) if smaller(rung.dtype, s.dtype)]


def _down(s: PolicyInput, rung: Rung, enough: float | None = None) -> Weighed:
    """Weigh a smaller dtype, which frees memory or saves a replica.

    enough: if the aim is to save a replica, the replicas that the present load needs with the serving dtype; else None.
    """
    limit = s.spec.kv_cache.pressure.high_percent
    effect = _in_dtype(s, rung.dtype, Action.DTYPE_DOWN, limit, peak=enough is not None)
    closed = _dtype_closed(s, rung, effect.itl, climb=False)
    if closed is None and enough is None and s.workload.kind != WorkloadKind.MEMORY_BOUND:
        closed = Outcome.NOT_MEMORY, "memory is not the limit"
    if closed is None and enough is not None:
        left = max(1, s.spec.scaling.min_replicas, math.ceil(enough / (effect.times or 1)))
        closed = (Outcome.INSUFFICIENT, "it would save no replica") if left >= s.replicas else None
    return weighed(Action.DTYPE_DOWN, rung.dtype, s.replicas, effect, closed)


def up(s: PolicyInput) -> list[Weighed]:
    """Weigh every larger dtype of the ladder, the largest first; none in mode Fixed."""
    return [_up(s, rung) for rung in _rungs(s) if smaller(s.dtype, rung.dtype)]


def _up(s: PolicyInput, rung: Rung) -> Weighed:
    effect = _in_dtype(s, rung.dtype, Action.DTYPE_UP, s.spec.kv_cache.pressure.low_percent, peak=True)
    crowded = beyond(s.saturations, s.workload, s.dtype, rung.dtype, s.counted) or effect.late
    closed = _dtype_closed(s, rung, effect.itl, climb=True)
    if closed is None and s.spec.scaling.mode == "Operator" and s.replicas > max(1, s.spec.scaling.min_replicas):
        closed = Outcome.REPLICAS_FIRST, "kvpilot removes a replica before it takes a larger dtype"
    if closed is None and effect.use > effect.limit:
        closed = Outcome.TOO_TIGHT, f"the peak would fill {effect.use}%, above lowPercent {effect.limit}%"
    if closed is None and crowded is not None:
        closed = Outcome.TOO_TIGHT, crowded
    return weighed(Action.DTYPE_UP, rung.dtype, s.replicas, effect, closed)


def _rungs(s: PolicyInput) -> tuple[Rung, ...]:
    return () if s.spec.kv_cache.mode == "Fixed" else rungs(s.spec, s.node, s.model, s.denied, s.now)


def _in_dtype(s: PolicyInput, dtype: str, action: Action, limit: int, *, peak: bool) -> Effect:
    """Forecast the effect of another dtype on the present load or, with `peak`, on the peak of a calm service."""
    times, itl = _gain(s, dtype), expected_itl_change(s, dtype)
    tokens = int(s.workload.capacity_per_pod * s.counted * times)
    parts = (s.workload.peak_load, s.counted * times) if peak else (s.workload.demand_tokens, tokens)
    return Effect(tokens, percent(*parts), limit, itl, times, would_miss(s, action, itl))


def _gain(s: PolicyInput, dtype: str) -> float:
    """Return the factor by which the capacity grows: measured by a canary, or else computed from bits per element."""
    measured = next((e.capacity_percent for e in s.experience(dtype) if e.capacity_percent), None)
    if measured:
        return measured / 100
    kv_cache, w = s.spec.kv_cache, s.workload
    tokens = None if w.mean_prompt is None or w.mean_generation is None else int(w.mean_prompt + w.mean_generation / 2)
    asked = dtypes.parse(dtype).recent_tokens(kv_cache.recent_tokens, s.spec.model.max_model_len)
    windows = window_share(s.dtype, s.model, s.recent_tokens, tokens), window_share(dtype, s.model, asked, tokens)
    return gain(s.dtype, dtype, s.model, kv_cache.skip_layers, windows)


def _dtype_closed(s: PolicyInput, rung: Rung, itl: Expected, *, climb: bool) -> Closed | None:
    if rung.outcome is not None:
        return rung.outcome, rung.message
    limit = s.spec.canary.max_itl_p95_regression_percent
    if itl.percent is not None and itl.percent > limit:
        why = f"the canary would fail: {itl.percent:+d}% time between two tokens, maxITLP95RegressionPercent {limit}"
        return Outcome.VETOED, why
    return s.canary_closed(climb=climb)


def out(s: PolicyInput) -> Weighed:
    """Weigh more replicas for the demand: at most twice as many as now, or four more in a surge if that is more."""
    most = max(s.replicas * _MOST_GROWTH, s.replicas + (_QUICK if s.workload.surge else 1))
    wanted = min(max(s.replicas + 1, needed(s)), most)
    replicas = max(s.replicas + 1, min(s.spec.scaling.max_replicas, wanted))
    tokens = int(s.workload.capacity_per_pod * replicas)
    use, limit = percent(s.workload.demand_tokens, tokens), s.spec.kv_cache.pressure.high_percent
    itl = expected_itl_change(s, s.dtype, s.counted / replicas)
    return weighed(Action.SCALE_OUT, s.dtype, replicas, Effect(tokens, use, limit, itl), _out_closed(s))


def _out_closed(s: PolicyInput) -> Closed | None:
    scaling, w = s.spec.scaling, s.workload
    if scaling.mode == "External":
        return _EXTERNAL
    if s.replicas >= scaling.max_replicas:
        return Outcome.AT_LIMIT, f"scaling.maxReplicas is {scaling.max_replicas}"
    if s.ready < s.replicas and not s.loading:
        text = f"{s.ready} of {s.replicas} replicas answer; further replicas would not start either"
        return Outcome.REPLICAS_MISSING, text
    if w.in_time:
        return Outcome.OBJECTIVES_HELD, "every objective is met without another replica"
    if (w.missed or w.surge) and w.running + w.waiting < w.pods and not w.bound:
        return Outcome.INSUFFICIENT, ALONE
    return None


def needed(s: PolicyInput) -> int:
    """Return the replicas that the demand needs.

    If memory is the limit, KV use must stay below `highPercent`. In a surge, no replica may get more requests than at
    its best known rate.
    """
    w = s.workload
    if w.surge is not None:
        each = max(w.best_requests_per_second or 0.0, able(s.saturations, w, s.dtype) or 0.0)
        enough = (w.surge.arrivals + w.surge.waiting / DRAIN_SECONDS) / each if each else 0
        wanted = math.ceil(min(enough, s.spec.scaling.max_replicas))
        # If memory was short, engines compute evicted prefixes again. Only a doubled cache noticeably helps.
        return max(wanted, 2 * w.pods) if w.memory else wanted
    if w.kind == WorkloadKind.MEMORY_BOUND:
        usable = w.capacity_per_pod * s.spec.kv_cache.pressure.high_percent / 100
        return math.ceil(w.demand_tokens / usable) if usable > 0 else 0
    held = w.usage_percent / 100 * w.capacity_tokens
    return math.ceil(s.replicas * w.demand_tokens / held) if held > 0 else 0


def scale_in(s: PolicyInput) -> Weighed:
    """Weigh a scale-in by one replica, or by up to half of them if the rate that a replica can handle is known."""
    least = s.replicas - 1
    if able(s.saturations, s.workload, s.dtype) is not None:
        least = min(least, max(math.ceil(s.replicas / _MOST_GROWTH), s.spec.scaling.min_replicas))
    fewer = [_scale_in(s, max(0, replicas)) for replicas in range(least, s.replicas)]
    return next((step for step in fewer if step.open), fewer[-1])


def _scale_in(s: PolicyInput, replicas: int) -> Weighed:
    pressure = s.spec.kv_cache.pressure
    left = max(1, min(replicas, s.ready))
    tokens, use = int(s.workload.capacity_per_pod * left), percent(s.workload.peak_load, left)
    limit, itl = (pressure.low_percent + pressure.high_percent) // 2, expected_itl_change(s, s.dtype, s.counted / left)
    effect = Effect(tokens, use, limit, itl)
    return weighed(Action.SCALE_IN, s.dtype, replicas, effect, _in_closed(s, replicas, left, effect))


def _in_closed(s: PolicyInput, replicas: int, left: int, effect: Effect) -> Closed | None:
    scaling, margin = s.spec.scaling, effect.limit
    if s.replicas <= scaling.min_replicas or s.replicas <= 1:
        return Outcome.AT_LIMIT, f"scaling.minReplicas is {scaling.min_replicas}"
    # Wait until the calm period has been observed with the present number of replicas.
    seconds = max(s.spec.kv_cache.pressure.sustained_seconds, scaling.scale_down_stabilization_seconds)
    if s.replicas_changed is not None and s.now < s.replicas_changed + timedelta(seconds=seconds):
        return Outcome.COOLING_DOWN, "the number of replicas has just changed"
    if effect.use > margin:
        text = f"the peak would fill {effect.use}%, above {margin}% (between lowPercent and highPercent)"
        return Outcome.TOO_TIGHT, text
    crowded = beyond(s.saturations, s.workload, s.dtype, s.dtype, left) or _too_many_prompts(s, left)
    crowded = crowded or would_miss(s, Action.SCALE_IN, effect.itl, s.counted / left)
    if crowded is not None:
        return Outcome.TOO_TIGHT, crowded
    early = backing_off(s.now, s.dtype, replicas, s.scale_in_backoff)
    if early is not None:
        return Outcome.BACKING_OFF, early
    return _EXTERNAL if scaling.mode == "External" else None


def _too_many_prompts(s: PolicyInput, replicas: int) -> str | None:
    """Return the reason why so few replicas could not compute the prompts in time, whatever the KV use is, or None."""
    each = (s.workload.prompts_in_hand or 0.0) * s.workload.pods / max(1, replicas)
    if each <= _MOST_PROMPTS:
        return None
    return (
        f"each of {max(1, replicas)} replicas would compute {each:.2f} prompts at a time (the limit is {_MOST_PROMPTS})"
    )


def listed(chosen: Option, steps: list[Weighed]) -> tuple[Option, ...]:
    """List the chosen option first, then the others, as many as the journal holds."""
    return (chosen, *(step.option for step in steps if step.option is not chosen))[:MAX_OPTIONS]
