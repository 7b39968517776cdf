"""What would each step buy, and what would it cost? Capacity, use after it, GPUs, and the time between two tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from kvpilot_kernels import formats
from kvpilot_operator.decide.judging.capacity import gain, ring_share, smaller
from kvpilot_operator.decide.judging.ladder import Rung, rungs
from kvpilot_operator.decide.judging.latency import Expected, expected_itl_change
from kvpilot_operator.decide.judging.regret import held
from kvpilot_operator.decide.judging.saturation import beyond
from kvpilot_operator.decide.judging.situation import Situation
from kvpilot_operator.state.status import MAX_OPTIONS, Option, clip

# One step out at most doubles the replicas: the demand of a moment is an estimate.
_MOST_GROWTH = 2
# Prompts that a replica may have in hand on average after one has left. They grow faster than the load, and one at all
# moments is the most that an engine can serve (Little's law; docs/pilot.md).
_MOST_PROMPTS = 0.6
# What the schema holds of a figure.
_MOST_PERCENT = 1_000_000


@dataclass(frozen=True, slots=True)
class Step:
    """An option with what only the choice needs to know: `open` where nothing rules it out."""

    option: Option
    open: bool
    fits: bool


def stay(s: Situation, outcome: str, message: str) -> Option:
    """Leave everything as it is."""
    w = s.workload
    tokens = int(w.capacity_per_pod * s.counted)
    use = _percent(w.demand_tokens, tokens)
    return _option(s, "Stay", s.dtype, s.replicas, outcome, message, tokens, use, None)


def down(s: Situation) -> list[Step]:
    """Every smaller dtype of the ladder; none in mode Fixed, where the dtype is the user's."""
    return [_down(s, rung) for rung in _rungs(s) if smaller(rung.dtype, s.dtype)]


def up(s: Situation) -> list[Step]:
    """Every larger dtype of the ladder, the largest first; none in mode Fixed."""
    return [_up(s, rung) for rung in _rungs(s) if smaller(s.dtype, rung.dtype)]


def out(s: Situation) -> Step:
    """As many replicas more as the demand needs, at most twice as many as now."""
    w, scaling = s.workload, s.spec.scaling
    wanted = min(max(s.replicas + 1, _needed(s)), max(s.replicas, 1) * _MOST_GROWTH)
    replicas = max(s.replicas + 1, min(scaling.max_replicas, wanted))
    tokens = int(w.capacity_per_pod * replicas)
    use = _percent(w.demand_tokens, tokens)
    itl = _itl(s, s.dtype, s.counted / replicas)
    fits = use <= s.spec.kv_cache.pressure.high_percent
    closed = _out_closed(s)
    outcome, why = closed or (("Possible", "") if fits else ("Insufficient", ""))
    text = f"{replicas} replicas would hold {tokens} tokens and be {use}% full; {itl.message}"
    message = f"{why}; {text}" if why else text
    option = _option(s, "ScaleOut", s.dtype, replicas, outcome, message, tokens, use, itl.percent)
    return Step(option, closed is None, fits)


