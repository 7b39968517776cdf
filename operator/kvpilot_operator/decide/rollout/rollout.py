"""Advance a rollout: a canary starts, is probed, takes traffic, is promoted. `status.canary` holds its stage.

    none --target differs--> Starting --ready--> Probing --Passed--> Shifting --every step Passed--> Promoting --> none
                                |                   |                   |                               |
                                +-------------------+-------------------+-------------------------------+
                                                    +--> RollingBack --traffic back, pods gone--> none

Each change of the stage is written to the status before objects change. Decisions depend only on observations, so an
interrupted reconcile is simply repeated.
"""

from datetime import timedelta

import msgspec

from kvpilot_operator.api.words import Action, ConditionType, Reason, Stage, TrafficMode, Verdict
from kvpilot_operator.decide.accuracy import baseline
from kvpilot_operator.decide.accuracy.reported import mismatch
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.diagnosis import engine_failure, made_anew, mixed_factors
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.decide.rollout import requested, shifting, starting
from kvpilot_operator.decide.rollout.ending import finish_promotion, finish_rollback, roll_back
from kvpilot_operator.decide.rollout.starting import SURGE_SECONDS, pods_on_trial, unschedulable, why_waiting
from kvpilot_operator.decide.traffic_plan import counts, one_can_leave
from kvpilot_operator.state.status import Canary, Stable

# The stable side counts as down if none of its pods answers for this long.
DOWN_SECONDS = 60


def advance(c: Context) -> Context:
    """Advance the rollout by at most one stage, such as from Starting to Probing."""
    lost = c.stable is None
    c = _mark_ready(_take_back(c))
    if lost and c.stable is not None:
        # This reconcile has chosen the target as if the service were new. Wait until the next one chooses again.
        return c
    stable, target = c.stable, c.target
    if c.canary is not None:
        return _advance_canary(c)
    if not target.startable:
        return c
    if stable is None:
        return _serve(c, "Started", f"first revision with {target.dtype}: {target.message}")
    if target.revision == stable.revision:
        return c
    if not stable.ever_ready or stable.revision not in c.snapshot.deployments:
        gone = f"revision {stable.revision} has no engines any more"
        why = gone if stable.ever_ready else f"{stable.revision} never became ready"
        return _serve(c, "Replaced", f"{why}; {target.revision} takes its place")
    # Before the operator's first write, it does not know if the API server refuses the InferencePool: start no canary.
    unknown = c.spec.inference_pool is not None and c.snapshot.rejections is None
    if c.spec.rollout.paused or unknown or starting.turn(c) is not None:
        return c
    fault = starting.start_fault(c, target)
    return starting.start(c, stable) if fault is None else c.hold(*fault)


def _mark_ready(c: Context) -> Context:
    stable = c.stable
    if stable is None or stable.ever_ready or not c.snapshot.answering_pods(stable.revision):
        return c
    answers = f"revision {stable.revision} ({stable.dtype}) answers"
    return c.set(stable=msgspec.structs.replace(stable, ever_ready=True)).event("EngineReady", answers)


def _take_back(c: Context) -> Context:
    """Make an answering revision stable again if the Service still selects it.

    The revision was replaced before it answered, or the status that named it was lost. The newer revision then starts
    as a canary, so that the present pods keep answering.
    """
    s, stable, asked = c.snapshot, c.stable, c.spec.scaling
    if c.canary is not None or (stable is not None and stable.ever_ready):
        return c
    every = stable is None and s.traffic == traffic.EVERY_REVISION
    selected = [view for name, view in s.deployments.items() if every or name == s.traffic]
    there = max(selected, key=lambda view: len(s.answering_pods(view.revision)), default=None)
    if there is None or not s.answering_pods(there.revision):
        return c
    text = f"{there.revision} ({there.dtype}) answers, although the status did not name it as the serving revision"
    if stable is not None:
        if there.revision == stable.revision or s.ready_pods(stable.revision):
            return c
        text = f"{there.revision} ({there.dtype}) answers, and {stable.revision}, which replaced it, does not yet"
    elif asked.mode == "Operator":
        c = c.set_scaling(desired_replicas=asked.clamp(there.replicas))
    before = None if stable is None else stable.dtype
    c = c.set(stable=Stable(revision=there.revision, dtype=there.dtype, since=c.now))
    return c.record(Action.SERVE, "TakenBack", text, from_dtype=before, to_dtype=there.dtype)


