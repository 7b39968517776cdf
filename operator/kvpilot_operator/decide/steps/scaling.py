"""The number of replicas: the user's, or the policy's, always within the limits of the spec."""

from __future__ import annotations

from datetime import datetime

import msgspec

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Action
from kvpilot_operator.decide.load.saturation import backoff
from kvpilot_operator.decide.steps.policy import PolicyDecision
from kvpilot_operator.state.status import Scaling

_STEPS = (Action.SCALE_OUT, Action.SCALE_IN)


def kept(spec: Spec, before: Scaling, now: datetime) -> Scaling:
    """Decide the replicas before a step is chosen.

    In mode External the number is `spec.replicas`, which `/scale` writes. In mode Operator it is the operator's last
    choice, which starts from `spec.replicas` and is reset whenever the user changes that field. Both stay within
    minReplicas and maxReplicas. 0 is only possible with minReplicas 0 and stays 0, because the user has stopped the
    service on purpose.
    """
    edited = before.spec_replicas != spec.replicas
    owned = spec.scaling.mode == "Operator"
    if edited or owned != (before.desired_replicas is not None):
        wanted = spec.scaling.clamp(spec.replicas) if owned else None
        changed = now if edited else before.changed_time
        return msgspec.structs.replace(
            before, desired_replicas=wanted, spec_replicas=spec.replicas, changed_time=changed
        )
    if before.desired_replicas is None:
        return before
    wanted = spec.scaling.clamp(before.desired_replicas)
    changed = before.changed_time if wanted == before.desired_replicas else now
    return msgspec.structs.replace(before, desired_replicas=wanted, changed_time=changed)


def target_replicas(spec: Spec, scaling: Scaling) -> int:
    """Return the target number of replicas."""
    wanted = scaling.desired_replicas
    return spec.scaling.clamp(spec.replicas) if wanted is None else wanted


def after_decision(spec: Spec, scaling: Scaling, policy: PolicyDecision, dtype: str, now: datetime) -> Scaling:
    """Return the replicas of a service of `dtype` after the step; modes Recommend and External only note them."""
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
