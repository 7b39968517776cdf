"""Which step of the rollout? A canary starts, is probed, takes traffic, is promoted; `status.canary` is its state.

    none --target differs--> Starting --ready--> Probing --Passed--> Shifting --every step Passed--> Promoting --> none
                                |                   |                   |                               |
                                +-------------------+-------------------+-------------------------------+
                                                    +--> RollingBack --traffic back, pods gone--> none

Each step is written to the status before its objects change, and each is derived from what is observed, so a pass that
is cut off anywhere is simply done again. `placement` says which objects follow, `shifting` how a step is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging import factors
from kvpilot_operator.decide.rejections import finding, rejected
from kvpilot_operator.decide.target import Target, render
from kvpilot_operator.decide.trial import shifting, traffic
from kvpilot_operator.decide.trial.ending import SUPERSEDED, finish_promotion, finish_rollback, roll_back
from kvpilot_operator.decide.trial.exchange import side
from kvpilot_operator.decide.trial.refusal import EngineFailure, engine_failure
from kvpilot_operator.render.names import deployment_name
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import PodView, Snapshot
from kvpilot_operator.state.status import Canary, Stable, clip

__all__ = ["advance", "roll_back", "start_fault"]

# A target of this reason is a dtype that already harms answers: it is probed, but goes through no steps of traffic.
URGENT = "AccuracyDrifted"
# With SurgeOrReplaceOne a canary without a node gives up on spare capacity after this long.
SURGE_SECONDS = 60
# A stable side of which nothing answers for this long is down.
DOWN_SECONDS = 60


def advance(draft: Draft, s: Snapshot, spec: Spec, target: Target, replicas: int) -> None:
    """Move the rollout by at most one stage."""
    _take_back(draft, s)
    _mark_ready(draft, s)
    stable, canary = draft.status.stable, draft.status.canary
    if canary is not None:
        _advance_canary(draft, s, spec, target, canary, replicas)
    elif target.template is None:
        return
    elif stable is None:
        _serve(draft, target, "Started", f"first revision with {target.dtype}: {target.message}")
    elif target.revision == stable.revision:
        return
    elif not stable.ever_ready:
        _serve(draft, target, "Replaced", f"{stable.revision} never became ready; {target.revision} takes its place")
    elif stable.revision not in s.deployments:
        _serve(
            draft, target, "Replaced", f"the Deployment of {stable.revision} is gone; {target.revision} takes its place"
        )
    elif not spec.rollout.paused and s.probes.fault is None:
        fault = start_fault(s, spec, target, replicas)
        if fault is None:
            _start_canary(draft, s, spec, target, stable, replicas)
        else:
            _hold(draft, s, fault)


def start_fault(s: Snapshot, spec: Spec, target: Target, replicas: int) -> EngineFailure | None:
    """Why no canary can be started for this target, with the remedy; None where one can."""
    unread = s.unread(Question.PROBE_SETS) or s.unread(Question.NODE)
    if unread is not None:
        return EngineFailure("NotObserved", f"no canary is started while it is not known what it needs: {unread}")
    if replicas == 0:
        return EngineFailure(
            "ScaledToZero", f"spec.replicas is 0: a canary for {target.dtype} starts once there are replicas again"
        )
    if spec.canary.capacity_policy == "ReplaceOne" and not traffic.one_can_leave(spec, replicas):
        return EngineFailure(
            "NoReplicaToReplace",
            f"spec.canary.capacityPolicy ReplaceOne takes the place of one of {replicas} replicas, and "
            f"spec.disruption.minAvailable {spec.disruption.min_available} needs them all; raise the replicas, lower "
            "minAvailable, or choose Surge",
        )
    held = None if target.reason == URGENT else traffic.plan(s, spec, None, replicas).held
    return None if held is None else EngineFailure("RouteUnusable", held)


def _mark_ready(draft: Draft, s: Snapshot) -> None:
    stable = draft.status.stable
    if stable is not None and not stable.ever_ready and s.ready_pods(stable.revision):
        draft.set(stable=Stable(revision=stable.revision, dtype=stable.dtype, since=stable.since, ever_ready=True))
        draft.event("EngineReady", f"revision {stable.revision} ({stable.dtype}) answers")


def _take_back(draft: Draft, s: Snapshot) -> None:
    """A revision that was replaced before it answered, and answers after all while requests still go to it, is stable.

    Its successor then comes as a canary, as every other change does: switching to it now would leave nobody to answer.
    """
    stable, there = draft.status.stable, s.deployments.get(s.traffic or "")
    if stable is None or stable.ever_ready or draft.status.canary is not None or there is None:
        return
    if there.revision == stable.revision or not s.ready_pods(there.revision) or s.ready_pods(stable.revision):
        return
    text = f"{there.revision} ({there.dtype}) answers after all, before {stable.revision} does"
    draft.set(stable=Stable(revision=there.revision, dtype=there.dtype, since=draft.now))
    draft.record("Serve", "TakenBack", text, from_dtype=stable.dtype, to_dtype=there.dtype)


def _serve(draft: Draft, target: Target, reason: str, message: str) -> None:
    draft.set(stable=Stable(revision=target.revision, dtype=target.dtype, since=draft.now))
    draft.record("Serve", reason, message, to_dtype=target.dtype)


def _hold(draft: Draft, s: Snapshot, fault: EngineFailure) -> None:
    before = s.status.condition("Progressing")
    if before is None or before.reason != fault.reason:
        draft.record("Hold", fault.reason, fault.message, warning=True)


def _start_canary(draft: Draft, s: Snapshot, spec: Spec, target: Target, stable: Stable, replicas: int) -> None:
    sample = s.last_sample(stable.revision)
    draft.set(
        canary=Canary(
            revision=target.revision,
            dtype=target.dtype,
            from_dtype=stable.dtype,
            stage="Starting",
            started_time=draft.now,
            stage_time=draft.now,
            generation=s.generation,
            reason=target.reason,
            message=clip(target.message),
            stable_capacity_tokens=sample.capacity_tokens // sample.pods if sample and sample.pods else None,
            replaces_one=spec.canary.capacity_policy == "ReplaceOne",
            traffic_mode="ProbeOnly" if target.reason == URGENT else None,
        )
    )
    draft.record(
        "StartCanary",
        target.reason,
        target.message,
        from_dtype=stable.dtype,
        to_dtype=target.dtype,
        event="CanaryStarted",
        options=target.options,
    )
    if target.warning is not None:
        draft.event("PreflightWarning", target.warning, warning=True)


def _advance_canary(draft: Draft, s: Snapshot, spec: Spec, target: Target, canary: Canary, replicas: int) -> None:
    if canary.stage == "RollingBack":
        finish_rollback(draft, s, canary)
        return
    if canary.stage == "Promoting" and s.traffic == canary.revision:
        if not traffic.routed(s):
            finish_promotion(draft, s, spec, canary)
        return
    overdue = s.now > shifting.deadline(spec, canary)
    if spec.rollout.paused:
        if overdue:
            # A pause stops the clock: it starts again where it ran out.
            draft.set_canary(stage_time=s.now, step_time=None if canary.step_time is None else s.now)
        return
    if target.revision != canary.revision:
        roll_back(draft, s, spec, "Error", SUPERSEDED, "the spec changed while the canary was on trial")
        return
    if replicas == 0 and canary.stage != "Promoting":
        roll_back(draft, s, spec, "Error", SUPERSEDED, "the service was scaled to 0 while the canary was on trial")
        return
    if canary.stage in ("Starting", "Probing") and canary.verdict not in ("Pending", "Passed"):
        roll_back(draft, s, spec, canary.verdict, canary.reason, canary.message)
        return
    failure = engine_failure(_pods_on_trial(s, spec, canary))
    if failure is not None:
        roll_back(draft, s, spec, "Error", failure.reason, failure.message)
        return
    differ = factors.mixed(s, canary.revision)
    if differ is not None:
        # What its probes say of one pod would not hold for the others.
        roll_back(draft, s, spec, "Error", factors.REASON, differ)
        return
    _note_capacity(draft, s, canary)
    if overdue:
        _give_up(draft, s, spec, canary)
    elif not _replace_one(draft, s, spec, canary, replicas):
        _advance_stage(draft, s, spec, canary, replicas)


def _advance_stage(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, replicas: int) -> None:
    if canary.stage == "Starting":
        ready = [pod for pod in _pods_on_trial(s, spec, canary) if pod.ready and pod.ip]
        if ready:
            draft.set_canary(stage="Probing")
            who = f"canary {canary.revision} ({canary.dtype})"
            if ready[0].revision != canary.revision:
                who = f"the {spec.kv_cache.baseline} replica that {who} is measured against"
            draft.event("CanaryReady", f"{who} answers; it is probed before any traffic")
    elif canary.stage == "Probing" and canary.verdict == "Passed":
        _share_traffic(draft, s, spec, canary, replicas)
    elif canary.stage == "Shifting":
        if shifting.advance(draft, s, spec, canary, replicas):
            _promote(draft, replicas)
    elif canary.stage == "Promoting":
        _note_exchange(draft, s, canary, replicas)


def _share_traffic(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, replicas: int) -> None:
    """The probes have passed: on to the steps, if there are any that can be set, or else to the promotion."""
    plan = traffic.plan(s, spec, canary, replicas)
    if plan.held is not None:
        if canary.message != plan.held:
            draft.set_canary(reason="RouteUnusable", message=plan.held)
    elif plan.mode == "ProbeOnly":
        draft.set_canary(traffic_mode="ProbeOnly")
        _promote(draft, replicas)
    elif _stable_is_down(s):
        # It is no measure of anything, and the canary may be its cure.
        draft.set_canary(traffic_mode="ProbeOnly")
        draft.event("NothingToCompare", "no stable replica answers: the canary's probes decide", warning=True)
        _promote(draft, replicas)
    elif s.status.stable is not None and s.ready_pods(s.status.stable.revision):
        shifting.begin(draft, s, plan)


def _stable_is_down(s: Snapshot) -> bool:
    """Whether nothing has answered for so long that it is no hiccup."""
    available = s.status.condition("Available")
    if available is None or available.status != "False":
        return False
    return s.now >= available.last_transition_time + timedelta(seconds=DOWN_SECONDS)


def _promote(draft: Draft, replicas: int) -> None:
    canary = draft.status.canary
    if canary is None:
        raise LookupError("no canary is in flight")
    draft.set_canary(stage="Promoting", step_time=None, verdict="Passed")
    draft.record(
        "Promote", "Promoting", f"scaling to {replicas} and switching traffic: {canary.message}",
        from_dtype=canary.from_dtype, to_dtype=canary.dtype,
    )  # fmt: skip


def _note_exchange(draft: Draft, s: Snapshot, canary: Canary, replicas: int) -> None:
    """Every replica that changes places has the progress deadline for itself."""
    here = side(s, canary.revision)
    reached = 100 * here.ready // max(replicas, 1)
    if here.ready >= here.replicas > 0 and canary.weight_percent != min(reached, 100):
        draft.set_canary(weight_percent=min(reached, 100), stage_time=s.now)


def _pods_on_trial(s: Snapshot, spec: Spec, canary: Canary) -> Sequence[PodView]:
    """The canary's pods and, before its verdict, those that are borrowed for its baseline."""
    pods = s.pods_of(canary.revision)
    stable, reference = s.status.stable, render(s, spec, spec.kv_cache.baseline)[0]
    if canary.stage not in ("Starting", "Probing") or (stable is not None and stable.revision == reference):
        return pods
    return pods if reference == canary.revision else (*pods, *s.pods_of(reference))


