"""End a trial by rollback or promotion, record it in the history, and deny a dtype that is at fault."""

import msgspec

from kvpilot_operator.api.words import Action, Reason, Stage, Verdict
from kvpilot_operator.decide.changes import spec_changes
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.objects.traffic import routed
from kvpilot_operator.decide.steps.ladder import RETRY_SECONDS, Subject
from kvpilot_operator.state.status import MAX_HISTORY, Experience, Stable, Trial

ABORTED = Stage.ROLLED_BACK  # The reason in the status of a trial that a person ended.
# Reasons that are not the dtype's fault. kvpilot then denies no dtype, but the revision must wait before its next trial
# (`target`).
NOT_OF_THE_DTYPE = (Reason.BASELINE_UNFIT, Reason.DTYPE_MISMATCH)


def roll_back(c: Context, verdict: Verdict, reason: str, message: str) -> Context:
    """End the trial, and deny a dtype that is at fault. During a pause, do so only if a person ends the trial."""
    canary = in_flight(c)
    if c.spec.rollout.paused and reason != ABORTED:
        return c.set_canary(verdict=verdict, reason=reason, message=message)
    c = c.set_canary(stage=Stage.ROLLING_BACK, verdict=verdict, reason=reason, message=message, weight_percent=None)
    same, warning = canary.dtype == canary.from_dtype, reason not in (Reason.SUPERSEDED, ABORTED)
    entry = {"from_dtype": canary.dtype, "to_dtype": canary.from_dtype}
    text = f"{message}; {'the revision before it' if same else canary.from_dtype} keeps serving"
    c = _remember(c.record(Action.ROLL_BACK, reason, text, warning=warning, **entry))
    if same or (reason, verdict) == (ABORTED, Verdict.INCONCLUSIVE) or reason in (Reason.SUPERSEDED, *NOT_OF_THE_DTYPE):
        return c
    longest = c.spec.rollout.deny_seconds
    return c.deny(canary.dtype, reason, message, longest if verdict == Verdict.FAILED else min(RETRY_SECONDS, longest))


def finish_rollback(c: Context) -> Context:
    """Close the trial once the canary has no traffic and no workload."""
    s, canary = c.snapshot, in_flight(c)
    if s.traffic == canary.revision or canary.revision in s.deployments or routed(s):
        return c
    last = c.status.last_trial
    if last is not None and last.revision == canary.revision:
        c = c.set(history=(msgspec.structs.replace(last, time=c.now), *c.status.history[1:]))
    return c.set(canary=None)


def finish_promotion(c: Context) -> Context:
    """Close the trial once the canary gets all traffic."""
    canary, news = in_flight(c), spec_changes(c, c.stable) if c.stable is not None else ""
    c = _remember(c.set_canary(stage=Stage.PROMOTED, weight_percent=None))
    stable = Stable(revision=canary.revision, dtype=canary.dtype, since=c.now, ever_ready=True)
    if c.stable is not None and c.stable.revision != c.render(canary.from_dtype).name:
        # More than the dtype has changed, so drop recorded loads and backoffs: they belong to another engine.
        c = c.set_scaling(saturations=(), scale_in_backoff=None)
    c = c.set(canary=None, stable=stable)
    if canary.dtype != canary.from_dtype:
        # The dtype was tried in spite of a denial (denySeconds was 0) and has passed, so drop the denial.
        passed = Subject.of(canary.dtype, c.spec, c.snapshot.node.gpu)
        denied = tuple(one for one in c.status.kv_cache.denied if not passed.matches(one))
        c = c.set_kv(changed_time=c.now, denied=denied)
    gained = ""
    if canary.capacity_ratio is not None:
        tokens = f"{canary.stable_capacity_tokens} -> {canary.capacity_tokens} tokens"
        gained = f"; a replica holds {tokens} ({canary.capacity_ratio:.2f}x)"
    text = f"{canary.dtype} serves{gained}{f'; the spec has changed: {news}' if news else ''}"
    return c.record(Action.PROMOTED, "TrafficSwitched", text, from_dtype=canary.from_dtype, to_dtype=canary.dtype)


def _remember(c: Context) -> Context:
    canary = in_flight(c)
    tried = {name: getattr(canary, name) for name in Trial.__struct_fields__}
    experience = Experience(
        **tried,
        model=c.spec.model.source,
        image=c.spec.engine.image,
        gpu=c.snapshot.node.gpu,
        recent_tokens=c.spec.kv_cache.recent_tokens,
        time=c.now,
        capacity_percent=round(100 * canary.capacity_ratio) if canary.capacity_ratio is not None else None,
    )
    older = (msgspec.structs.replace(one, message="") for one in c.status.history)
    return c.set(history=(experience, *older)[:MAX_HISTORY])
