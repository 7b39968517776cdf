"""The figures of the status, for people, /scale and metrics, and the journal's entries on steps.

Each step is written with the options that were weighed, and each hold as it begins.
"""

from __future__ import annotations

import msgspec

from kvpilot_operator.api.names import REVISION_LABEL, SERVICE_LABEL, service_url
from kvpilot_operator.api.words import Action, WorkloadKind
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.load.objectives import ObjectiveResult
from kvpilot_operator.decide.load.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.decide.step_rules import was_pressured
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.status import Cost, Objective

# A figure that moved by less than this share is not worth a write to the API server.
_MOVED = 0.1
# The schema's limit, whatever a page says.
_MOST = 1e12
_MOST_ADAPTERS, _MOST_LETTERS = 16, 128
# These kinds do not show that a pressure has ended.
_QUIET = (
    WorkloadKind.MEMORY_BOUND,
    WorkloadKind.WARMING,
    WorkloadKind.NO_METRICS,
    WorkloadKind.ENGINES_STALLED,
    WorkloadKind.IMBALANCED,
)


def summarise(c: Context) -> Context:
    """Write the figures of the status, and an event where memory pressure begins or ends."""
    c = _announce_pressure(c)
    s, stable, kv = c.snapshot, c.stable, c.status.kv_cache
    if stable is None:
        return c
    names, serves = traffic.serving_revisions(c), s.deployments.get(stable.revision)
    sample = s.last_sample(traffic.selected(c) or stable.revision)
    usage = c.workload.usage_percent if c.workload.pods else None
    # While two revisions serve together an autoscaler has to count the pods of both.
    one = f",{REVISION_LABEL}={names[0]}" if len(names) == 1 else ""
    c = c.set(
        observed_revision=c.asked,
        # Where the name is somebody else's Service, requests to it would not be ours.
        url=service_url(s.key.namespace, s.key.name) if s.traffic is not None else None,
        inference_pool=_kept(c, "InferencePool", Question.POOLS, c.before.inference_pool),
        route=_kept(c, "HTTPRoute", Question.ROUTE, c.before.route),
        replicas=_counted(c, names),
        ready_replicas=sum(len(s.ready_pods(name)) for name in names),
        selector=f"{SERVICE_LABEL}={s.key.name}{one}",
        adapters=_adapters(c, stable.revision, serves.adapters if serves is not None and stable.ever_ready else ()),
    )
    c = c.set(objectives=tuple(_shown(c, one) for one in c.workload.objectives), cost=_cost(c))
    loaded, from_disk = c.workload.host_hits, c.workload.disk_hits
    in_host = None if loaded is None else loaded - (from_disk or 0.0)
    disk = c.spec.kv_cache.offload is not None and c.spec.kv_cache.offload.disk is not None
    return c.set_kv(
        active_dtype=stable.dtype,
        observed_dtype=sample.observed_dtype if sample is not None else kv.observed_dtype,
        recent_tokens=sample.recent_tokens if sample is not None else kv.recent_tokens,
        retention=(sample.retention or None) if sample is not None else kv.retention,
        recommended_dtype=c.target.recommended or c.target.dtype,
        capacity_tokens=sample.capacity_tokens if sample is not None else kv.capacity_tokens,
        usage_percent=_steady(usage, kv.usage_percent),
        gpu_hit_percent=_hits(c, c.workload.gpu_hits, kv.gpu_hit_percent),
        host_hit_percent=_hits(c, in_host, kv.host_hit_percent),
        disk_hit_percent=_hits(c, c.workload.disk_hits, kv.disk_hit_percent) if disk else None,
    )


def _adapters(c: Context, revision: str, told: tuple[str, ...]) -> tuple[str, ...]:
    """Return the adapters that all pods report as loaded; until one reports, those that they were told to load."""
    s = c.snapshot
    said = [s.adapters[pod.name] for pod in s.ready_pods(revision) if pod.name in s.adapters]
    if not said:
        return told
    everywhere = set(said[0]).intersection(*said[1:])
    names = [*told, *sorted(everywhere.difference(told))]
    return tuple(name for name in names if name in everywhere and len(name) <= _MOST_LETTERS)[:_MOST_ADAPTERS]


def _hits(c: Context, share: float | None, said: int | None) -> int | None:
    """Return the hits of one tier, where there are several; the last figure where no prompt was looked up."""
    if c.spec.kv_cache.offload is None:
        return None
    return said if share is None else _steady(min(100, round(100 * share)), said)


def _steady(percent: int | None, said: int | None) -> int | None:
    """Return a figure, or the last one where it hardly moved."""
    if percent is None or said is None:
        return percent
    return said if abs(percent - said) < USAGE_STEP_PERCENT else percent


def _kept(c: Context, kind: str, question: Question, before: str | None) -> str | None:
    """Name an object before it is made and until it is gone, so that a new operator knows what to look for."""
    s = c.snapshot
    there = {name: one.owned for (its, name), one in s.objects.items() if its == kind}
    pool, route = c.spec.inference_pool is not None, c.spec.route is not None
    wanted = pool and s.server.inference_pools if kind == "InferencePool" else route and s.server.http_routes
    # An object of somebody else's is not ours.
    asked = wanted and there.get(s.key.name, True)
    kept = s.unread(question) is not None and before is not None
    return s.key.name if asked or any(there.values()) or kept else None


def _shown(c: Context, one: ObjectiveResult) -> Objective:
    """Describe an objective in the status, with the last figure where it hardly moved."""
    asked, seen = one.objective, None if one.seconds is None else round(min(one.seconds, _MOST) * 1000)
    now = Objective(
        metric=asked.metric, percentile=asked.percentile, milliseconds=asked.milliseconds, state=one.state,
        observed_milliseconds=seen,
    )  # fmt: skip
    for said in c.before.objectives:
        before = said.observed_milliseconds
        if msgspec.structs.replace(now, observed_milliseconds=before) == said and before is not None:
            return said if seen is not None and abs(seen - before) < _MOVED * before else now
    return now


def _cost(c: Context) -> Cost | None:
    """Return the cost of all that runs, a canary included, and of a million generated tokens in the last window."""
    each, w, before = c.snapshot.gpu_hour_micros, c.workload, c.before.cost
    if each is None:
        return None
    pods = sum(view.replicas * view.nodes for view in c.snapshot.deployments.values())
    gpus = pods * c.spec.engine.tensor_parallel_size
    an_hour = 3600 * (w.requests_per_second or 0.0) * (w.mean_generation or 0.0) * w.pods
    tokens = round(min(gpus * each / an_hour, _MOST) * 1e6) if an_hour >= 1 else None
    said = before.per_million_tokens_micros if before is not None else None
    if tokens is not None and said is not None and abs(tokens - said) < _MOVED * said:
        tokens = said
    return Cost(per_hour_micros=gpus * each, per_million_tokens_micros=tokens)


def _counted(c: Context, serving: tuple[str, ...]) -> int:
    """Return the replicas for /scale: those that are asked for, serving or on trial.

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
    return _note_hold(c)


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


def _note_hold(c: Context) -> Context:
    """Say once why nothing moves although the load or the spec asks for it."""
    target, policy = c.target, c.policy
    if target.held is None or c.canary is not None:
        return c
    if c.holds(target.reason):
        return c
    if policy.hold is not None and target.held == policy.hold:
        return c.record(Action.HOLD, target.reason, policy.message, warning=True, options=policy.options)
    return c.record(Action.HOLD, target.reason, target.held, warning=True)
