"""What does the user read? The conditions of a service, each with its reason and numbers; `Ready` sums them up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvpilot_operator.api.words import ConditionType, Reason, Stage
from kvpilot_operator.decide.changes import move, spec_changes
from kvpilot_operator.decide.conditions import kstatus, measured
from kvpilot_operator.decide.conditions.answering import available, serving, share
from kvpilot_operator.decide.conditions.measured import Line, waiting
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.decide.objects import storage
from kvpilot_operator.decide.rejections import finding, rejected
from kvpilot_operator.decide.rollout.ending import NOT_OF_THE_DTYPE
from kvpilot_operator.decide.rollout.starting import start_fault
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.questions import Question, keeps_probe
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Condition, clip

D = TypeVar("D", bound=Draft)


def tell(c: Context) -> Context:
    """All conditions of a service whose spec is accepted; an event where objects are refused anew."""
    objects = _objects_accepted(c.snapshot)
    route = _route_accepted(c)
    answers, calibration, progressing = serving(c, objects), measured.calibration(c), _progressing(c, objects)
    verified = measured.accuracy(c)
    standing = kstatus.standing(c, progressing=progressing, serving=answers, objects=objects, route=route)
    lines: dict[str, Line] = {
        ConditionType.READY: _ready(c, standing, answers, calibration, verified),
        ConditionType.SERVING: answers,
        ConditionType.AVAILABLE: available(c, answers),
        ConditionType.PROGRESSING: _as_of_a_deployment(progressing, standing),
        **standing,
        ConditionType.MODEL_CACHED: measured.model_cached(c),
        ConditionType.METRICS_AVAILABLE: measured.metrics(c),
        ConditionType.MEMORY_PRESSURED: measured.memory_pressured(c),
        ConditionType.CANARY_HEALTHY: measured.canary_healthy(c),
        ConditionType.ACCURACY_VERIFIED: verified,
        ConditionType.CALIBRATION_CONSISTENT: calibration,
        ConditionType.SPEC_ACCEPTED: _spec_accepted(c, objects),
        ConditionType.OBJECTS_ACCEPTED: objects,
    }
    held = measured.objectives(c)
    if held is not None:
        lines[ConditionType.OBJECTIVES_HELD] = held
    if route is not None:
        lines[ConditionType.ROUTE_ACCEPTED] = route
    c = c.set(conditions=_stamped(c.snapshot, lines))
    for kind in (ConditionType.OBJECTS_ACCEPTED, ConditionType.CALIBRATION_CONSISTENT, ConditionType.ROUTE_ACCEPTED):
        c = _announce(c, kind, lines[kind].reason) if kind in lines else c
    told = verified.reason in NOT_OF_THE_DTYPE
    return _announce(c, ConditionType.ACCURACY_VERIFIED, verified.reason) if told else c


def refuse(draft: Draft) -> Draft:
    """The conditions of a service whose spec breaks the rules: what runs is left as it is."""
    s = draft.snapshot
    message = clip("; ".join(f"{fault.field}: {fault.message}" for fault in s.faults))
    before = {one.type: Line(one.status, one.reason, one.message) for one in s.status.conditions}
    serves, kept = any(pod.ready for pod in s.pods), "the last accepted spec keeps serving"
    refused = Line("False", Reason.SPEC_INVALID, message)
    first: dict[str, Line] = {
        ConditionType.READY: refused._replace(message=f"{message} ({kept})") if serves else refused,
        ConditionType.SERVING: Line("True", Reason.SERVING, kept) if serves else refused,
    }
    lines = first | before | first | {ConditionType.PROGRESSING: refused}
    lines[ConditionType.SPEC_ACCEPTED] = refused._replace(reason=Reason.INVALID)
    lines |= kstatus.lines(ConditionType.STALLED, Cause(Reason.SPEC_INVALID, message))
    return _announce(draft.set(conditions=_stamped(s, lines)), ConditionType.SPEC_ACCEPTED, Reason.SPEC_INVALID)


def report(draft: D) -> D:
    """Say which questions had no answer; what a running probe has found so far stays said."""
    kind = ConditionType.RECONCILE_SUCCEEDED
    found = {one.type: one for one in draft.status.conditions if one.type != kind}
    if keeps_probe(draft.unanswered):
        accuracy = draft.before.condition(ConditionType.ACCURACY_VERIFIED)
        found |= {accuracy.type: accuracy} if accuracy is not None else {}
    lines: dict[str, Line] = {
        kind: Line("True", Reason.ALL_ANSWERED, "every question of the last reconcile was answered")
    }
    if draft.unanswered:
        named = ", ".join(dict.fromkeys(map(str, draft.unanswered)))
        text = (
            f"not answered: {named}. What these decide stays as it is, and everything else goes on. The operator's log "
            "has more about it; where the API server gave no error of its own, please report it"
        )
        why = Cause(f"{draft.unanswered[0].question}Unanswered", text)
        lines = {kind: Line("False", *why)}
        # It is not known whether the spec is reached; that it is refused is known without any of these answers.
        if draft.snapshot.spec is not None or any(one.question == Question.CONDITIONS for one in draft.unanswered):
            lines |= {ConditionType.READY: Line("False", *why), **kstatus.lines(ConditionType.RECONCILING, why)}
    said = {one.type: one for one in _stamped(draft.snapshot, lines)}
    return draft.set(conditions=tuple((found | said).values()))


def _announce(draft: D, kind: str, reason: str) -> D:
    """Post an event where a condition has become False, or says something else."""
    before, after = draft.before.condition(kind), draft.status.condition(kind)
    if after is None or after.status != "False" or (before is not None and before.message == after.message):
        return draft
    return draft.event(reason, after.message, warning=True)


def _stamped(s: Snapshot, lines: Mapping[str, Line]) -> tuple[Condition, ...]:
    """Conditions with `lastTransitionTime` moved only where the status word changed."""
    result = []
    for kind, one in lines.items():
        before = s.status.condition(kind)
        kept = before is not None and before.status == one.status
        result.append(
            Condition(
                type=kind,
                status=one.status,
                reason=one.reason,
                message=clip(one.message),
                last_transition_time=before.last_transition_time if before is not None and kept else s.now,
                observed_generation=s.generation,
            )
        )
    return tuple(result)


def _objects_accepted(s: Snapshot) -> Line:
    """What of the service's objects and pods the API server will not have, with the spec's field and the remedy."""
    refused = rejected(s)
    if refused:
        return Line("False", *finding(refused))
    before = s.status.condition(ConditionType.OBJECTS_ACCEPTED)
    if s.rejections is None and before is not None:
        # Nothing was written yet in this life of the operator: what was refused before most likely still is.
        return Line(before.status, before.reason, before.message)
    if s.rejections is None:
        return Line("Unknown", Reason.NOT_WRITTEN_YET, "no object has been written yet")
    return Line("True", Reason.WRITTEN, "the API server has taken every object")


def _route_accepted(c: Context) -> Line | None:
    """What Gateways say of the route of ours; None where none is asked for."""
    s, name, before = c.snapshot, c.snapshot.key.name, c.before.condition(ConditionType.ROUTE_ACCEPTED)
    if c.spec.route is None:
        return None
    if s.unread(Question.ROUTE) is not None and before is not None:
        return Line(before.status, before.reason, before.message)
    if s.route is None:
        return Line(
            "Unknown", Reason.NO_ROUTE, f"HTTPRoute {name} is not there yet: see ObjectsAccepted where it stays so"
        )
    refused = [f"{one.name} says {one.message}" for one in s.route.parents if one.accepted is False]
    if refused:
        return Line("False", Reason.ROUTE_NOT_ACCEPTED, f"HTTPRoute {name}: {'; '.join(refused)}")
    silent = [one.name for one in s.route.parents if one.accepted is None]
    if silent or not s.route.parents:
        who = ", ".join(silent) or "no Gateway"
        text = f"HTTPRoute {name}: nothing is said of it yet by {who}. Where it stays so, there is no such Gateway"
        return Line("Unknown", Reason.ROUTE_WAITING, f"{text}, or nobody serves its class")
    return Line("True", Reason.ROUTE_ACCEPTED, f"taken by {', '.join(one.name for one in s.route.parents)}")


def _ready(c: Context, standing: Mapping[str, Line], answers: Line, calibration: Line, verified: Line) -> Line:
    """Whether the service does what its newest spec asks for: nothing is under way, and nothing holds it up."""
    for one in (ConditionType.STALLED, ConditionType.RECONCILING):
        if standing[one].status == "True":
            return standing[one]._replace(status="False")
    but = "; its engines do not all quantize alike, see CalibrationConsistent" if calibration.status == "False" else ""
    if verified.reason == Reason.DTYPE_MISMATCH:
        but = f"{but}; its engines report another dtype, see AccuracyVerified"
    return Line("True", answers.reason, answers.message + but)


def _progressing(c: Context, objects: Line) -> Line:
    canary, stable, target, paused = c.canary, c.stable, c.target, c.spec.rollout.paused
    if canary is not None:
        stopped = paused and canary.stage != Stage.ROLLING_BACK
        news = spec_changes(c, stable) if stable is not None else ""
        said = canary.message if news in canary.message else f"{canary.message}; the spec has changed: {news}"
        text = f"{move(canary)}{share(canary)}: {said}{waiting(c)}"
        return Line("False", Reason.ROLLOUT_PAUSED, text) if stopped else Line("True", f"Canary{canary.stage}", text)
    waits = storage.wait(c)
    if waits is not None and (stable is None or target.revision != stable.revision):
        return Line("False" if waits.stuck else "True", *waits.cause)
    if stable is not None and stable.ever_ready and target.revision != stable.revision:
        fault = start_fault(c, target)
        if fault is not None:
            return Line("False", *fault)
        if paused:
            text = f"spec.rollout.paused is true: no canary for {target.dtype} is started ({target.message})"
            return Line("False", Reason.ROLLOUT_PAUSED, text)
    if target.held is not None:
        return Line("False", target.reason, target.held)
    if objects.status == "False":
        return objects
    if stable is not None and not stable.ever_ready:
        return Line("True", Reason.ENGINES_STARTING, f"revision {stable.revision} ({stable.dtype}) is starting")
    return Line("False", Reason.SETTLED, target.message)


def _as_of_a_deployment(progressing: Line, standing: Mapping[str, Line]) -> Line:
    """`Progressing` as it is on a Deployment: also True when all is done, Unknown while paused, False when stuck."""
    stalled, reconciling = standing[ConditionType.STALLED], standing[ConditionType.RECONCILING]
    told = progressing.reason != Reason.SETTLED
    if stalled.status != "True":
        return progressing._replace(status="True") if told or reconciling.status != "True" else reconciling
    if stalled.reason == Reason.ROLLOUT_PAUSED:
        return stalled._replace(status="Unknown")
    return progressing if told and progressing.status == "False" else stalled._replace(status="False")


def _spec_accepted(c: Context, objects: Line) -> Line:
    note = _window_note(c)
    if objects.status == "False":
        note = "the spec is valid, and not all that it asks for could be written: see ObjectsAccepted"
    if note is not None:
        return Line("True", Reason.PARTLY_ACTED_ON, note)
    return Line("True", Reason.ACCEPTED, "every field that is set is acted on")


def _window_note(c: Context) -> str | None:
    """What is to be known where the engines that the spec asks for serve another recent window than it asks for."""
    sample = c.snapshot.last_sample(c.stable.revision) if c.stable is not None else None
    if c.stable is None or sample is None or c.stable.revision != c.target.revision:
        return None
    asked = c.spec.kv_cache.recent_tokens_of(c.stable.dtype)
    if asked is None or sample.recent_tokens in (None, asked):
        return None
    return (
        f"spec.kvCache.recentTokens is {asked}, and the engines read the last {sample.recent_tokens} tokens at 8 bits; "
        "kvpilot_recent_window_info of an engine says why: use an image with a vLLM that can, or set what it serves"
    )
