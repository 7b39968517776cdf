"""Choose the target revision: the present spec, rendered with the user's dtype or with the policy's."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from kvpilot_operator.api.words import Action, Reason, Stage, Verdict
from kvpilot_operator.decide.changes import spec_changes
from kvpilot_operator.decide.context import Context, Target
from kvpilot_operator.decide.steps.capacity import smaller
from kvpilot_operator.decide.steps.ladder import ACCURACY_REASONS, RETRY_SECONDS, infeasible, rungs
from kvpilot_operator.render.engine import model_location
from kvpilot_operator.state.status import Stable
from kvpilot_operator.times import utc


def choose(c: Context) -> Context:
    """Choose the revision to converge to, and write it to `target` of the context."""
    fixed = c.spec.kv_cache.mode == "Fixed"
    target, stable = _away_from_harm(c) or (_fixed(c) if fixed else _laddered(c)), c.stable
    if stable is None or c.canary is not None or target.held is not None or target.revision == stable.revision:
        return replace(c, target=target)
    if news := spec_changes(c, stable):
        more = f"{target.message}; the spec has changed, too: {news}"
        target = replace(target, message=more if target.dtype != stable.dtype else f"the spec has changed: {news}")
        target = target if target.dtype != stable.dtype else replace(target, reason=Reason.SPEC_CHANGED)
    return replace(c, target=target)


def after_rollback(c: Context) -> Context:
    """Choose again after a rollback has ended, because until then the target was the failed revision."""
    return choose(c) if c.before.canary is not None and c.canary is None and c.stable == c.before.stable else c


def stay(c: Context) -> Context:
    """Keep the canary's or the serving revision as the target, because `choose` raised an error. Start no canary."""
    part = c.canary or c.stable
    dtype, name = (part.dtype, part.revision) if part is not None else (c.spec.kv_cache.baseline, "")
    held, recommended = "no target could be chosen: no change is made", c.status.kv_cache.recommended_dtype
    return replace(c, target=Target(dtype, name, Reason.RECONCILE_INCOMPLETE, held, held, recommended, startable=False))


def _away_from_harm(c: Context) -> Target | None:
    """Return a target with a safer dtype if the serving dtype is denied for its accuracy, else None.

    A canary whose dtype is already larger than the serving dtype stays the target.
    """
    stable, canary = c.stable, c.canary
    if stable is None:
        return None
    standing = c.denial(stable.dtype)
    if standing is None or standing.reason not in ACCURACY_REASONS:
        return None
    fixed, there, image = c.spec.kv_cache.mode == "Fixed", c.snapshot.deployments.get(stable.revision), standing.image
    own = (None, c.spec.engine.image), (None, model_location(c.spec))
    if fixed and there is not None and (there.image not in own[0] or there.model not in own[1]):
        # The denial is about the spec's image and model. The serving revision has another image or model.
        if c.spec.kv_cache.dtype != stable.dtype:
            return None
        held = (
            f"{stable.dtype} with {image} and {standing.model} is denied until {utc(standing.until)}: "
            f"{standing.message}; the serving revision keeps its own image and model. Choose another image, model or "
            "dtype, or set spec.rollout.denySeconds to 0 to try again"
        )
        return Target(stable.dtype, stable.revision, Reason.DTYPE_DENIED, held, held, startable=False)
    if canary is not None and canary.stage != Stage.ROLLING_BACK and smaller(stable.dtype, canary.dtype):
        return _guarded(c, canary.dtype, canary.reason, canary.message, recommended=canary.dtype)
    why = f"the serving dtype {stable.dtype} is denied for wrong answers: {standing.message}"
    ladder = rungs(c.spec, c.snapshot.node, c.snapshot.model, c.status.kv_cache.denied, c.now)
    larger = [rung for rung in (ladder[:1] if fixed else ladder) if smaller(stable.dtype, rung.dtype)]
    safer = next((rung.dtype for rung in reversed(larger) if rung.outcome is None), None)
    if safer is None:
        held = f"{why}; every safer dtype is denied, too. Set spec.rollout.denySeconds to 0 to try them again"
        return _guarded(c, stable.dtype, Reason.ACCURACY_DRIFTED, held, held=held)
    return _guarded(c, safer, Reason.ACCURACY_DRIFTED, f"{why}; {safer} replaces it", recommended=safer)


