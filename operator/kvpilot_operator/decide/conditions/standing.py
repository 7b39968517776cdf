"""Decide the conditions that tools wait for.

- `Serving`: True while engines answer.
- `Reconciling` and `Stalled`: as kstatus (sigs.k8s.io/cli-utils) defines them.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from kvpilot_operator.api.words import ConditionType, Reason, Stage, TrafficMode
from kvpilot_operator.decide.changes import move
from kvpilot_operator.decide.conditions.measured import Line, said
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.diagnosis import engine_failure
from kvpilot_operator.decide.objects import storage, traffic
from kvpilot_operator.decide.rejections import finding, of_workload, rejected
from kvpilot_operator.decide.rollout.starting import held_up_by, start_fault, turn
from kvpilot_operator.decide.steps.ladder import ACCURACY_REASONS
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.status import MAX_MESSAGE, Canary, clip

BOTH = (ConditionType.RECONCILING, ConditionType.STALLED)
_WAYS = {TrafficMode.HTTP_ROUTE: " by HTTPRoute", TrafficMode.REPLICA_RATIO: " by replica ratio"}
_SETTLED = Cause(Reason.SETTLED, "the spec is in effect, and no change is under way")


def serving(c: Context) -> Line:
    """Report whether pods are ready and kvpilot's Service selects them."""
    s, replicas, canary = c.snapshot, c.replicas, c.canary
    if c.stable is None:
        return Line("False", Reason.ENGINES_STARTING, "nothing serves yet")
    revisions = traffic.serving_revisions(c)
    ready = sum(len(s.ready_pods(revision)) for revision in revisions)
    refused = s.rejection("Service", s.key.name)
    if ready and s.traffic is None and refused is not None:
        return Line("False", *finding([refused]))
    if ready and s.traffic is None:
        text = f"{ready} replicas answer, but kvpilot's Service {s.key.name} does not select them yet"
        return Line("False", Reason.TRAFFIC_MOVING, text)
    if ready:
        trial = f"; {canary.dtype} is on trial{share(canary)}" if canary is not None else ""
        there = s.deployments.get(c.stable.revision)
        # Name the image if the installation's defaults may have chosen it, because the spec does not show it then.
        image = f" with {there.image}" if s.engine_defaults and there is not None and there.image else ""
        return Line("True", Reason.SERVING, f"{c.stable.dtype} serves{image}{trial}")
    if replicas == 0:
        return Line("False", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    pods = [pod for revision in revisions for pod in s.pods_of(revision)]
    found = rejected(s)
    blocking = [one for one in found if (one.kind, one.name) == ("Service", s.key.name)]
    blocking += [one for revision in revisions for one in of_workload(s, revision, found)]
    why = engine_failure(pods) or storage.held_up(c, pods) or (finding(blocking) if blocking else None)
    if why is not None:
        return Line("False", *why)
    return Line("False", Reason.ENGINES_STARTING, f"0 of {replicas} replicas answer yet")


def share(canary: Canary) -> str:
    """Describe the canary's share of the traffic, and how requests are divided. Return "" if it has no share."""
    if canary.stage not in (Stage.SHIFTING, Stage.PROMOTING) or canary.weight_percent is None:
        return ""
    way = _WAYS.get(canary.traffic_mode, "") if canary.traffic_mode is not None else ""
    return f", at {canary.weight_percent}% of the traffic{way}"


class Problems(NamedTuple):
    """The causes that keep a service from reaching its newest spec."""

    objects: Cause | None
    """Objects and pods that the API server refuses."""
    probes: Cause | None
    """Probe sets that cannot be used."""
    progress: Line
    """State of the rollout: True while it progresses by itself, False if it is on hold or complete."""


def problems(c: Context) -> Problems:
    """Find everything that may keep the service from its newest spec."""
    refused, fault = rejected(c.snapshot), c.snapshot.probes.fault
    return Problems(
        objects=finding(refused) if refused else None,
        probes=Cause(Reason.PROBE_SET_INVALID, fault) if fault is not None else None,
        progress=_progress(c),
    )


def lines(c: Context, found: Problems, serving: Line) -> dict[ConditionType, Line]:
    """Decide `Reconciling` and `Stalled`. The reason is that of the first cause, and the message lists all causes."""
    stalled = [one for one in _stalled(c, found) if one is not None]
    if stalled:
        return both(ConditionType.STALLED, _joined(stalled))
    before, s = c.before.condition(ConditionType.STALLED), c.snapshot
    unwritten = s.rejections is None and c.canary is None
    if unwritten and before is not None and (before.status, before.observed_generation) == ("True", s.generation):
        # Nothing was written since startup, so earlier rejections probably still apply: keep the condition.
        return both(ConditionType.STALLED, Cause(before.reason, before.message))
    under_way = _under_way(c, found, serving)
    if under_way is None:
        return both()
    causes = (under_way, found.objects, found.probes)
    return both(ConditionType.RECONCILING, _joined([one for one in causes if one is not None]))


def both(kind: ConditionType | None = None, cause: Cause = _SETTLED) -> dict[ConditionType, Line]:
    """Return `Reconciling` and `Stalled`. Only `kind` is True, with this cause; without `kind`, both are False."""
    other = Cause(kind, f"see {kind}") if kind else cause
    return {one: Line("True", *cause) if one == kind else Line("False", *other) for one in BOTH}


def notes(c: Context, progress: Line) -> list[str]:
    """List notes on a ready service: a change that is held back, or a field that engines do not fully obey."""
    found = [] if progress.reason == Reason.SETTLED else [progress.message]
    sample = c.snapshot.last_sample(c.stable.revision) if c.stable is not None else None
    if c.stable is None or sample is None or c.stable.revision != c.target.revision:
        return found
    asked = c.spec.kv_cache.recent_tokens_of(c.stable.dtype)
    if asked is None or sample.recent_tokens in (None, asked):
        return found
    note = (
        f"spec.kvCache.recentTokens is {asked}, but the engines read the last {sample.recent_tokens} tokens at 8 bits; "
        "an engine's metric kvpilot_recent_window_info says why: use an image that supports it, or set the served value"
    )
    return [note, *found]


def about_replicas(c: Context) -> list[str]:
    """Describe an autoscaler that competes with kvpilot, and a spec.replicas outside the bounds of spec.scaling."""
    scaling, asked, other = c.spec.scaling, c.spec.replicas, c.snapshot.autoscaler
    found = []
    if other is not None:
        found.append(
            f"{other} scales this service, and so does kvpilot: set spec.scaling.mode to External, or delete the "
            f"{other.partition(' ')[0]}"
        )
    # Do not report 1, because it is the default and the user may not have set it.
    if asked not in (1, kept := scaling.clamp(asked)):
        found.append(
            f"spec.replicas is {asked}, but kvpilot runs {kept}, because spec.scaling has minReplicas "
            f"{scaling.min_replicas} and maxReplicas {scaling.max_replicas}: change these, or scale within them"
        )
    return found


def _joined(causes: Sequence[Cause]) -> Cause:
    """Join the messages of the causes (at least one) under the first reason. If the result is too long, truncate all
    messages to the same length."""
    texts: list[str] = []
    for one in causes:
        if not any(one.message in text for text in texts):
            texts.append(one.message)
    most = (MAX_MESSAGE - 2 * len(texts)) // len(texts)
    short = sum(map(len, texts)) + 2 * len(texts) <= MAX_MESSAGE
    return Cause(causes[0].reason, "; ".join(text if short else clip(text, most) for text in texts))


def _stalled(c: Context, found: Problems) -> list[Cause | None]:
    """List the problems that a person must solve.

    During a trial, list none, because the trial's deadline ends it without help. A paused trial has no deadline, so
    list its problems.
    """
    progress = found.progress
    held = progress.cause if progress.status == "False" and progress.reason != Reason.SETTLED else None
    if c.canary is not None:
        return [] if held is None else [held, found.objects, found.probes]
    failure = engine_failure(c.snapshot.pods_of(c.stable.revision)) if c.stable is not None else None
    return [found.objects, found.probes, None if _reached(c) else held, failure]


def _under_way(c: Context, found: Problems, serving: Line) -> Cause | None:
    s, stable, replicas = c.snapshot, c.stable, c.replicas
    if c.canary is not None:
        return found.progress.cause
    if stable is None:
        return serving.cause
    if not _reached(c):
        if found.progress.status == "True":
            return found.progress.cause
        return Cause(Reason.SPEC_CHANGED, f"the newest spec is not served yet: {c.target.message or c.target.held}")
    if replicas and serving.status != "True":
        return serving.cause
    ready = len(s.ready_pods(stable.revision))
    if ready != replicas:
        why = storage.held_up(c, s.pods_of(stable.revision))
        return Cause(Reason.SCALING, f"{ready} of {replicas} replicas answer{f': {why.message}' if why else ''}")
    if s.traffic != stable.revision:
        return Cause(Reason.TRAFFIC_MOVING, f"the Service does not select revision {stable.revision} alone yet")
    leaving = traffic.orphans(c)
    text = f"{len(leaving)} workloads or pods of other revisions still exist: {leaving[0]}" if leaving else ""
    return Cause(Reason.TRAFFIC_MOVING, text) if leaving else None


def _reached(c: Context) -> bool:
    """Return True if the spec asks for the serving revision, and its dtype is not denied for its accuracy."""
    if c.stable is None or c.asked != c.stable.revision:
        return False
    standing = c.denial(c.stable.dtype)
    return standing is None or standing.reason not in ACCURACY_REASONS


def _progress(c: Context) -> Line:
    """Report True while the rollout progresses, and False if it is on hold or complete (reason Settled)."""
    canary, stable, target, paused = c.canary, c.stable, c.target, c.spec.rollout.paused
    if canary is not None:
        stopped = paused and canary.stage != Stage.ROLLING_BACK
        text = f"{move(canary)}{share(canary)}: {said(c, canary)}"
        held_up = held_up_by(c) if canary.stage != Stage.ROLLING_BACK else None
        reason = held_up.reason if held_up is not None else f"Canary{canary.stage}"
        return Line("False", Reason.ROLLOUT_PAUSED, text) if stopped else Line("True", reason, text)
    if stable is not None and stable.ever_ready and target.revision != stable.revision:
        fault = start_fault(c, target)
        if fault is not None:
            if fault.reason != Reason.BUSY:
                return Line("False", *fault)
            # Most services are idle at some time, so nobody has to act before the deadline.
            never = f"{fault.message}; it was never idle for so long: provide room for one more pod, and choose Surge"
            return Line("False", Reason.BUSY, never) if _overdue(c) else Line("True", *fault)
        if not paused and (wait := turn(c)) is not None:
            return Line("True", *wait)
        if paused:
            text = f"spec.rollout.paused is true: no canary for {target.dtype} is started ({target.message})"
            return Line("False", Reason.ROLLOUT_PAUSED, text)
    if target.held is not None:
        return Line("False", target.reason, target.held)
    if stable is not None and not stable.ever_ready:
        return Line("True", Reason.ENGINES_STARTING, f"revision {stable.revision} ({stable.dtype}) is starting")
    return Line("False", Reason.SETTLED, target.message)


def _overdue(c: Context) -> bool:
    """Return True if a canary has waited for an idle service for longer than progressDeadlineSeconds."""
    stalled, before = c.before.condition(ConditionType.STALLED), c.before.condition(ConditionType.RECONCILING)
    if stalled is not None and stalled.status == "True":
        return stalled.reason == Reason.BUSY
    deadline = timedelta(seconds=c.spec.canary.progress_deadline_seconds)
    return before is not None and before.status == "True" and c.now >= before.last_transition_time + deadline
