"""Write the figures of the status (for people, /scale and metrics) and the journal's entries about steps.

Each step is recorded with all weighed options. Each hold is recorded when it begins.
"""

from __future__ import annotations

from dataclasses import replace

from kvpilot_operator.api.names import REVISION_LABEL, SERVICE_LABEL, service_url
from kvpilot_operator.api.words import Action, WorkloadKind
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.load.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.decide.step_rules import was_pressured
from kvpilot_operator.state.decision import Figures, Latency
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.samples import Sample

_MOST_ADAPTERS, _MOST_LETTERS = 16, 128
# A workload of these kinds does not prove that pressure has ended.
_QUIET = (
    WorkloadKind.MEMORY_BOUND,
    WorkloadKind.WARMING,
    WorkloadKind.NO_METRICS,
    WorkloadKind.ENGINES_STALLED,
    WorkloadKind.IMBALANCED,
)


def summarise(c: Context) -> Context:
    """Write the figures of the status, and post an event if memory pressure begins or ends."""
    c = _announce_pressure(c)
    s, stable, kv = c.snapshot, c.stable, c.status.kv_cache
    if stable is None:
        return c
    names, serves = traffic.serving_revisions(c), s.deployments.get(stable.revision)
    sample = s.last_sample(traffic.selected(c) or stable.revision)
    usage = c.workload.usage_percent if c.workload.pods else None
    # While two revisions serve together, an autoscaler must count the pods of both.
    one = f",{REVISION_LABEL}={names[0]}" if len(names) == 1 else ""
    c = c.set(
        observed_revision=c.asked,
        # If another owner's Service has the name, requests to it would not reach ours.
        url=service_url(s.key.namespace, s.key.name) if s.traffic is not None else None,
        inference_pool=_kept(c, "InferencePool", Question.POOLS, c.before.inference_pool),
        route=_kept(c, "HTTPRoute", Question.ROUTE, c.before.route),
        replicas=_counted(c, names),
        ready_replicas=sum(len(s.ready_pods(name)) for name in names),
        selector=f"{SERVICE_LABEL}={s.key.name}{one}",
        adapters=_adapters(c, stable.revision, serves.adapters if serves is not None and stable.ever_ready else ()),
    )
    c = replace(c, figures=_figures(c, sample))
    return c.set_kv(
        active_dtype=stable.dtype,
        recommended_dtype=c.target.recommended or c.target.dtype,
        capacity_tokens=sample.capacity_tokens if sample is not None else kv.capacity_tokens,
        usage_percent=_steady(usage, kv.usage_percent),
    )


def _adapters(c: Context, revision: str, told: tuple[str, ...]) -> tuple[str, ...]:
    """Return the adapters that all pods report as loaded; until one reports, the adapters in the engines' arguments."""
    s = c.snapshot
    said = [s.adapters[pod.name] for pod in s.ready_pods(revision) if pod.name in s.adapters]
    if not said:
        return told
    everywhere = set(said[0]).intersection(*said[1:])
    names = [*told, *sorted(everywhere.difference(told))]
    return tuple(name for name in names if name in everywhere and len(name) <= _MOST_LETTERS)[:_MOST_ADAPTERS]


def _figures(c: Context, sample: Sample | None) -> Figures:
    """Return the measurements that only metrics show."""
    an_hour, a_million = _costs(c)
    return Figures(
        recent_tokens=sample.recent_tokens or 0 if sample is not None else None,
        retention=sample.retention if sample is not None else "",
        hits=_hits(c),
        cost_per_hour=an_hour,
        cost_per_million_tokens=a_million,
        latencies=tuple(
            Latency(one.objective.metric, one.objective.percentile, one.limit, one.seconds)
            for one in c.workload.objectives
        ),
    )


def _hits(c: Context) -> dict[str, float]:
    """Return the share of prompt tokens that each tier held; nothing if no prompt was looked up."""
    w, offload = c.workload, c.spec.kv_cache.offload
    if offload is None:
        return {}
    from_disk = w.disk_hits or 0.0
    shares = {"gpu": w.gpu_hits, "host": None if w.host_hits is None else w.host_hits - from_disk}
    if offload.disk is not None:
        shares["disk"] = w.disk_hits
    return {tier: min(1.0, max(0.0, share)) for tier, share in shares.items() if share is not None}


def _steady(percent: int | None, said: int | None) -> int | None:
    """Return a figure, or the last one if it hardly changed."""
    if percent is None or said is None:
        return percent
    return said if abs(percent - said) < USAGE_STEP_PERCENT else percent


def _kept(c: Context, kind: str, question: Question, before: str | None) -> str | None:
    """Return the name of an object, from before its creation until its deletion, so that a restarted operator finds
    it."""
    s = c.snapshot
    there = {name: one.owned for (its, name), one in s.objects.items() if its == kind}
    pool, route = c.spec.inference_pool is not None, c.spec.route is not None
    wanted = pool and s.server.inference_pools if kind == "InferencePool" else route and s.server.http_routes
    # An object with another owner is not ours.
    asked = wanted and there.get(s.key.name, True)
    kept = s.unread(question) is not None and before is not None
    return s.key.name if asked or any(there.values()) or kept else None


def _costs(c: Context) -> tuple[float | None, float | None]:
    """Return the cost per hour of all GPUs (including a canary's), and the cost per million tokens in the last
    window."""
    each, w = c.snapshot.gpu_hour_micros, c.workload
    if each is None:
        return None, None
    pods = sum(view.replicas * view.nodes for view in c.snapshot.deployments.values())
    cost = pods * c.spec.engine.tensor_parallel_size * each / 1e6
    tokens = 3600 * (w.requests_per_second or 0.0) * (w.mean_generation or 0.0) * w.pods
    return cost, 1e6 * cost / tokens if tokens >= 1 else None


def _counted(c: Context, serving: tuple[str, ...]) -> int:
    """Return the replicas for /scale: the requested ones, serving or on trial.

    A trial must not change this number, so its additional pod, or its temporarily empty place, does not count.
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
    """Write the policy's decision into the journal if it is new. A decision that starts a canary is written with the
    canary."""
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
    """Record the reason once if nothing changes although the load or the spec needs a step."""
    target, policy = c.target, c.policy
    if target.held is None or c.canary is not None:
        return c
    if c.holds(target.reason):
        return c
    if policy.hold is not None and target.held == policy.hold:
        return c.record(Action.HOLD, target.reason, policy.message, warning=True, options=policy.options)
    return c.record(Action.HOLD, target.reason, target.held, warning=True)
