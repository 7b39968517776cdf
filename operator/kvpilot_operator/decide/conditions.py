"""What does the user read? The conditions of a service, each with its reason and numbers; `Ready` sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvpilot_operator.api.not_yet import Unacted
from kvpilot_operator.api.schema import Fault
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.refusal import engine_failure, pending_reason
from kvpilot_operator.decide.target import Target
from kvpilot_operator.decide.workload import Workload
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Condition, clip

_Word = Literal["True", "False", "Unknown"]
_Line = tuple[str, _Word, str, str]


def conditions(
    draft: Draft, s: Snapshot, target: Target, workload: Workload, replicas: int, unacted: Sequence[Unacted]
) -> tuple[Condition, ...]:
    """All conditions of a service whose spec is accepted."""
    available = _available(draft, s, replicas)
    lines = [
        available,
        _progressing(draft, s, target),
        _model_cached(draft, s),
        _metrics(workload),
        _memory_pressured(s, workload),
        _canary_healthy(draft),
        _accuracy(draft, s, target),
        _spec_accepted(unacted, s),
    ]
    return stamped(s, [_ready(available, draft), *lines])


def refused(s: Snapshot, faults: Sequence[Fault]) -> tuple[Condition, ...]:
    """The conditions of a service whose spec breaks the rules: what runs is left as it is."""
    message = clip("; ".join(f"{fault.field}: {fault.message}" for fault in faults))
    kept: list[_Line] = [
        (c.type, c.status, c.reason, c.message) for c in s.status.conditions if c.type not in ("Ready", "SpecAccepted")
    ]
    serving = any(pod.ready for pod in s.pods)
    suffix = " (the last accepted spec keeps serving)" if serving else ""
    return stamped(
        s, [("Ready", "False", "SpecInvalid", message + suffix), *kept, ("SpecAccepted", "False", "Invalid", message)]
    )


def stamped(s: Snapshot, lines: Sequence[_Line]) -> tuple[Condition, ...]:
    """Conditions with `lastTransitionTime` moved only where the status word changed."""
    result = []
    for kind, word, reason, message in lines:
        before = s.status.condition(kind)
        moved = before is None or before.status != word
        result.append(
            Condition(
                type=kind,
                status=word,
                reason=reason,
                message=clip(message),
                last_transition_time=s.now if moved or before is None else before.last_transition_time,
                observed_generation=s.generation,
            )
        )
    return tuple(result)


def _ready(available: _Line, draft: Draft) -> _Line:
    _, word, reason, message = available
    stable = draft.status.stable
    if word != "True" or stable is None:
        return ("Ready", "False", reason, message)
    canary = draft.status.canary
    if canary is not None:
        return ("Ready", "True", f"Canary{canary.stage}", f"{stable.dtype} serves; {canary.dtype} is on trial")
    return ("Ready", "True", "Serving", f"{stable.dtype} serves")


def _available(draft: Draft, s: Snapshot, replicas: int) -> _Line:
    stable = draft.status.stable
    if stable is None:
        return ("Available", "False", "NoRevision", "nothing serves yet")
    serving = s.traffic or stable.revision
    ready = len(s.ready_pods(serving))
    if ready and ready >= min(replicas, 1):
        return ("Available", "True", "EnginesReady", f"{ready} of {replicas} replicas answer")
    if replicas == 0:
        return ("Available", "False", "ScaledToZero", "spec.replicas is 0")
    pods = s.pods_of(serving)
    why = engine_failure(pods) or pending_reason(pods)
    if why is not None:
        return ("Available", "False", why.reason, why.message)
    return ("Available", "False", "EnginesStarting", f"0 of {replicas} replicas answer yet")


def _progressing(draft: Draft, s: Snapshot, target: Target) -> _Line:
    canary, stable = draft.status.canary, draft.status.stable
    if canary is not None:
        return (
            "Progressing",
            "True",
            f"Canary{canary.stage}",
            f"{canary.from_dtype} -> {canary.dtype}: {canary.message}",
        )
    if target.held is not None:
        return ("Progressing", "False", target.reason, target.held)
    if stable is not None and not stable.ever_ready:
        return ("Progressing", "True", "EnginesStarting", f"revision {stable.revision} ({stable.dtype}) is starting")
    return ("Progressing", "False", "Settled", target.message)


def _model_cached(draft: Draft, s: Snapshot) -> _Line:
    stable = draft.status.stable
    if stable is not None and stable.ever_ready:
        return ("ModelCached", "True", "EngineLoadedIt", "an engine has loaded the model")
    failure = engine_failure(s.pods_of(stable.revision)) if stable is not None else None
    if failure is not None and failure.reason in ("ModelNotFound", "ModelUnsupported"):
        return ("ModelCached", "False", failure.reason, failure.message)
    return ("ModelCached", "Unknown", "NotLoadedYet", "no engine has loaded the model yet")


def _metrics(workload: Workload) -> _Line:
    if workload.kind == "NoMetrics":
        return ("MetricsAvailable", "False", "NoMetrics", workload.message)
    return ("MetricsAvailable", "True", "Scraped", f"KV capacity {workload.capacity_tokens} tokens")


def _memory_pressured(s: Snapshot, workload: Workload) -> _Line:
    if workload.kind == "NoMetrics":
        return ("MemoryPressured", "Unknown", "NoMetrics", workload.message)
    before = s.status.condition("MemoryPressured")
    held = workload.kind == "Warming" and before is not None and before.status == "True"
    word: _Word = "True" if workload.kind == "MemoryBound" or held else "False"
    return ("MemoryPressured", word, workload.kind, workload.message)


def _canary_healthy(draft: Draft) -> _Line:
    canary = draft.status.canary
    if canary is not None:
        word: _Word = "False" if canary.stage == "RollingBack" else "True" if canary.verdict == "Passed" else "Unknown"
        return ("CanaryHealthy", word, canary.reason or canary.stage, f"{canary.dtype}: {canary.message}")
    last = draft.status.last_canary
    if last is None:
        return ("CanaryHealthy", "Unknown", "NoCanary", "no canary has run")
    ended: _Word = "True" if last.stage == "Promoted" else "False"
    return ("CanaryHealthy", ended, last.reason or last.stage, f"{last.stage} {last.dtype}: {last.message}")


def _accuracy(draft: Draft, s: Snapshot, target: Target) -> _Line:
    if s.probes.fault is not None:
        return ("AccuracyVerified", "False", "ProbeSetInvalid", s.probes.fault)
    stable, last = draft.status.stable, draft.status.accuracy.last
    if stable is None:
        return ("AccuracyVerified", "Unknown", "NoRevision", "nothing serves yet")
    if last is not None and last.revision == stable.revision:
        word: _Word = "True" if last.verdict == "Passed" else "False"
        return (
            "AccuracyVerified",
            word,
            f"Probe{last.verdict}",
            f"{last.dtype}: excess KL {last.excess_kl_micronats / 1000:.1f} millinats, "
            f"top-1 agreement {last.top1_agreement_permille / 10:.1f}%",
        )
    baseline = draft.status.accuracy.baseline
    if baseline is not None and stable.dtype == baseline.dtype:
        return ("AccuracyVerified", "True", "Reference", f"{stable.dtype} is what accuracy is measured against")
    return ("AccuracyVerified", "Unknown", "NotProbed", f"{stable.dtype} has not been compared with a 16-bit engine")


def _spec_accepted(unacted: Sequence[Unacted], s: Snapshot) -> _Line:
    notes: list[str] = []
    if unacted:
        notes.extend(field.message for field in unacted)
    if not s.server.pod_disruption_budgets:
        notes.append("this API server does not serve policy/v1: no PodDisruptionBudget is kept")
    if notes:
        return ("SpecAccepted", "True", "PartlyActedOn", "; ".join(notes))
    return ("SpecAccepted", "True", "Accepted", "every field that is set is acted on")
