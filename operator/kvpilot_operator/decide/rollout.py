"""Which step of the rollout? A canary starts, is probed, promoted or rolled back; `status.canary` is its state.

    none --target differs--> Starting --ready--> Probing --Passed--> Promoting --traffic moved--> none (Promoted)
                                |                   |                    |
                                +-------------------+--------------------+--> RollingBack --gone--> none (RolledBack)

Each step is written to the status before its objects change, and each is derived from what is observed, so a pass that
is cut off anywhere is simply done again.
"""

from __future__ import annotations

from datetime import timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.refusal import engine_failure
from kvpilot_operator.decide.target import RETRY_SECONDS, Target
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import MAX_DENIED, Canary, Denied, Stable, Verdict, clip


def advance(draft: Draft, s: Snapshot, spec: Spec, target: Target, replicas: int) -> None:
    """Move the rollout by at most one stage."""
    _mark_ready(draft, s)
    stable, canary = draft.status.stable, draft.status.canary
    if canary is not None:
        _advance_canary(draft, s, spec, target, canary, replicas)
    elif stable is None:
        _serve(draft, target, "Started", f"first revision with {target.dtype}: {target.message}")
    elif target.revision == stable.revision or target.template is None:
        return
    elif not stable.ever_ready:
        _serve(draft, target, "Replaced", f"{stable.revision} never became ready; {target.revision} takes its place")
    elif stable.revision not in s.deployments:
        _serve(
            draft, target, "Replaced", f"the Deployment of {stable.revision} is gone; {target.revision} takes its place"
        )
    elif not spec.rollout.paused and s.probes.fault is None:
        _start_canary(draft, s, target, stable)


def _mark_ready(draft: Draft, s: Snapshot) -> None:
    stable = draft.status.stable
    if stable is not None and not stable.ever_ready and s.ready_pods(stable.revision):
        draft.set(stable=Stable(revision=stable.revision, dtype=stable.dtype, since=stable.since, ever_ready=True))
        draft.event("EngineReady", f"revision {stable.revision} ({stable.dtype}) answers")


def _serve(draft: Draft, target: Target, reason: str, message: str) -> None:
    draft.set(stable=Stable(revision=target.revision, dtype=target.dtype, since=draft.now))
    draft.record("Serve", reason, message, to_dtype=target.dtype)


def _start_canary(draft: Draft, s: Snapshot, target: Target, stable: Stable) -> None:
    sample = s.last_sample(stable.revision)
    draft.set(
        canary=Canary(
            revision=target.revision,
            dtype=target.dtype,
            from_dtype=stable.dtype,
            stage="Starting",
            started_time=draft.now,
            stage_time=draft.now,
            reason=target.reason,
            message=clip(target.message),
            stable_capacity_tokens=sample.capacity_tokens // sample.pods if sample and sample.pods else None,
        )
    )
    draft.record(
        "StartCanary",
        target.reason,
        target.message,
        from_dtype=stable.dtype,
        to_dtype=target.dtype,
        event="CanaryStarted",
    )
    if target.warning is not None:
        draft.event("PreflightWarning", target.warning, warning=True)


def _advance_canary(draft: Draft, s: Snapshot, spec: Spec, target: Target, canary: Canary, replicas: int) -> None:
    if canary.stage == "RollingBack":
        _finish_rollback(draft, s, canary)
        return
    if canary.stage == "Promoting" and s.traffic == canary.revision:
        _finish_promotion(draft, canary)
        return
    if target.revision != canary.revision:
        roll_back(draft, s, spec, "Error", "Superseded", "the spec changed while the canary was on trial")
        return
    failure = engine_failure(s.pods_of(canary.revision))
    if failure is not None:
        roll_back(draft, s, spec, "Error", failure.reason, failure.message)
        return
    _note_capacity(draft, s, canary)
    ready = len(s.ready_pods(canary.revision))
    if canary.stage == "Starting" and ready:
        draft.set_canary(stage="Probing")
        draft.event(
            "CanaryReady", f"canary {canary.revision} ({canary.dtype}) answers; it is probed before any traffic"
        )
    elif _overdue(s, spec, canary):
        waiting = _why_waiting(s, canary)
        roll_back(draft, s, spec, "Error", "ProgressDeadlineExceeded", f"still {canary.stage} after "
                  f"{spec.canary.progress_deadline_seconds} s{waiting}")  # fmt: skip
    elif canary.stage == "Probing" and canary.verdict == "Passed" and not spec.rollout.paused:
        draft.set_canary(stage="Promoting")
        draft.record(
            "Promote", "Promoting", f"scaling to {replicas} and switching traffic: {canary.message}",
            from_dtype=canary.from_dtype, to_dtype=canary.dtype,
        )  # fmt: skip


