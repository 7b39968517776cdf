"""Which dtype? The safest rung of the ladder that relieves the pressure, past vetoes and denials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from kvpilot_kernels import formats
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.capacity import projected_tokens, smaller
from kvpilot_operator.decide.workload import Workload
from kvpilot_operator.state.snapshot import NodeFacts
from kvpilot_operator.state.status import Denied

# vLLM's CPU backend accepts these names and computes something else: perplexity 40,000 and more where bf16 has 27
# (SmolLM2-135M, vLLM 0.32.0).
_NOT_ON_CPU = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "turboquant")
# FP8 arithmetic came with compute capability 8.9 (Ada, Hopper).
_FP8 = ("fp8",)


@dataclass(frozen=True, slots=True)
class Choice:
    """A dtype and why, with the rungs that were passed over."""

    dtype: str
    message: str


def veto(dtype: str, node: NodeFacts) -> str | None:
    """Why this hardware rules the dtype out, or None."""
    if node.gpu == "cpu":
        if dtype.startswith(_NOT_ON_CPU):
            return f"{dtype}: vLLM's CPU backend accepts it but does not compute it, answers are garbage"
        return None
    old = node.compute_capability is not None and node.compute_capability < (8, 0)
    if formats.parse(dtype).ours and old:
        return f"{dtype} needs compute capability 8.0 or newer; {node.gpu} has {_dotted(node)}"
    if dtype.startswith(_FP8) and node.compute_capability is not None and node.compute_capability < (8, 9):
        return f"{dtype} needs compute capability 8.9 or newer; {node.gpu} has {_dotted(node)}"
    return None


def _dotted(node: NodeFacts) -> str:
    return ".".join(map(str, node.compute_capability or ()))


def denial(dtype: str, spec: Spec, node: NodeFacts, denied: Sequence[Denied], now: datetime) -> Denied | None:
    """The standing denial of this dtype for this model, image and GPU, if any."""
    if spec.rollout.deny_seconds == 0:
        return None
    wanted = (dtype, spec.model.source, spec.engine.image, node.gpu)
    return next((d for d in denied if (d.dtype, d.model, d.image, d.gpu) == wanted and d.until > now), None)


def step_down(
    spec: Spec, current: str, workload: Workload, node: NodeFacts, denied: Callable[[str], Denied | None]
) -> Choice | None:
    """The next dtype for a memory-bound service, or None at the end of the ladder.

    The first rung (safest first) under which the demand fits below `highPercent` wins; where none fits, the smallest.
    """
    limit = spec.kv_cache.pressure.high_percent
    passed: list[str] = []
    last: tuple[str, int, int] | None = None
    for rung in spec.kv_cache.ladder:
        if not smaller(rung, current):
            continue
        refusal = veto(rung, node)
        standing = denied(rung)
        if refusal is not None:
            passed.append(refusal)
            continue
        if standing is not None:
            passed.append(f"{rung} is denied until {standing.until:%Y-%m-%dT%H:%M:%SZ} ({standing.reason})")
            continue
        tokens = projected_tokens(workload.capacity_tokens, current, rung)
        percent = round(100 * workload.demand_tokens / max(tokens, 1))
        if percent <= limit:
            return Choice(rung, _explain(current, rung, workload, tokens, percent, passed))
        passed.append(f"{rung} would hold {tokens} tokens and be {percent}% full")
        last = (rung, tokens, percent)
    if last is None:
        return None
    rung, tokens, percent = last
    return Choice(rung, _explain(current, rung, workload, tokens, percent, passed[:-1]))


def _explain(current: str, rung: str, workload: Workload, tokens: int, percent: int, passed: Sequence[str]) -> str:
    text = (
        f"running and waiting requests need {workload.demand_tokens} tokens; {current} holds "
        f"{workload.capacity_tokens}, {rung} would hold {tokens} and be {percent}% full"
    )
    return f"{text}; passed over: {'; '.join(passed)}" if passed else text