def _serve(c: Context, reason: str, message: str) -> Context:
    c = c.set(stable=Stable(revision=c.target.revision, dtype=c.target.dtype, since=c.now))
    return c.record(Action.SERVE, reason, message, to_dtype=c.target.dtype)


def _advance_canary(c: Context) -> Context:
    s, canary = c.snapshot, in_flight(c)
    if canary.stage == Stage.ROLLING_BACK:
        return finish_rollback(c)
    if canary.stage == Stage.PROMOTING and s.traffic == canary.revision:
        return c if traffic.routed(s) else finish_promotion(c)
    overdue = c.now > shifting.deadline(c.spec, canary)
    if c.spec.rollout.paused:
        # The deadline does not run during a pause, so restart it if it has passed.
        again = None if canary.step_time is None else c.now
        return c.set_canary(stage_time=c.now, step_time=again) if overdue else c
    if (fault := _fault(c, canary)) is not None:
        return roll_back(c, *fault)
    sample = s.last_sample(canary.revision)
    c = c if sample is None else c.set_canary(capacity_tokens=sample.capacity_tokens // sample.pods)
    if overdue:
        return _give_up(c)
    no_node = unschedulable(c)
    return _advance_stage(c) if no_node is None else _replace_one(c, no_node)


def _fault(c: Context, canary: Canary) -> tuple[Verdict, str, str] | None:
    """Return the verdict, reason and message that end the trial now, or None."""
    s, untried = c.snapshot, baseline.on_trial(c) and baseline.known(c) is None
    if c.target.revision != canary.revision:
        return Verdict.ERROR, Reason.SUPERSEDED, "the spec changed during the canary"
    if c.replicas == 0 and canary.stage != Stage.PROMOTING:
        return Verdict.ERROR, Reason.SUPERSEDED, "the service was scaled to 0 during the canary"
    if c.policy.chosen.action == Action.SCALE_OUT and c.spec.kv_cache.mode == "Auto":
        # The policy adds replicas during a trial only in a surge that may abort the trial.
        return Verdict.ERROR, Reason.SUPERSEDED, f"the load grows too fast: {c.replicas} replicas are needed first"
    if canary.stage in (Stage.STARTING, Stage.PROBING) and canary.verdict not in (Verdict.PENDING, Verdict.PASSED):
        return canary.verdict, canary.reason, canary.message
    if (failure := engine_failure([*pods_on_trial(c), *made_anew(s, canary.revision)])) is not None:
        return Verdict.ERROR, *failure
    # Pods with different calibration factors answer differently, so a probe of one pod says nothing about the others.
    if (differ := mixed_factors(s, canary.revision)) is not None:
        return Verdict.ERROR, Reason.MIXED_FACTORS, differ
    if (other := mismatch(s, canary.revision, canary.dtype)) is not None:
        return Verdict.ERROR, Reason.DTYPE_MISMATCH, other
    unfit = baseline.misreported(c) if untried else None
    return None if unfit is None else (Verdict.INCONCLUSIVE, *unfit)


def _advance_stage(c: Context) -> Context:
    canary = in_flight(c)
    if canary.stage == Stage.STARTING:
        answering = [pod for pod in pods_on_trial(c) if pod.answers]
        if not answering:
            return c
        who = f"canary {canary.revision} ({canary.dtype})"
        if answering[0].revision != canary.revision:
            who = f"the {c.spec.kv_cache.baseline} replica, with which {who} is compared,"
        text = f"{who} answers; it is probed before any traffic"
        return c.set_canary(stage=Stage.PROBING).event("CanaryReady", text)
    if canary.stage == Stage.PROBING and canary.verdict == Verdict.PASSED:
        return _share_traffic(c)
    if canary.stage == Stage.SHIFTING:
        # If the user has removed all steps during the trial, promote without them.
        c = shifting.advance_step(c) if c.spec.canary.steps else c
        over = not c.spec.canary.steps or in_flight(c).verdict == Verdict.PASSED or requested.skips_steps(c)
        return _promote(c) if over else c
    here = counts(c.snapshot, canary.revision)
    reached = min(100, 100 * here.ready // max(c.replicas, 1))
    moved = here.ready >= here.replicas > 0 and canary.weight_percent != reached
    # Restart the progress deadline for each replaced replica.
    promoting = canary.stage == Stage.PROMOTING and moved
    return c.set_canary(weight_percent=reached, stage_time=c.now) if promoting else c


def _share_traffic(c: Context) -> Context:
    """Begin the traffic steps after the probes have passed, or promote if there are no steps."""
    if c.plan.held is not None:
        return shifting.noted(c, c.plan.held, reason=Reason.ROUTE_UNUSABLE)
    if c.plan.mode == TrafficMode.PROBE_ONLY or requested.skips_steps(c):
        return _promote(c.set_canary(traffic_mode=TrafficMode.PROBE_ONLY))
    serving = c.before.condition(ConditionType.SERVING)
    long_ago = c.now - timedelta(seconds=DOWN_SECONDS)
    if serving is not None and serving.status == "False" and serving.last_transition_time <= long_ago:
        # No stable pod answers, so there is nothing to compare with, and the canary may repair the service.
        down = "no stable replica answers: the canary's probes decide"
        c = c.set_canary(traffic_mode=TrafficMode.PROBE_ONLY).event("NothingToCompare", down, warning=True)
        return _promote(c)
    return shifting.begin_steps(c) if c.stable is not None and c.snapshot.ready_pods(c.stable.revision) else c


def _promote(c: Context) -> Context:
    asked = f" at once (annotation {c.snapshot.canary_annotation})" if requested.skips_steps(c) else ""
    text = f"scaling to {c.replicas} and switching traffic{asked}: {in_flight(c).message}"
    c = c.set_canary(stage=Stage.PROMOTING, step_time=None, verdict=Verdict.PASSED)
    return c.record_trial(Action.PROMOTE, "Promoting", text)


def _replace_one(c: Context, no_node: str) -> Context:
    if not one_can_leave(c.spec, c.replicas):
        text = (
            f"no node has room for the canary ({no_node}), and it may replace none of {c.replicas} replicas: "
            f"spec.disruption.maxUnavailable is {c.spec.disruption.max_unavailable} (only 100% permits replacing the "
            "last one); the canary waits for spare capacity"
        )
        return _advance_stage(shifting.noted(c, text))
    room = f"no node had room for the canary in {SURGE_SECONDS} s ({no_node})"
    text = f"{room}: it replaces one of {c.replicas} replicas"
    return c.set_canary(replaces_one=True, stage_time=c.now).record_trial(Action.REPLACE_ONE, "NoSpareCapacity", text)


def _give_up(c: Context) -> Context:
    canary, seconds = in_flight(c), c.spec.canary.progress_deadline_seconds
    if canary.stage == Stage.SHIFTING and canary.verdict == Verdict.INCONCLUSIVE:
        text = f"no verdict within {seconds} s after the judgement was due: {canary.message}"
        return roll_back(c, Verdict.INCONCLUSIVE, canary.reason, text)
    text = f"still {canary.stage} after {seconds} s{why_waiting(c)}"
    if canary.stage == Stage.SHIFTING or canary.reason == Reason.ROUTE_UNUSABLE:
        text = f"{text}: {canary.message}"
    return roll_back(c, Verdict.ERROR, Reason.PROGRESS_DEADLINE_EXCEEDED, text)