def scale_in(s: Situation) -> Step:
    """One replica fewer."""
    w, scaling, pressure = s.workload, s.spec.scaling, s.spec.kv_cache.pressure
    replicas = max(0, s.replicas - 1)
    left = max(1, min(replicas, s.ready))
    tokens = int(w.capacity_per_pod * left)
    use = _percent(w.peak_load, left)
    margin = (pressure.low_percent + pressure.high_percent) // 2
    itl = _itl(s, s.dtype, s.counted / left)
    crowded = beyond(s.saturations, w, s.dtype, s.dtype, left) or _too_many_prompts(s, left)
    # The calm has to be seen anew with as many replicas as there are now.
    seconds = max(pressure.sustained_seconds, scaling.scale_down_stabilization_seconds)
    settles = s.replicas_changed is not None and s.now < s.replicas_changed + timedelta(seconds=seconds)
    outcome, why = "Possible", ""
    if s.replicas <= scaling.min_replicas or s.replicas <= 1:
        outcome, why = "AtLimit", f"scaling.minReplicas is {scaling.min_replicas}"
    elif settles:
        outcome, why = "Settling", "the number of replicas has just changed"
    elif use > margin:
        outcome, why = "TooTight", f"the peak would fill {use}%, above the {margin}% between lowPercent and highPercent"
    elif crowded is not None:
        outcome, why = "TooTight", crowded
    elif (regret := held(s.now, s.dtype, replicas, s.regret)) is not None:
        outcome, why = "Regretted", regret
    elif scaling.mode == "External":
        outcome, why = "NotOwner", "scaling.mode is External: an autoscaler or a person writes /scale"
    text = f"{replicas} replicas would hold {tokens} tokens and be {use}% full at the peak; {itl.message}"
    message = f"{why}; {text}" if why else text
    option = _option(s, "ScaleIn", s.dtype, replicas, outcome, message, tokens, use, itl.percent)
    return Step(option, outcome == "Possible", use <= margin)


def listed(chosen: Option, steps: list[Step]) -> tuple[Option, ...]:
    """The chosen option first, then the others, as many as the journal holds."""
    others = [step.option for step in steps if step.option is not chosen]
    return (chosen, *others)[:MAX_OPTIONS]


def _rungs(s: Situation) -> tuple[Rung, ...]:
    if s.spec.kv_cache.mode == "Fixed":
        return ()
    return rungs(s.spec, s.node, s.model, s.denied, s.now)


def _down(s: Situation, rung: Rung) -> Step:
    w, kv_cache = s.workload, s.spec.kv_cache
    times = _gain(s, rung.dtype)
    tokens = int(w.capacity_per_pod * s.counted * times)
    use = _percent(w.demand_tokens, tokens)
    itl = _itl(s, rung.dtype, 1.0)
    fits = use <= kv_cache.pressure.high_percent
    closed = _dtype_closed(s, rung, itl, climb=False)
    if closed is None and w.kind != "MemoryBound":
        closed = "NotMemory", "memory is not what binds"
    outcome, why = closed or (("Possible", "") if fits else ("Insufficient", ""))
    text = f"{rung.dtype} would hold {tokens} tokens ({times:.2f}x) and be {use}% full; {itl.message}"
    message = f"{why}; {text}" if why else text
    option = _option(s, "DtypeDown", rung.dtype, s.replicas, outcome, message, tokens, use, itl.percent)
    return Step(option, closed is None, fits)


def _up(s: Situation, rung: Rung) -> Step:
    w, kv_cache = s.workload, s.spec.kv_cache
    times = _gain(s, rung.dtype)
    tokens = int(w.capacity_per_pod * s.counted * times)
    use = _percent(w.peak_load, s.counted * times)
    itl = _itl(s, rung.dtype, 1.0)
    fits = use <= kv_cache.pressure.low_percent
    closed = _dtype_closed(s, rung, itl, climb=True)
    crowded = beyond(s.saturations, w, s.dtype, rung.dtype, s.counted)
    if closed is None and s.spec.scaling.mode == "Operator" and s.replicas > max(1, s.spec.scaling.min_replicas):
        closed = "ReplicasFirst", "a replica is given back before the dtype grows"
    if closed is None and not fits:
        closed = "TooTight", f"the peak would fill {use}%, above lowPercent {kv_cache.pressure.low_percent}%"
    if closed is None and crowded is not None:
        closed = "TooTight", crowded
    outcome, why = closed or ("Possible", "")
    text = f"{rung.dtype} would hold {tokens} tokens ({times:.2f}x) and be {use}% full at the peak; {itl.message}"
    message = f"{why}; {text}" if why else text
    option = _option(s, "DtypeUp", rung.dtype, s.replicas, outcome, message, tokens, use, itl.percent)
    return Step(option, closed is None, fits)


