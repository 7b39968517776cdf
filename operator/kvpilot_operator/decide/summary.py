"""What do the status' figures say? Replicas, selector, dtypes, capacity and use, for people, /scale and metrics."""

from __future__ import annotations

from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.judging.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.pressure import was_pressured
from kvpilot_operator.decide.trial import traffic
from kvpilot_operator.render.names import REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.state.enums import WorkloadKind

_QUIET = (WorkloadKind.MEMORY_BOUND, WorkloadKind.WARMING, WorkloadKind.NO_METRICS)


def summarise(c: Context) -> Context:
    """The figures of the status; an event where memory pressure begins or ends."""
    c = _announce_pressure(c)
    s, stable, kv = c.snapshot, c.stable, c.status.kv_cache
    if stable is None:
        return c
    names = traffic.serving(c)
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