def _replace_one(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, replicas: int) -> bool:
    """Give up on spare capacity where the policy allows it; True when that was decided now."""
    if spec.canary.capacity_policy != "SurgeOrReplaceOne" or canary.replaces_one or replicas == 0:
        return False
    homeless = next((pod for pod in _pods_on_trial(s, spec, canary) if pod.unschedulable), None)
    if homeless is None or s.now < canary.stage_time + timedelta(seconds=SURGE_SECONDS):
        return False
    if not traffic.one_can_leave(spec, replicas):
        text = (
            f"no node has room for it ({homeless.unschedulable}), and none of {replicas} replicas can give way: "
            f"spec.disruption.minAvailable is {spec.disruption.min_available}; it waits for spare capacity"
        )
        if canary.message != text:
            draft.set_canary(message=text)
        return False
    draft.set_canary(replaces_one=True, stage_time=s.now)
    draft.record(
        "ReplaceOne", "NoSpareCapacity",
        f"no node had room for the canary in {SURGE_SECONDS} s ({homeless.unschedulable}): one of {replicas} replicas "
        "gives way to it", from_dtype=canary.from_dtype, to_dtype=canary.dtype,
    )  # fmt: skip
    return True


def _give_up(draft: Draft, s: Snapshot, spec: Spec, canary: Canary) -> None:
    seconds = spec.canary.progress_deadline_seconds
    if canary.stage == "Shifting" and canary.verdict == "Inconclusive":
        text = f"no verdict within {seconds} s after its time: {canary.message}"
        roll_back(draft, s, spec, "Inconclusive", canary.reason, text)
        return
    text = f"still {canary.stage} after {seconds} s{_why_waiting(s, spec, canary)}"
    if canary.stage == "Shifting" or canary.reason == "RouteUnusable":
        text = f"{text}: {canary.message}"
    roll_back(draft, s, spec, "Error", "ProgressDeadlineExceeded", text)


def _note_capacity(draft: Draft, s: Snapshot, canary: Canary) -> None:
    sample = s.last_sample(canary.revision)
    if sample is not None and sample.pods:
        each = sample.capacity_tokens // sample.pods
        if each != canary.capacity_tokens:
            draft.set_canary(capacity_tokens=each)


def _why_waiting(s: Snapshot, spec: Spec, canary: Canary) -> str:
    name = deployment_name(s.key.name, canary.revision)
    refused = [one for one in rejected(s) if (one.kind, one.name) == ("Deployment", name)]
    if refused:
        return f": {finding(refused).message}"
    for pod in _pods_on_trial(s, spec, canary):
        reason = pod.unschedulable or pod.waiting_reason
        if reason:
            return f": {reason}"
    return ""