def _dtype_closed(s: Situation, rung: Rung, itl: Expected, *, climb: bool) -> tuple[str, str] | None:
    if rung.outcome is not None:
        return rung.outcome, rung.message
    limit = s.spec.canary.max_itl_p95_regression_percent
    if itl.percent is not None and itl.percent > limit:
        return (
            "Slower",
            f"the canary would fail: {itl.percent:+d}% between two tokens, maxITLP95RegressionPercent {limit}",
        )
    return s.canary_closed(climb=climb)


def _out_closed(s: Situation) -> tuple[str, str] | None:
    scaling = s.spec.scaling
    if scaling.mode == "External":
        return "NotOwner", "scaling.mode is External: an autoscaler or a person writes /scale"
    if s.replicas >= scaling.max_replicas:
        return "AtLimit", f"scaling.maxReplicas is {scaling.max_replicas}"
    if s.ready < s.replicas:
        return "ReplicasMissing", f"{s.ready} of {s.replicas} replicas answer; more of them would not come up either"
    return None


def _needed(s: Situation) -> int:
    """Replicas that hold the demand below `highPercent`; where memory does not bind, those that serve the queue too."""
    w = s.workload
    if w.kind == "MemoryBound":
        usable = w.capacity_per_pod * s.spec.kv_cache.pressure.high_percent / 100
        return math.ceil(w.demand_tokens / usable) if usable > 0 else 0
    held = w.usage_percent / 100 * w.capacity_tokens
    return math.ceil(s.replicas * w.demand_tokens / held) if held > 0 else 0


def _too_many_prompts(s: Situation, replicas: int) -> str | None:
    """Why the prompts would be too much for so few replicas, whatever the cache holds; None where they are not."""
    w = s.workload
    each = (w.prompts_in_hand or 0.0) * w.pods / max(1, replicas)
    if each <= _MOST_PROMPTS:
        return None
    return f"each of {max(1, replicas)} replicas would have {each:.2f} prompts in hand ({_MOST_PROMPTS} is the limit)"


def _gain(s: Situation, dtype: str) -> float:
    """Times the tokens: as a canary measured it for this model, image, GPU and recent window, else by bits."""
    kv_cache, w = s.spec.kv_cache, s.workload
    wanted = (dtype, s.dtype, s.spec.model.source, s.spec.engine.image, s.node.gpu, kv_cache.recent_tokens)
    for e in s.history:
        same = (e.dtype, e.from_dtype, e.model, e.image, e.gpu, e.recent_tokens) == wanted
        if same and e.capacity_percent:
            return e.capacity_percent / 100
    tokens = None if w.mean_prompt is None or w.mean_generation is None else int(w.mean_prompt + w.mean_generation / 2)
    asked = formats.parse(dtype).recent_tokens(kv_cache.recent_tokens)
    rings = ring_share(s.dtype, s.model, s.recent_tokens, tokens), ring_share(dtype, s.model, asked, tokens)
    return gain(s.dtype, dtype, s.model, kv_cache.skip_layers, rings)


def _itl(s: Situation, dtype: str, load: float) -> Expected:
    return expected_itl_change(
        spec=s.spec, workload=s.workload, node=s.node, model=s.model, history=s.history, from_dtype=s.dtype,
        to_dtype=dtype, load=load,
    )  # fmt: skip


def _percent(part: float, whole: float) -> int:
    if whole <= 0:
        return 0 if part <= 0 else _MOST_PERCENT
    return min(_MOST_PERCENT, math.ceil(100 * part / whole - 1e-9))


def _option(
    s: Situation, action: str, dtype: str, replicas: int, outcome: str, message: str, tokens: int, use: int,
    itl: int | None,
) -> Option:  # fmt: skip
    gpus = (replicas - s.replicas) * s.spec.engine.tensor_parallel_size
    return Option(
        action=action, dtype=dtype, replicas=replicas, gpus=gpus, outcome=outcome, message=clip(message),
        capacity_tokens=tokens, usage_percent=use, itl_change_percent=itl,
    )  # fmt: skip
