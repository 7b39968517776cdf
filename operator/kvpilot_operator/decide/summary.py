"""What is written down? The status' figures, for people, /scale and metrics: replicas, selector, dtypes, capacity and
use. Of the policy's decision each step with what was weighed, and each hold as it begins.
"""

from __future__ import annotations

from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.judging.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.pressure import was_pressured
from kvpilot_operator.decide.trial import traffic
from kvpilot_operator.render.names import REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.state.enums import Action, WorkloadKind

_QUIET = (WorkloadKind.MEMORY_BOUND, WorkloadKind.WARMING, WorkloadKind.NO_METRICS)


def summarise(c: Context) -> Context:
    """The figures of the status; an event where memory pressure begins or ends."""
    c = _announce_pressure(c)
    s, stable, kv = c.snapshot, c.stable, c.status.kv_cache
    if stable is None:
        return c
    names, serves = traffic.serving(c), s.deployments.get(stable.revision)
    sample = s.last_sample(traffic.selected(c) or stable.revision)
    usage = c.workload.usage_percent if c.workload.kind != WorkloadKind.NO_METRICS else None
    if usage is not None and kv.usage_percent is not None and abs(usage - kv.usage_percent) < USAGE_STEP_PERCENT:
        usage = kv.usage_percent
    # While two revisions serve together an autoscaler has to count the pods of both.
    one = f",{REVISION_LABEL}={names[0]}" if len(names) == 1 else ""
    c = c.set(
        replicas=_counted(c, names),
        ready_replicas=sum(len(s.ready_pods(name)) for name in names),
        selector=f"{SERVICE_LABEL}={s.key.name}{one}",
        # An engine that cannot load one of its adapters does not start.
        adapters=serves.adapters if serves is not None and stable.ever_ready else (),
    )
    return c.set_kv(
        active_dtype=stable.dtype,
        observed_dtype=sample.observed_dtype if sample is not None else kv.observed_dtype,
        recent_tokens=sample.recent_tokens if sample is not None else kv.recent_tokens,
        recommended_dtype=c.target.recommended or c.target.dtype,
        capacity_tokens=sample.capacity_tokens if sample is not None else kv.capacity_tokens,
        usage_percent=usage,
    )


def _counted(c: Context, serving: tuple[str, ...]) -> int:
    """What /scale tells an autoscaler: the replicas that are asked for, serving or on trial.

    The one pod more that a trial brings, and the place that is empty while two pods change over, do not count: they are
    no reason to change the number.
    """
    there = c.snapshot.deployments
    if c.canary is None and c.before.canary is None:
        return sum(there[name].replicas for name in serving if name in there)
    return min(c.replicas, max(sum(view.replicas for view in there.values()), c.before.replicas or 0))


def _announce_pressure(c: Context) -> Context:
    kind, was = c.workload.kind, was_pressured(c)
    if kind == WorkloadKind.MEMORY_BOUND and not was:
        return c.event("MemoryPressured", c.workload.message, warning=True)
    if was and kind not in _QUIET:
        return c.event("MemoryRelaxed", c.workload.message)
    return c


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
