"""The whole decision of one pass, question by question."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide import journal
from kvpilot_operator.decide.accuracy import probing
from kvpilot_operator.decide.briefing import serving_dtype, situation_of, step_tokens
from kvpilot_operator.decide.conditions import conditions, refused, stamped
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging import scaling
from kvpilot_operator.decide.judging.arbiter import Ruling, arbitrate, nothing_weighed
from kvpilot_operator.decide.judging.workload import USAGE_STEP_PERCENT, Workload, classify
from kvpilot_operator.decide.questions import CONDITION, Questions, line
from kvpilot_operator.decide.target import Target, choose, unchanged
from kvpilot_operator.decide.trial import rollout, traffic
from kvpilot_operator.decide.trial.placement import place, traffic_revision
from kvpilot_operator.decide.trial.shelter import already_sheltered, sheltered
from kvpilot_operator.render.names import REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot

_AGAIN_SECONDS = 10.0


def decide(s: Snapshot) -> Decision:
    """Snapshot in, Decision out; total: every snapshot has a decision, and each question that fails is named in it."""
    draft = Draft(s.now, s.status)
    draft.set(observed_generation=s.generation)
    ask = Questions(draft, s.unanswered)
    if s.spec is None:
        return _refuse(ask, draft, s)
    return _decide(ask, draft, s, s.spec)


def _refuse(ask: Questions, draft: Draft, s: Snapshot) -> Decision:
    before = s.status.condition("SpecAccepted")
    ask.ask(Question.CONDITIONS, lambda: draft.set(conditions=refused(s, s.faults)), None)
    after = draft.status.condition("SpecAccepted")
    if after is not None and (before is None or before.message != after.message):
        draft.event("SpecInvalid", after.message, warning=True)
    _report(ask, draft, s)
    return Decision(draft.status, events=tuple(draft.events), unanswered=ask.unanswered)


def _decide(ask: Questions, draft: Draft, s: Snapshot, spec: Spec) -> Decision:
    workload = ask.ask(
        Question.WORKLOAD, lambda: _workload(s, spec), Workload("NoMetrics", "the metrics were not judged")
    )
    before = ask.ask(Question.REPLICAS, lambda: scaling.kept(spec, s.status.scaling, s.now), s.status.scaling)
    replicas, dtype = scaling.replicas(spec, before), serving_dtype(s, spec)
    ruling = ask.ask(
        Question.STEP,
        lambda: arbitrate(situation_of(s, spec, workload, before, replicas)),
        nothing_weighed(dtype, replicas, before.saturations),
    )
    after = ask.ask(Question.REPLICAS, lambda: scaling.ruled(spec, before, ruling, dtype, s.now), before)
    replicas = scaling.replicas(spec, after)
    draft.set(scaling=after)
    target = ask.ask(Question.TARGET, lambda: choose(s, spec, ruling), unchanged(s, spec))
    ask.ask(Question.TRIAL, lambda: _trial(draft, s, spec, target, replicas, ruling), None)
    nothing: probing.Asked = (None, None)
    readable = s.unread(Question.PROBE_SETS) is None
    asked = ask.ask(Question.ACCURACY, lambda: probing.probe(draft, s, spec), nothing) if readable else nothing
    request, captured = asked
    ask.ask(Question.SUMMARY, lambda: _summarise(draft, s, target, workload, replicas), None)
    # Without a revision there is nothing to place, and what runs is not to be deleted for want of one.
    objects = place(ask, draft, s, spec, target, replicas) if draft.status.stable is not None else None
    shelter = ask.ask(Question.SHELTER, lambda: sheltered(draft, s, spec, request), already_sheltered(s))
    ask.ask(Question.JOURNAL, lambda: journal.ruled(draft, s, spec, ruling, target), None)
    ask.ask(Question.CONDITIONS, lambda: _tell(draft, s, target, workload, replicas), None)
    _report(ask, draft, s)
    decision = Decision(
        status=draft.status,
        objects=objects,
        baseline=captured,
        probe=request,
        events=tuple(draft.events),
        sheltered=shelter,
        unanswered=ask.unanswered,
        again_seconds=_AGAIN_SECONDS if draft.status.canary is not None else None,
    )
    return replace(decision, sheltered=shelter | already_sheltered(s)) if decision.keeps_probe else decision


def _report(ask: Questions, draft: Draft, s: Snapshot) -> None:
    """Say in the conditions which questions had no answer; what a running probe has found so far stays said."""
    found = {one.type: one for one in draft.status.conditions if one.type != CONDITION}
    if s.unread(Question.PROBE_SETS) is not None or ask.failed(Question.ACCURACY):
        known = s.status.condition("AccuracyVerified")
        found |= {known.type: known} if known is not None else {}
    word, reason, message = line(ask.unanswered)
    draft.set(conditions=(*found.values(), *stamped(s, [(CONDITION, word, reason, message)])))


def _workload(s: Snapshot, spec: Spec) -> Workload:
    stable = s.status.stable
    serving = s.traffic or (stable.revision if stable is not None else "")
    return classify(
        s.samples.get(serving, ()),
        spec.kv_cache.pressure,
        s.now,
        was_bound=_was_pressured(s),
        calm_seconds=spec.scaling.scale_down_stabilization_seconds,
        step_tokens=step_tokens(spec, s.node),
    )


def _trial(draft: Draft, s: Snapshot, spec: Spec, target: Target, replicas: int, ruling: Ruling) -> None:
    rollout.advance(draft, s, spec, target, replicas)
    if s.status.canary is None and draft.status.canary is not None:
        draft.set(scaling=msgspec.structs.replace(draft.status.scaling, saturations=ruling.saturations))


def _summarise(draft: Draft, s: Snapshot, target: Target, workload: Workload, replicas: int) -> None:
    _announce_pressure(draft, s, workload)
    stable = draft.status.stable
    if stable is None:
        return
    names = traffic.serving(s, draft.status)
    told = traffic_revision(draft.status, s, replicas)
    sample = s.last_sample(told)
    before = draft.status.kv_cache.usage_percent
    usage = workload.usage_percent if workload.kind != "NoMetrics" else None
    if usage is not None and before is not None and abs(usage - before) < USAGE_STEP_PERCENT:
        usage = before
    # While two revisions serve together an autoscaler has to count the pods of both.
    one = f",{REVISION_LABEL}={names[0]}" if len(names) == 1 else ""
    draft.set(
        replicas=_counted(draft, s, names, replicas),
        ready_replicas=sum(len(s.ready_pods(name)) for name in names),
        selector=f"{SERVICE_LABEL}={s.key.name}{one}",
    )
    draft.set_kv(
        active_dtype=stable.dtype,
        observed_dtype=sample.observed_dtype if sample is not None else draft.status.kv_cache.observed_dtype,
        recent_tokens=sample.recent_tokens if sample is not None else draft.status.kv_cache.recent_tokens,
        recommended_dtype=target.recommended or target.dtype,
        capacity_tokens=sample.capacity_tokens if sample is not None else draft.status.kv_cache.capacity_tokens,
        usage_percent=usage,
    )


def _counted(draft: Draft, s: Snapshot, serving: tuple[str, ...], replicas: int) -> int:
    """What /scale tells an autoscaler: the replicas that are asked for, serving or on trial.

    The one pod more that a trial brings, and the place that is empty while two pods change over, do not count: they are
    no reason to change the number.
    """
    if draft.status.canary is None and s.status.canary is None:
        return sum(s.deployments[name].replicas for name in serving if name in s.deployments)
    asked = sum(view.replicas for view in s.deployments.values())
    return min(replicas, max(asked, s.status.replicas or 0))


def _tell(draft: Draft, s: Snapshot, target: Target, workload: Workload, replicas: int) -> None:
    draft.set(conditions=conditions(draft, s, target, workload, replicas))
    for kind in ("ObjectsAccepted", "CalibrationConsistent"):
        _announce(draft, s, kind)


def _announce(draft: Draft, s: Snapshot, kind: str) -> None:
    """Post an event where a condition has turned False, or is so for another reason."""
    before, after = s.status.condition(kind), draft.status.condition(kind)
    if after is not None and after.status == "False" and (before is None or before.message != after.message):
        draft.event(after.reason, after.message, warning=True)


def _announce_pressure(draft: Draft, s: Snapshot, workload: Workload) -> None:
    if workload.kind == "MemoryBound" and not _was_pressured(s):
        draft.event("MemoryPressured", workload.message, warning=True)
    elif workload.kind not in ("MemoryBound", "Warming", "NoMetrics") and _was_pressured(s):
        draft.event("MemoryRelaxed", workload.message)


def _was_pressured(s: Snapshot) -> bool:
    before = s.status.condition("MemoryPressured")
    return before is not None and before.status == "True"
