"""How does a trial end? Rolled back or promoted, with its denial and what is remembered of it."""

from __future__ import annotations

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.target import RETRY_SECONDS
from kvpilot_operator.decide.trial.denial import deny
from kvpilot_operator.decide.trial.traffic import routed
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import MAX_HISTORY, Canary, Experience, Stable, Verdict

SUPERSEDED = "Superseded"


def roll_back(draft: Draft, s: Snapshot, spec: Spec, verdict: Verdict, reason: str, message: str) -> None:
    """End the trial: traffic goes back (if it ever left), the canary drains and goes, the dtype is denied.

    While the rollout is paused the finding is only noted, and acted on once it goes on.
    """
    canary = draft.status.canary
    if canary is None:
        raise LookupError("no canary is in flight")
    if spec.rollout.paused:
        draft.set_canary(verdict=verdict, reason=reason, message=message)
        return
    draft.set_canary(stage="RollingBack", verdict=verdict, reason=reason, message=message, weight_percent=None)
    draft.record(
        "RollBack", reason, f"{message}; {canary.from_dtype} keeps serving",
        from_dtype=canary.dtype, to_dtype=canary.from_dtype, warning=reason != SUPERSEDED,
    )  # fmt: skip
    if reason == SUPERSEDED:
        return
    _remember(draft, s, spec)
    if canary.dtype != canary.from_dtype:
        seconds = spec.rollout.deny_seconds if verdict == "Failed" else min(RETRY_SECONDS, spec.rollout.deny_seconds)
        deny(draft, s, spec, canary.dtype, reason, message, seconds)


def finish_rollback(draft: Draft, s: Snapshot, canary: Canary) -> None:
    """Close the trial once the canary has neither traffic nor pods to come."""
    if s.traffic == canary.revision or canary.revision in s.deployments or routed(s):
        return
    draft.set_canary(stage="RolledBack")
    draft.set(last_canary=draft.status.canary, canary=None)


def finish_promotion(draft: Draft, s: Snapshot, spec: Spec, canary: Canary) -> None:
    """Close the trial once all traffic is the canary's."""
    draft.set_canary(stage="Promoted", weight_percent=None)
    _remember(draft, s, spec)
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


def _remember(draft: Draft, s: Snapshot, spec: Spec) -> None:
    canary, last = draft.status.canary, draft.status.accuracy.last
    if canary is None:
        raise LookupError("no canary is in flight")
    capacity = None
    if canary.capacity_tokens and canary.stable_capacity_tokens:
        capacity = round(100 * canary.capacity_tokens / canary.stable_capacity_tokens)
    probed = last is not None and last.revision == canary.revision and last.probe_time >= canary.started_time
    experience = Experience(
        dtype=canary.dtype,
        from_dtype=canary.from_dtype,
        model=spec.model.source,
        image=spec.engine.image,
        gpu=s.node.gpu,
        recent_tokens=spec.kv_cache.recent_tokens,
        time=draft.now,
        verdict=canary.verdict,
        reason=canary.reason,
        capacity_percent=capacity,
        ttft_p95_change_percent=canary.ttft_p95_change_percent,
        itl_p95_change_percent=canary.itl_p95_change_percent,
        throughput_change_percent=canary.throughput_change_percent,
        excess_kl_micronats=last.excess_kl_micronats if probed and last is not None else None,
    )
    draft.set(history=(experience, *draft.status.history)[:MAX_HISTORY])
