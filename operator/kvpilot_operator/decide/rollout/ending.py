"""The end of a trial: rollback or promotion, with its denial and its entry in the history."""

from __future__ import annotations

import msgspec

from kvpilot_operator.api.words import Action, Reason, Stage, Verdict
from kvpilot_operator.decide.changes import spec_changes
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.objects.traffic import routed
from kvpilot_operator.decide.steps.ladder import RETRY_SECONDS, about, subject
from kvpilot_operator.state.status import MAX_HISTORY, Canary, Experience, Stable

# Faults of engines: the revision waits before it is tried again (`target`), and no dtype is denied.
NOT_OF_THE_DTYPE = (Reason.BASELINE_UNFIT, Reason.DTYPE_MISMATCH)


def roll_back(c: Context, verdict: Verdict, reason: str, message: str) -> Context:
    """End the trial: traffic goes back (if it ever left), the canary drains and goes, the dtype is denied.

    A fault that the dtype did not cause denies nothing. While the rollout is paused, the finding is only noted. The
    rollback follows once the pause ends.
    """
    canary = in_flight(c)
    if c.spec.rollout.paused:
        return c.set_canary(verdict=verdict, reason=reason, message=message)
    c = c.set_canary(stage=Stage.ROLLING_BACK, verdict=verdict, reason=reason, message=message, weight_percent=None)
    c = c.record(
        Action.ROLL_BACK,
        reason,
        f"{message}; {_before(canary)} keeps serving",
        from_dtype=canary.dtype,
        to_dtype=canary.from_dtype,
        warning=reason != Reason.SUPERSEDED,
    )
    c = _remember(c)
    if reason == Reason.SUPERSEDED:
        return c
    if canary.dtype == canary.from_dtype or reason in NOT_OF_THE_DTYPE:
        return c
    longest = c.spec.rollout.deny_seconds
    return c.deny(canary.dtype, reason, message, longest if verdict == Verdict.FAILED else min(RETRY_SECONDS, longest))


def _before(canary: Canary) -> str:
    return "the revision before it" if canary.dtype == canary.from_dtype else canary.from_dtype


def finish_rollback(c: Context) -> Context:
    """Close the trial once the canary has no traffic and no pods to come."""
    s, canary = c.snapshot, in_flight(c)
    if s.traffic == canary.revision or canary.revision in s.deployments or routed(s):
        return c
    last = c.status.last_trial
    if last is not None and last.revision == canary.revision:
        c = c.set(history=(msgspec.structs.replace(last, time=c.now), *c.status.history[1:]))
    return c.set(canary=None)


def finish_promotion(c: Context) -> Context:
    """Close the trial once all traffic is the canary's."""
    canary, news = in_flight(c), spec_changes(c, c.stable) if c.stable is not None else ""
    c = _remember(c.set_canary(stage=Stage.PROMOTED, weight_percent=None))
    stable = Stable(revision=canary.revision, dtype=canary.dtype, since=c.now, ever_ready=True)
    if c.stable is not None and c.stable.revision != c.render(canary.from_dtype).name:
        # More than the dtype has changed, so recorded loads and backoffs belong to another engine.
        c = c.set(scaling=msgspec.structs.replace(c.status.scaling, saturations=(), scale_in_backoff=None))
    c = c.set(canary=None, stable=stable)
    if canary.dtype != canary.from_dtype:
        # The dtype was tried in spite of a denial (denySeconds was 0) and has passed, so drop the denial.
        passed = subject(canary.dtype, c.spec, c.snapshot.node.gpu)
        denied = tuple(one for one in c.status.kv_cache.denied if about(one) != passed)
        c = c.set_kv(changed_time=c.now, denied=denied)
    gained = ""
    if canary.capacity_ratio is not None:
        tokens = f"{canary.stable_capacity_tokens} -> {canary.capacity_tokens} tokens"
        gained = f"; a replica holds {tokens} ({canary.capacity_ratio:.2f}x)"
    text = f"{canary.dtype} serves{gained}{f'; the spec has changed: {news}' if news else ''}"
    return c.record(Action.PROMOTED, "TrafficSwitched", text, from_dtype=canary.from_dtype, to_dtype=canary.dtype)


def _remember(c: Context) -> Context:
    canary = in_flight(c)
    capacity = round(100 * canary.capacity_ratio) if canary.capacity_ratio is not None else None
    experience = Experience(
        revision=canary.revision,
        dtype=canary.dtype,
        from_dtype=canary.from_dtype,
        model=c.spec.model.source,
        image=c.spec.engine.image,
        gpu=c.snapshot.node.gpu,
        recent_tokens=c.spec.kv_cache.recent_tokens,
        time=c.now,
        verdict=canary.verdict,
        reason=canary.reason,
        message=canary.message,
        generation=canary.generation,
        traffic_mode=canary.traffic_mode,
        capacity_percent=capacity,
        itl_p95_change_percent=canary.itl_p95_change_percent,
    )
    older = (msgspec.structs.replace(one, message="") for one in c.status.history)
    return c.set(history=(experience, *older)[:MAX_HISTORY])
