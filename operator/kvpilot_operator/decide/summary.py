"""Write figures to the status, and new decisions of the policy to the journal."""

from dataclasses import replace
from typing import Any

from kvpilot_operator.api.names import REVISION_LABEL, SERVICE_LABEL, service_url
from kvpilot_operator.api.words import Action, WorkloadKind
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.load.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.decide.step_rules import was_pressured
from kvpilot_operator.state.decision import Figures
from kvpilot_operator.state.questions import Question

# Workloads of these kinds prove that the KV cache has room again.
_ENDED = (WorkloadKind.IDLE, WorkloadKind.PREFILL_BOUND, WorkloadKind.COMPUTE_BOUND, WorkloadKind.RELAXED)


def summarise(c: Context) -> Context:
    """Write the figures of the status, and post an event if memory pressure begins or ends."""
    kind, was = c.workload.kind, was_pressured(c)
    if kind == WorkloadKind.MEMORY_BOUND and not was:
        c = c.event("MemoryPressured", c.workload.message, warning=True)
    elif was and kind in _ENDED:
        c = c.event("MemoryRelaxed", c.workload.message)
    s, stable, kv = c.snapshot, c.stable, c.status.kv_cache
    if stable is None:
        return c
    names, serves = traffic.serving_revisions(c), s.deployments.get(stable.revision)
    sample = s.last_sample(traffic.selected(c) or stable.revision)
    usage, told = c.workload.usage_percent if c.workload.pods else None, kv.usage_percent
    steady = usage is not None and told is not None and abs(usage - told) < USAGE_STEP_PERCENT
    # While two revisions serve, an autoscaler must count the pods of both, so the selector then names no revision.
    one = f",{REVISION_LABEL}={names[0]}" if len(names) == 1 else ""
    c = c.set(
        observed_revision=c.asked,
        # Show no URL if the Service of this name has another owner: its requests would not reach this service.
        url=service_url(s.key.namespace, s.key.name) if s.traffic is not None else None,
        inference_pool=_inference_pool(c),
        replicas=_counted(c, names),
        ready_replicas=sum(len(s.ready_pods(name)) for name in names),
        selector=f"{SERVICE_LABEL}={s.key.name}{one}",
        adapters=serves.adapters if serves is not None and stable.ever_ready else (),
    )
    recent = sample.recent_tokens or 0 if sample is not None else None
    c = replace(c, figures=Figures(recent_tokens=recent, objectives=c.workload.objectives))
    return c.set_kv(
        active_dtype=stable.dtype,
        recommended_dtype=c.target.recommended or c.target.dtype,
        capacity_tokens=sample.capacity_tokens if sample is not None else kv.capacity_tokens,
        usage_percent=kv.usage_percent if steady else usage,
    )


def _inference_pool(c: Context) -> str | None:
    """Return the name of the InferencePool to write to the status, or None.

    Keep the name until the pool's deletion is observed, so that a restarted operator finds the pool.
    """
    s = c.snapshot
    there = {name: one.owned for (kind, name), one in s.objects.items() if kind == "InferencePool"}
    # Leave the name out if the existing pool has another owner.
    asked = c.spec.inference_pool is not None and s.server.inference_pools and there.get(s.key.name, True)
    kept = s.unread(Question.POOLS) is not None and c.before.inference_pool is not None
    return s.key.name if asked or any(there.values()) or kept else None


def _counted(c: Context, serving: tuple[str, ...]) -> int:
    """Return `status.replicas` for /scale: the requested replicas, without the additional pod of a trial."""
    there = c.snapshot.deployments
    if c.canary is None and c.before.canary is None:
        return sum(there[name].replicas for name in serving if name in there)
    return min(c.replicas, max(sum(view.replicas for view in there.values()), c.before.replicas or 0))


def explain(c: Context) -> Context:
    """Write the policy's decision into the journal if it is new and starts no canary. A canary writes its own entry."""
    if c.before.stable is None:
        return c if c.target.warning is None else c.event("PreflightWarning", c.target.warning, warning=True)
    policy, step, target = c.policy, c.policy.chosen, c.target
    if c.spec.kv_cache.mode == "Recommend":
        c = _recommend(c, c.before.stable.dtype)
    elif step.action in (Action.SCALE_OUT, Action.SCALE_IN):
        event = f"{step.action}{policy.reason}"
        c = c.record(step.action, policy.reason, policy.message, options=policy.options, event=event)
    if target.held is None or c.canary is not None:
        return c
    chosen = target.held == policy.hold
    return c.hold(target.reason, *((policy.message, policy.options) if chosen else (target.held,)))


def _recommend(c: Context, dtype: str) -> Context:
    policy, step, both = c.policy, c.policy.wanted or c.policy.chosen, (c.status, c.before)
    now, before = ((one.kv_cache.recommended_dtype, one.scaling.recommended_replicas) for one in both)
    if now == before or step.action == Action.STAY:
        return c
    text = f"recommended, not applied: {policy.message}"
    more: dict[str, Any] = {"from_dtype": dtype, "to_dtype": step.dtype, "options": policy.options}
    return c.record(Action.RECOMMEND, policy.reason, text, event="Recommended", **more)