def roll_back(draft: Draft, s: Snapshot, spec: Spec, verdict: Verdict, reason: str, message: str) -> None:
    """End the trial: traffic goes back (if it ever left), the canary drains and goes, the dtype is denied."""
    canary = draft.status.canary
    if canary is None:
        raise LookupError("no canary is in flight")
    draft.set_canary(stage="RollingBack", verdict=verdict, reason=reason, message=message)
    draft.record(
        "RollBack", reason, f"{message}; {canary.from_dtype} keeps serving",
        from_dtype=canary.dtype, to_dtype=canary.from_dtype, warning=reason != "Superseded",
    )  # fmt: skip
    if reason != "Superseded" and canary.dtype != canary.from_dtype:
        _deny(draft, s, spec, canary, verdict, reason, message)


def _deny(draft: Draft, s: Snapshot, spec: Spec, canary: Canary, verdict: Verdict, reason: str, message: str) -> None:
    seconds = spec.rollout.deny_seconds if verdict == "Failed" else min(RETRY_SECONDS, spec.rollout.deny_seconds)
    if seconds == 0:
        return
    entry = Denied(
        dtype=canary.dtype,
        model=spec.model.source,
        image=spec.engine.image,
        gpu=s.node.gpu,
        reason=reason,
        message=clip(message, 512),
        until=draft.now + timedelta(seconds=seconds),
    )
    kept = [
        d
        for d in draft.status.kv_cache.denied
        if d.until > draft.now
        and (d.dtype, d.model, d.image, d.gpu) != (entry.dtype, entry.model, entry.image, entry.gpu)
    ]
    draft.set_kv(denied=(entry, *kept)[:MAX_DENIED])
    draft.event(
        "DtypeDenied",
        f"{entry.dtype} is denied for this model, image and GPU ({entry.gpu}) until {entry.until:%Y-%m-%dT%H:%M:%SZ}",
        warning=True,
    )


def _finish_rollback(draft: Draft, s: Snapshot, canary: Canary) -> None:
    if s.traffic == canary.revision or canary.revision in s.deployments:
        return
    draft.set_canary(stage="RolledBack")
    draft.set(last_canary=draft.status.canary, canary=None)


def _finish_promotion(draft: Draft, canary: Canary) -> None:
    draft.set_canary(stage="Promoted")
    draft.set(
        last_canary=draft.status.canary,
        canary=None,
        stable=Stable(revision=canary.revision, dtype=canary.dtype, since=draft.now, ever_ready=True),
    )
    if canary.dtype != canary.from_dtype:
        draft.set_kv(changed_time=draft.now)
    gained = ""
    if canary.capacity_tokens and canary.stable_capacity_tokens:
        ratio = canary.capacity_tokens / canary.stable_capacity_tokens
        gained = f"; a replica holds {canary.stable_capacity_tokens} -> {canary.capacity_tokens} tokens ({ratio:.2f}x)"
    draft.record(
        "Promoted", "TrafficSwitched", f"{canary.dtype} serves{gained}",
        from_dtype=canary.from_dtype, to_dtype=canary.dtype,
    )  # fmt: skip


def _note_capacity(draft: Draft, s: Snapshot, canary: Canary) -> None:
    sample = s.last_sample(canary.revision)
    if sample is not None and sample.pods:
        each = sample.capacity_tokens // sample.pods
        if each != canary.capacity_tokens:
            draft.set_canary(capacity_tokens=each)


def _overdue(s: Snapshot, spec: Spec, canary: Canary) -> bool:
    return (s.now - canary.stage_time).total_seconds() > spec.canary.progress_deadline_seconds


def _why_waiting(s: Snapshot, canary: Canary) -> str:
    for pod in s.pods_of(canary.revision):
        reason = pod.unschedulable or pod.waiting_reason
        if reason:
            return f": {reason}"
    return ""
