"""Decide the number of replicas within the spec's limits. In mode External the spec chooses it, else the policy."""

from datetime import datetime

import msgspec

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Action
from kvpilot_operator.decide.load.saturation import backoff
from kvpilot_operator.decide.steps.policy import PolicyDecision
from kvpilot_operator.state.status import Scaling

_STEPS = (Action.SCALE_OUT, Action.SCALE_IN)


def kept(spec: Spec, before: Scaling, now: datetime) -> Scaling:
    """Set the replicas by the spec and the last decision, before the policy chooses a step.

    - Mode External: take `spec.replicas`, which /scale writes.
    - Mode Operator: keep the last choice until `spec.replicas` changes, then start from the new number.

    If a user scales to 0, which needs minReplicas 0, the service stays at 0.
    """
    edited, last = before.spec_replicas != spec.replicas, before.desired_replicas
    owned = spec.scaling.mode == "Operator"
    start = spec.replicas if edited or last is None else last
    wanted = spec.scaling.clamp(start) if owned else None
    clamped = owned and last is not None and wanted != last
    changed = now if edited or clamped else before.changed_time
    return msgspec.structs.replace(before, desired_replicas=wanted, spec_replicas=spec.replicas, changed_time=changed)


def target_replicas(spec: Spec, scaling: Scaling) -> int:
    """Return the target number of replicas."""
    wanted = scaling.desired_replicas
    return spec.scaling.clamp(spec.replicas) if wanted is None else wanted


def after_decision(spec: Spec, scaling: Scaling, policy: PolicyDecision, dtype: str, now: datetime) -> Scaling:
    """Return the replicas after the chosen step. Modes Recommend and External only recommend these replicas."""
    step = policy.chosen
    would = policy.wanted if policy.wanted is not None and policy.wanted.action in _STEPS else step
    noted = msgspec.structs.replace(scaling, recommended_replicas=spec.scaling.clamp(would.replicas))
    if spec.kv_cache.mode == "Recommend":
        return noted
    given_back, known = backoff(
        step.action, dtype, target_replicas(spec, scaling), now, scaling.scaled_in_time, scaling.scale_in_backoff
    )
    noted = msgspec.structs.replace(noted, scaled_in_time=given_back, scale_in_backoff=known)
    if step.action not in _STEPS or scaling.desired_replicas is None:
        return noted
    return msgspec.structs.replace(
        noted, desired_replicas=step.replicas, changed_time=now, saturations=policy.saturations
    )
