"""The whole decision of one pass, question by question."""

from __future__ import annotations

from kvpilot_operator.api.not_yet import unacted_fields
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide import probing, rollout
from kvpilot_operator.decide.conditions import conditions, refused
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.placement import place, traffic_revision
from kvpilot_operator.decide.scaling import desired_replicas
from kvpilot_operator.decide.target import Target, choose
from kvpilot_operator.decide.workload import Workload, classify
from kvpilot_operator.render.names import REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.state.decision import Decision
from kvpilot_operator.state.snapshot import Snapshot

# A usage that moved by less than this many points is not worth a write to the API server.
USAGE_STEP_PERCENT = 5
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
    replicas = desired_replicas(spec)
    stable = s.status.stable
    serving = s.traffic or (stable.revision if stable is not None else "")
    workload = classify(s.samples.get(serving, ()), spec.kv_cache.pressure, s.now, was_bound=_was_pressured(s))
    target = choose(s, spec, workload)
    rollout.advance(draft, s, spec, target, replicas)
    request, captured = probing.probe(draft, s, spec)
    _summarise(draft, s, target, workload, replicas)
    _announce_pressure(draft, s, workload)
    draft.set(conditions=conditions(draft, s, target, workload, replicas, unacted_fields(s.raw)))
    _announce_hold(draft, s)
    return Decision(
        status=draft.status,
        objects=place(draft, s, spec, target, replicas),
        baseline=captured,
        probe=request,
        events=tuple(draft.events),
        again_seconds=_AGAIN_SECONDS if draft.status.canary is not None else None,
    )


def _summarise(draft: Draft, s: Snapshot, target: Target, workload: Workload, replicas: int) -> None:
    stable = draft.status.stable
    if stable is None:
        return
    serving = traffic_revision(draft.status, s, replicas)
    sample = s.last_sample(serving)
    before = draft.status.kv_cache.usage_percent
    usage = workload.usage_percent if workload.kind != "NoMetrics" else None
    if usage is not None and before is not None and abs(usage - before) < USAGE_STEP_PERCENT:
        usage = before
    view = s.deployments.get(serving)
    draft.set(
        replicas=view.replicas if view is not None else 0,
        ready_replicas=len(s.ready_pods(serving)),
        selector=f"{SERVICE_LABEL}={s.key.name},{REVISION_LABEL}={serving}",
    )
    draft.set_kv(
        active_dtype=stable.dtype,
        observed_dtype=sample.observed_dtype if sample is not None else draft.status.kv_cache.observed_dtype,
        recommended_dtype=target.recommended or target.dtype,
        capacity_tokens=sample.capacity_tokens if sample is not None else draft.status.kv_cache.capacity_tokens,
        usage_percent=usage,
    )


def _announce_pressure(draft: Draft, s: Snapshot, workload: Workload) -> None:
    if workload.kind == "MemoryBound" and not _was_pressured(s):
        draft.event("MemoryPressured", workload.message, warning=True)
    elif workload.kind == "Relaxed" and _was_pressured(s):
        draft.event("MemoryRelaxed", workload.message)


def _was_pressured(s: Snapshot) -> bool:
    before = s.status.condition("MemoryPressured")
    return before is not None and before.status == "True"


def _announce_hold(draft: Draft, s: Snapshot) -> None:
    """Say once why nothing moves although the spec asks for it."""
    before, after = s.status.condition("Progressing"), draft.status.condition("Progressing")
    if after is None or after.reason not in ("DtypeDenied", "RevisionFailed"):
        return
    if before is None or before.reason != after.reason:
        draft.record("Hold", after.reason, after.message, warning=True)
