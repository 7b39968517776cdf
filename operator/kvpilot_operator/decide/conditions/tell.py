"""Write all conditions of a service into the status, and post events that announce new causes."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from kvpilot_operator.api.words import ConditionType, Reason
from kvpilot_operator.decide.conditions import measured, standing
from kvpilot_operator.decide.conditions.measured import Line
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.decide.rollout.ending import NOT_OF_THE_DTYPE
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.questions import keeps_probe
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Condition, clip

D = TypeVar("D", bound=Draft)


def tell(c: Context) -> Context:
    """Write all conditions of a service with a valid spec. Post an event if a condition has a new cause."""
    problems, answers, found = standing.problems(c), standing.serving(c), measured.lines(c)
    both, verified = standing.lines(c, problems, answers), found[ConditionType.ACCURACY_VERIFIED]
    if keeps_probe(c.unanswered):
        verified = _lines(c).get(ConditionType.ACCURACY_VERIFIED, verified)
    lines: dict[ConditionType, Line] = {
        ConditionType.READY: _ready(c, both, answers, verified, problems.progress),
        ConditionType.SERVING: answers,
        **both,
        **found,
        ConditionType.ACCURACY_VERIFIED: verified,
    }
    c = _written(c, lines)
    # Announce only refused objects: the journal entries of all other problems already post events.
    if problems.objects is not None:
        c = _announce(c, problems.objects, standing.BOTH)
    if verified.reason in (*NOT_OF_THE_DTYPE, Reason.MIXED_FACTORS) and verified.status == "False":
        c = _announce(c, verified.cause, (ConditionType.ACCURACY_VERIFIED,))
    return c


def refuse(draft: Draft) -> Draft:
    """Write the conditions of a service with an invalid spec, whose objects stay unchanged."""
    s = draft.snapshot
    message = clip("; ".join(f"{fault.field}: {fault.message}" for fault in s.faults))
    serves, kept = any(pod.ready for pod in s.pods), "the last accepted spec keeps serving"
    refused = Line("False", Reason.SPEC_INVALID, message)
    lines: dict[ConditionType, Line] = {
        ConditionType.READY: refused._replace(message=f"{message} ({kept})") if serves else refused,
        ConditionType.SERVING: Line("True", Reason.SERVING, kept) if serves else refused,
        **standing.both(ConditionType.STALLED, Cause(Reason.SPEC_INVALID, message)),
    }
    written = _written(draft, {**_lines(draft), **lines})
    return _announce(written, Cause(Reason.SPEC_INVALID, message), (ConditionType.STALLED,))


def leave(draft: D) -> D:
    """Keep the present conditions, because `tell` or `refuse` raised an error.

    Report the failure in Ready, Reconciling and Stalled.
    """
    none = standing.both()
    return _written(draft, {ConditionType.READY: none[ConditionType.RECONCILING], **none, **_lines(draft)})


def _written(draft: D, lines: Mapping[ConditionType, Line]) -> D:
    """Set the conditions. Report failed reads and rules (`unanswered`) in Ready, and in Reconciling or Stalled."""
    if draft.unanswered:
        named = ", ".join(dict.fromkeys(map(str, draft.unanswered)))
        text = (
            f"these parts of the reconcile failed: {named}. What they decide stays unchanged; other work continues. "
            "The operator's log has details. If the API server did not cause the error, please report it"
        )
        of_spec = lines[ConditionType.STALLED] if draft.snapshot.spec is None else None
        if of_spec is not None and of_spec.status == "True":
            more = Cause(of_spec.reason, f"{of_spec.message}; {text}")
            both = standing.both(ConditionType.STALLED, more)
        else:
            true = (one for kind in standing.BOTH if (one := lines[kind]).status == "True")
            more = Cause(Reason.RECONCILE_INCOMPLETE, "; ".join([text, *(one.message for one in true)]))
            both = standing.both(ConditionType.RECONCILING, more)
        lines = {**lines, **both, ConditionType.READY: Line("False", *more)}
    return draft.set(conditions=tuple(_stamped(draft.snapshot, lines)))


def _lines(draft: Draft) -> dict[ConditionType, Line]:
    return {one.type: Line(one.status, one.reason, one.message) for one in draft.before.conditions}


def _announce(draft: D, cause: Cause, kinds: tuple[ConditionType, ...]) -> D:
    """Post an event, unless one of these conditions already named the same cause in the last reconcile."""
    before = [one.message for kind in kinds if (one := draft.before.condition(kind)) is not None]
    # In a long list of causes the message may be truncated, so compare only its beginning.
    if any(cause.message in one or ("…" in one and cause.message[:100] in one) for one in before):
        return draft
    return draft.event(cause.reason, cause.message, warning=True)


def _stamped(s: Snapshot, lines: Mapping[ConditionType, Line]) -> Iterator[Condition]:
    """Make conditions from lines. `lastTransitionTime` changes only if the condition's status changes."""
    for kind in ConditionType:
        if kind not in lines:
            continue
        one, before = lines[kind], s.status.condition(kind)
        kept = before is not None and before.status == one.status
        yield Condition(
            type=kind,
            status=one.status,
            reason=one.reason,
            message=clip(one.message),
            last_transition_time=before.last_transition_time if before is not None and kept else s.now,
            observed_generation=s.generation,
        )


def _ready(c: Context, both: Mapping[ConditionType, Line], answers: Line, verified: Line, progress: Line) -> Line:
    """Return the condition Ready: True if the service matches its newest spec, and no change is pending."""
    replicas = standing.about_replicas(c)
    for kind in (ConditionType.STALLED, ConditionType.RECONCILING):
        if both[kind].status == "True":
            return both[kind]._replace(status="False", message="; ".join([both[kind].message, *replicas]))
    notes = [answers.message, *standing.notes(c, progress), *replicas]
    if verified.reason == Reason.MIXED_FACTORS:
        notes.append("its engines use different calibration factors, see AccuracyVerified")
    if verified.reason == Reason.DTYPE_MISMATCH:
        notes.append("its engines report another dtype, see AccuracyVerified")
    return Line("True", answers.reason, "; ".join(notes))
