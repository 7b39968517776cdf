"""Forecast the inter-token latency (ITL) and TTFT after a step.

The forecast uses the measurements of earlier canaries. Without any, it assumes that attention takes
bytes / (peak bandwidth * the dtype's `read_share`) seconds of a decode step, where `bytes` is the size of the KV cache
that attention reads. The rest of the step does not depend on the cache.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

from kvpilot_formats.formats import FORMATS
from kvpilot_operator.api.words import Action, Verdict
from kvpilot_operator.decide.steps.capacity import bits_per_element
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.gpus import by_product
from kvpilot_operator.state.status import Experience

# Attention gets at most this share of the observed time between two tokens. The forecast overstates attention, because
# it counts a shared prefix once for each request.
_MOST = 0.9
# After a step that frees a resource, latency must stay below this share of the objective: forecasts are inexact.
_MARGIN = 0.8


@dataclass(frozen=True, slots=True)
class Expected:
    """The change of the time between two tokens in percent (None if unknown), and the source of the figure."""

    percent: int | None
    message: str


def expected_itl_change(s: PolicyInput, to_dtype: str, load: float = 1.0) -> Expected:
    """Forecast the change of the time between two tokens if the dtype becomes `to_dtype`.

    `to_dtype` may be the present dtype. `load` is the factor by which the tokens in each replica's cache change.
    """
    if s.dtype != to_dtype:
        measured = (e.itl_p95_change_percent for e in s.experience(to_dtype) if _stands(s, e))
        known = next((percent for percent in measured if percent is not None), None)
        if known is not None:
            return Expected(known, f"a canary measured {known:+d}% time between two tokens")
    now, after = _attention_seconds(s, s.dtype), _attention_seconds(s, to_dtype)
    if isinstance(now, str) or isinstance(after, str):
        unknown = now if isinstance(now, str) else after
        return Expected(None, f"no forecast of the time between two tokens: {unknown}")
    observed = s.workload.itl_seconds
    if not observed:
        return Expected(None, "no forecast of the time between two tokens: no token was generated")
    part = min(now, _MOST * observed)
    percent = round(100 * (part * (after / now) * load - part) / observed) if now > 0 else 0
    of = f"{observed * 1000:.1f} ms, in which attention reads the cache for {part * 1000:.1f} ms"
    return Expected(percent, f"{percent:+d}% time between two tokens, from {of} (with H200 read speeds)")


def _stands(s: PolicyInput, e: Experience) -> bool:
    """Return True if a trial's figures still count: it passed, or it failed less than denySeconds ago."""
    forgiven = e.time + timedelta(seconds=s.spec.rollout.deny_seconds)
    return e.verdict == Verdict.PASSED or (e.verdict == Verdict.FAILED and s.now < forgiven)


def would_miss(s: PolicyInput, action: Action, itl: Expected, load: float = 1.0) -> str | None:
    """Describe an objective that would be missed after a step, or return None.

    Percentiles are assumed to change like means:

    - ITL changes by `itl`.
    - After a step to a smaller dtype, no request waits: TTFT falls to the time that the prompt itself takes.
    - After any other step, each replica gets `load` times the requests. TTFT grows as in a queue whose utilization is
      the share of time in which a replica computes prompts.

    After a step that frees a resource, latencies must stay below the objective by a margin (`_MARGIN`).
    """
    w, share = s.workload, 1.0 if action == Action.DTYPE_DOWN else _MARGIN
    for one in w.objectives:
        if one.seconds is None:
            continue
        if one.objective.metric == "ITL":
            after = one.seconds * (1 + (itl.percent or 0) / 100)
        elif action == Action.DTYPE_DOWN:
            # By Little's law, the quotient is the mean time in seconds that a request's prompt takes.
            after = min(one.seconds, (w.prompts_in_hand or 0.0) / (w.requests_per_second or math.inf))
        else:
            busy = w.prompts_in_hand or 0.0
            after = one.seconds * (1 - busy) / (1 - busy * load) if busy * load < 1 else math.inf
        if after > share * one.limit:
            margin = "" if share == 1 else f" (the limit is {share * 100:.0f}% of the objective)"
            return f"{one.objective} would be {after * 1000:.0f} ms, objective {one.objective.milliseconds} ms{margin}"
    return None


def _attention_seconds(s: PolicyInput, dtype: str) -> float | str:
    """Return the seconds in which one GPU reads all cached tokens once, or a text that names the unknown fact."""
    node, model = s.node, s.model
    gpu = by_product(node.gpu)
    if gpu is None:
        return f"kvpilot does not know the bandwidth of {node.gpu}"
    if model is None or model.head_dim <= 0:
        return "the engine has not reported the model's architecture"
    if model.mla:
        return "the model has multi-head latent attention"
    known = FORMATS.get(dtype)
    share = None if known is None else known.read_share(model.head_dim) or known.read_share(128)
    if share is None:
        return f"{dtype} was never measured"
    tokens = s.workload.usage_percent / 100 * s.workload.capacity_per_pod
    heads = -(-model.kv_heads // s.spec.engine.tensor_parallel)
    bits = bits_per_element(dtype, model, s.spec.kv_cache.skip_layers)
    cached = tokens * model.layers * heads * 2 * model.head_dim * bits / 8
    return cached / (gpu.bandwidth_gb_s * 1e9 * share)