def _fixed(c: Context) -> Target:
    wanted, stable = c.spec.kv_cache.dtype, c.stable
    assert wanted is not None  # noqa: S101 - the API's rule: Fixed comes with a dtype
    standing = c.denial(wanted)
    warning = infeasible(wanted, c.spec, c.snapshot.node, c.snapshot.model)
    if standing is not None and standing.reason in ACCURACY_REASONS and stable is not None and stable.dtype != wanted:
        # Other changes of the spec wait, too: they were made for the denied dtype.
        name = stable.revision if _serves(c, stable) else c.render(stable.dtype).name
        held = (
            f"spec.kvCache.dtype {wanted} is denied until {utc(standing.until)}: {standing.message}; revision {name} "
            f"({stable.dtype}) keeps serving. Choose another dtype, or set spec.rollout.denySeconds to 0 to try again"
        )
        return Target(stable.dtype, name, Reason.DTYPE_DENIED, held, held, warning=warning)
    return _guarded(c, wanted, Reason.SPEC_CHANGED, f"spec.kvCache.dtype is {wanted}", warning=warning)


def _laddered(c: Context) -> Target:
    stable, canary, policy = c.stable, c.canary, c.policy
    if stable is None:
        baseline = c.spec.kv_cache.baseline
        return _guarded(c, baseline, Reason.SETTLED, f"starts with the baseline dtype {baseline}")
    if canary is not None and canary.stage != Stage.ROLLING_BACK:
        return _guarded(c, canary.dtype, canary.reason, canary.message, recommended=canary.dtype)
    if (first := _start_dtype(c, stable)) is not None:
        text = f"spec.kvCache.startDtype is {first}: kvpilot tries it before memory is short"
        return _guarded(c, first, Reason.SPEC_CHANGED, text, recommended=first)
    step, best = policy.chosen, (policy.wanted or policy.chosen).dtype
    if c.spec.kv_cache.mode == "Recommend":
        return _guarded(c, stable.dtype, Reason.SETTLED, "mode Recommend: nothing is changed", recommended=best)
    if step.action in (Action.DTYPE_DOWN, Action.DTYPE_UP):
        taken = _guarded(c, step.dtype, policy.reason, policy.message, recommended=best)
        return replace(taken, options=policy.options)
    if policy.hold is not None:
        return _guarded(c, stable.dtype, policy.reason, policy.hold, held=policy.hold, recommended=best)
    return _guarded(c, stable.dtype, Reason.SETTLED, "no other dtype is needed", recommended=best)


def _start_dtype(c: Context, stable: Stable) -> str | None:
    """Return kvCache.startDtype if the service should try it now, before memory is short; else None.

    The service tries it only before its first change of dtype, and not if the dtype has failed or is ruled out.
    """
    kv, dtype = c.status.kv_cache, c.spec.kv_cache.start_dtype
    # Wait until an engine has answered. Before that, a new revision would serve at once, without probes.
    if not _serves(c, stable) or stable.dtype != c.spec.kv_cache.baseline or kv.changed_time is not None:
        return None
    if any(one.dtype == dtype and one.verdict == Verdict.FAILED for one in c.status.history):
        return None
    ladder = rungs(c.spec, c.snapshot.node, c.snapshot.model, kv.denied, c.now)
    return next((rung.dtype for rung in ladder if rung.dtype == dtype and rung.outcome is None), None)


def _serves(c: Context, stable: Stable) -> bool:
    return stable.ever_ready and stable.revision in c.snapshot.deployments


def _guarded(c: Context, dtype: str, reason: str, message: str, **more: Any) -> Target:
    """Return the target with this dtype. If its revision has recently failed, return the stable revision instead."""
    made, stable = Target(dtype, c.render(dtype).name, reason, message, **more), c.stable
    failed = _failed_before(c, made.revision)
    if failed is None or stable is None or stable.revision == made.revision:
        return made
    kept = replace(made, dtype=stable.dtype, revision=stable.revision, startable=False)
    return replace(kept, reason=Reason.REVISION_FAILED, message=failed, held=failed)


def _failed_before(c: Context, name: str) -> str | None:
    last, deny = c.status.last_trial, c.spec.rollout.deny_seconds
    if last is None or last.revision != name or last.verdict == Verdict.PASSED or last.reason == Reason.SUPERSEDED:
        return None
    if c.canary is not None and c.canary.revision == name:
        # The failed revision is still being rolled back, so it stays the target until the rollback ends.
        return None
    wait = deny if last.verdict == Verdict.FAILED else min(RETRY_SECONDS, deny)
    if wait == 0 and last.generation == c.snapshot.generation:
        # denySeconds is 0, so no denial prevents another try. Without a wait, the canary would fail in a loop.
        wait = RETRY_SECONDS
    until = last.time + timedelta(seconds=wait)
    if c.now >= until:
        return None
    return (
        f"the same revision ({last.dtype}) was rolled back: {last.reason}: {last.message}; it may be tried again at "
        f"{utc(until)}, after a change of the spec, or by `kubectl kvpilot retry`"
    )
