"""The whole decision of one pass, question by question."""

from __future__ import annotations

import msgspec

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide import journal
from kvpilot_operator.decide.accuracy import probing
from kvpilot_operator.decide.briefing import situation_of, step_tokens
from kvpilot_operator.decide.conditions import conditions, refused
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging import scaling
from kvpilot_operator.decide.judging.arbiter import arbitrate
from kvpilot_operator.decide.judging.workload import USAGE_STEP_PERCENT, Workload, classify
from kvpilot_operator.decide.target import Target, choose
from kvpilot_operator.decide.trial import rollout, traffic
from kvpilot_operator.decide.trial.placement import place, traffic_revision
from kvpilot_operator.decide.trial.shelter import sheltered
from kvpilot_operator.render.names import REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.snapshot import Snapshot

_AGAIN_SECONDS = 10.0


def decide(s: Snapshot) -> Decision:
    """Snapshot in, Decision out; total: every snapshot has a decision."""
    draft = Draft(s.now, s.status)
    draft.set(observed_generation=s.generation)
    if s.spec is None:
        return _refuse(draft, s)
    return _decide(draft, s, s.spec)


def _refuse(draft: Draft, s: Snapshot) -> Decision:
    before = s.status.condition("SpecAccepted")
    draft.set(conditions=refused(s, s.faults))
    after = draft.status.condition("SpecAccepted")
    if after is not None and (before is None or before.message != after.message):
        draft.event("SpecInvalid", after.message, warning=True)
    return Decision(draft.status, events=tuple(draft.events))


def _decide(draft: Draft, s: Snapshot, spec: Spec) -> Decision:
    stable = s.status.stable
    serving = s.traffic or (stable.revision if stable is not None else "")
    workload = classify(
        s.samples.get(serving, ()),
        spec.kv_cache.pressure,
        s.now,
        was_bound=_was_pressured(s),
        calm_seconds=spec.scaling.scale_down_stabilization_seconds,
        step_tokens=step_tokens(spec, s.node),
    )
    before = scaling.kept(spec, s.status.scaling, s.now)
    situation = situation_of(s, spec, workload, before, scaling.replicas(spec, before))
    ruling = arbitrate(situation)
    after = scaling.ruled(spec, before, ruling, situation.dtype, s.now)
    replicas = scaling.replicas(spec, after)
    draft.set(scaling=after)
    target = choose(s, spec, ruling)
    rollout.advance(draft, s, spec, target, replicas)
    if s.status.canary is None and draft.status.canary is not None:
        draft.set(scaling=msgspec.structs.replace(after, saturations=ruling.saturations))
    request, captured = probing.probe(draft, s, spec)
    _summarise(draft, s, target, workload, replicas)
    _announce_pressure(draft, s, workload)
    draft.set(conditions=conditions(draft, s, target, workload, replicas))
    _announce_refusal(draft, s)
    journal.ruled(draft, s, spec, ruling, target)
    return Decision(
        status=draft.status,
        objects=place(draft, s, spec, target, replicas),
        baseline=captured,
        probe=request,
        events=tuple(draft.events),
        sheltered=sheltered(draft, s, spec, request),
        again_seconds=_AGAIN_SECONDS if draft.status.canary is not None else None,
    )


def _summarise(draft: Draft, s: Snapshot, target: Target, workload: Workload, replicas: int) -> None:
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


def _announce_refusal(draft: Draft, s: Snapshot) -> None:
    before, after = s.status.condition("ObjectsAccepted"), draft.status.condition("ObjectsAccepted")
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
