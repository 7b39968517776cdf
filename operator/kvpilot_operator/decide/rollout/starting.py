"""May a canary start, and how does it? What it needs has to be known, and a replica may have to give way to it."""

from __future__ import annotations

import msgspec

from kvpilot_operator.api.words import Action, Reason, Stage, TrafficMode
from kvpilot_operator.decide.accuracy import baseline
from kvpilot_operator.decide.context import Context, Target
from kvpilot_operator.decide.objects import pools
from kvpilot_operator.decide.traffic_plan import one_can_leave
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.status import Canary, Stable, clip

# A target of this reason leaves a dtype that harms answers: it is probed, but goes through no steps of traffic.
URGENT = Reason.ACCURACY_DRIFTED


def start_fault(c: Context, target: Target | None = None) -> Cause | None:
    """Why no canary can be started for this target (None: for any), with the remedy; None where one can."""
    spec, replicas = c.spec, c.replicas
    canary = f"a canary for {target.dtype}" if target is not None else "a canary"
    needed = (Question.POOLS, Question.PROBE_SETS, Question.NODE)
    unread = next((one for one in map(c.snapshot.unread, needed) if one is not None), None)
    if unread is not None:
        return Cause(Reason.RECONCILE_INCOMPLETE, f"no canary is started while it is not known what it needs: {unread}")
    broken = c.snapshot.probes.fault
    if broken is not None:
        return Cause(
            Reason.PROBE_SET_INVALID, f"the probe sets cannot be used, and {canary} starts once they can: {broken}"
        )
    if replicas == 0:
        return Cause(Reason.SCALED_TO_ZERO, f"spec.replicas is 0: {canary} starts once there are replicas again")
    if spec.canary.capacity_policy == "ReplaceOne" and not one_can_leave(spec, replicas):
        return Cause(
            Reason.UNSCHEDULABLE,
            f"spec.canary.capacityPolicy ReplaceOne takes the place of one of {replicas} replicas, and "
            f"spec.disruption.minAvailable {spec.disruption.min_available} needs them all; raise the replicas, lower "
            "minAvailable, or choose Surge",
        )
    unfit = None if baseline.known(c) is not None else baseline.misreported(c)
    if unfit is not None:
        return Cause(unfit.reason, f"{canary} would have no reference: {unfit.message}")
    held = None if target is not None and target.reason == URGENT else c.plan.held
    return pools.fault(c) if held is None else Cause(Reason.ROUTE_UNUSABLE, held)


def hold(c: Context, fault: Cause) -> Context:
    """Say once why no canary is started."""
    return c if c.holds(fault.reason) else c.record(Action.HOLD, fault.reason, fault.message, warning=True)


def start(c: Context, stable: Stable) -> Context:
    """Begin a trial of the target beside what serves."""
    target, sample = c.target, c.snapshot.last_sample(stable.revision)
    canary = Canary(
        revision=target.revision,
        dtype=target.dtype,
        from_dtype=stable.dtype,
        stage=Stage.STARTING,
        started_time=c.now,
        stage_time=c.now,
        generation=c.snapshot.generation,
        reason=target.reason,
        message=clip(target.message),
        stable_capacity_tokens=sample.capacity_tokens // sample.pods if sample is not None else None,
        replaces_one=c.spec.canary.capacity_policy == "ReplaceOne",
        traffic_mode=TrafficMode.PROBE_ONLY if target.reason == URGENT else None,
    )
    known = msgspec.structs.replace(c.status.scaling, saturations=c.policy.saturations)
    c = c.set(canary=canary, scaling=known)
    c = c.record_trial(
        Action.START_CANARY, target.reason, target.message, event="CanaryStarted", options=target.options
    )
    return c if target.warning is None else c.event("PreflightWarning", target.warning, warning=True)
