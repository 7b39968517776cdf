"""Which dtypes are there to choose from, and which of them are ruled out for this service now?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.judging.feasibility import infeasible, slow_fp8
from kvpilot_operator.state.enums import Outcome, Reason
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_operator.state.status import Denied

# Denials for these reasons say that answers are wrong: a dtype that serves all the same is left.
ACCURACY_REASONS = (Reason.ACCURACY_REGRESSED, Reason.ACCURACY_DRIFTED)
# A revision that failed for want of capacity, or for errors, may be tried again after this long.
RETRY_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Rung:
    """A dtype of the ladder; `outcome` is Vetoed or Denied where it is ruled out, and `message` says why."""

    dtype: str
    outcome: Outcome | None = None
    message: str = ""


def rungs(
    spec: Spec, node: NodeFacts, model: ModelFacts | None, denied: Sequence[Denied], now: datetime
) -> tuple[Rung, ...]:
    """The baseline and the ladder, from the safest to the smallest."""
    found = [_rung(dtype, spec, node, model, denied, now) for dtype in (spec.kv_cache.baseline, *spec.kv_cache.ladder)]
    ours_open = any(rung.outcome is None and not rung.dtype.startswith("fp8") for rung in found[1:])
    for i, rung in enumerate(found):
        slow = slow_fp8(rung.dtype, model)
        if rung.outcome is None and slow is not None and ours_open:
            found[i] = Rung(rung.dtype, Outcome.VETOED, slow)
    return tuple(found)


def denial(dtype: str, spec: Spec, node: NodeFacts, denied: Sequence[Denied], now: datetime) -> Denied | None:
    """The standing denial of this dtype for this model, image, GPU and recent window, if any."""
    if spec.rollout.deny_seconds == 0:
        return None
    wanted = subject(dtype, spec, node)
    return next((d for d in denied if about(d) == wanted and d.until > now), None)


def subject(dtype: str, spec: Spec, node: NodeFacts) -> tuple[str, str, str, str, int | None]:
    """What a denial of this dtype would be of now."""
    return dtype, spec.model.source, spec.engine.image, node.gpu, spec.kv_cache.recent_tokens_of(dtype)


def about(d: Denied) -> tuple[str, str, str, str, int | None]:
    """What a denial is of."""
    return d.dtype, d.model, d.image, d.gpu, d.recent_tokens


def _rung(
    dtype: str, spec: Spec, node: NodeFacts, model: ModelFacts | None, denied: Sequence[Denied], now: datetime
) -> Rung:
    ruled_out = infeasible(dtype, spec, node, model)
    if ruled_out is not None:
        return Rung(dtype, Outcome.VETOED, ruled_out.message)
    standing = denial(dtype, spec, node, denied, now)
    if standing is not None:
        return Rung(
            dtype, Outcome.DENIED, f"{dtype} is denied until {standing.until:%Y-%m-%dT%H:%M:%SZ} ({standing.reason})"
        )
    return Rung(dtype)
