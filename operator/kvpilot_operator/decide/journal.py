"""What of the policy's decision is written down: each step with what was weighed, and each hold as it begins."""

from __future__ import annotations

from kvpilot_operator.decide.context import Context
from kvpilot_operator.state.enums import Action


def explain(c: Context) -> Context:
    """Write the policy's decision into the journal where it is new. What starts a canary is written with the canary."""
    if c.before.stable is None:
        return c if c.target.warning is None else c.event("PreflightWarning", c.target.warning, warning=True)
    policy, step = c.policy, c.policy.chosen
    if c.spec.kv_cache.mode == "Recommend":
        c = _recommend(c)
    elif step.action in (Action.SCALE_OUT, Action.SCALE_IN):
        event = f"{step.action}{policy.reason}"
        c = c.record(step.action, policy.reason, policy.message, options=policy.options, event=event)
    return _hold(c)


def _recommend(c: Context) -> Context:
    step, stable = c.policy.wanted or c.policy.chosen, c.before.stable
    now, before = (
        (status.kv_cache.recommended_dtype, status.scaling.recommended_replicas) for status in (c.status, c.before)
    )
    if now == before or step.action == Action.STAY or stable is None:
        return c
    return c.record(
        Action.RECOMMEND,
        c.policy.reason,
        f"recommended, not applied: {c.policy.message}",
        from_dtype=stable.dtype,
        to_dtype=step.dtype,
        options=c.policy.options,
        event="Recommended",
    )


def _hold(c: Context) -> Context:
    """Say once why nothing moves although the load or the spec asks for it."""
    target, policy = c.target, c.policy
    if target.held is None or c.canary is not None:
        return c
    before = c.before.condition("Progressing")
    newest = c.status.decisions[0] if c.status.decisions else None
    told = newest is not None and (newest.action, newest.reason) == (Action.HOLD, target.reason)
    if told or (before is not None and before.reason == target.reason):
        return c
    if policy.hold is not None and target.held == policy.hold:
        return c.record(Action.HOLD, target.reason, policy.message, warning=True, options=policy.options)
    return c.record(Action.HOLD, target.reason, target.held, warning=True)
