"""Decide replicas and manifests of a service's workloads, Services, disruption budget, pools and route.

A trial requests at most one pod more than the service has replicas, and only once earlier pods are observed as gone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import msgspec

from kvpilot_operator.api.names import (
    INFERENCE_POOL_API,
    REVISION_LABEL,
    SPEC_ANNOTATION,
    canary_service,
    weights_claim,
)
from kvpilot_operator.api.words import Stage, TrafficMode
from kvpilot_operator.decide.accuracy import baseline
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.decide.rejections import of_workload
from kvpilot_operator.decide.traffic_plan import counts, floor, rolling_step, total
from kvpilot_operator.render import objects as render
from kvpilot_operator.render.route import backend, weighted
from kvpilot_operator.render.workloads import LEADER_WORKER_SET
from kvpilot_operator.state.decision import Manifest, Objects, Reference
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Stable


def in_order(c: Context) -> Context:
    """Put the objects in the order of their writes.

    Serving objects (claim, engines, Service, budget) come first, so that a failed write for the canary does not block
    them. Workloads that lose replicas come last.
    """
    claim: Reference = ("v1", "PersistentVolumeClaim", weights_claim(c.snapshot.key.name))
    named = (claim,) if c.spec.cache.weights is not None else ()
    if c.stable is None:
        # Without a revision, place only the claim for the weights, and delete nothing.
        there = frozenset(c.snapshot.deployments)
        placed = Objects(c.storage, {}, there, (), named) if c.storage else None
        return replace(c, objects=placed)
    serving = {*traffic.serving_revisions(c), c.stable.revision}
    fewer = {name for name, count in c.wanted.items() if count < counts(c.snapshot, name).replicas}
    shrinking = [manifest for name, manifest in c.engines.items() if name in fewer]
    kept = [manifest for name, manifest in c.engines.items() if name in serving - fewer]
    tried = [manifest for name, manifest in c.engines.items() if name not in serving | fewer]
    return _placed(c, (*kept, *c.own, *tried, *c.shared, *shrinking), named)


def in_any_order(c: Context) -> Context:
    """List all objects in any order, if there is a stable revision, because `in_order` raised an error."""
    return c if c.stable is None else _placed(c, (*c.engines.values(), *c.own, *c.shared), ())


def _placed(c: Context, apply: tuple[Manifest, ...], named: tuple[Reference, ...]) -> Context:
    scale = {name: count for name, count in c.wanted.items() if name not in c.engines}
    without = removed(c.snapshot, apply)
    return replace(c, objects=Objects((*c.storage, *apply), scale, frozenset(c.wanted), c.absent, named, without))


def removed(s: Snapshot, apply: Sequence[Manifest]) -> dict[tuple[str, str], Manifest]:
    """Return merge patches for fields that these manifests no longer have.

    Server-side apply keeps such a field if another field manager has set it, too. A merge patch removes it.
    """
    patches = {(made["kind"], made["metadata"]["name"]): _removed(s, made) for made in apply}
    return {what: patch for what, patch in patches.items() if patch is not None}


def _removed(s: Snapshot, made: Manifest) -> Manifest | None:
    seen = s.objects.get((made["kind"], made["metadata"]["name"]))
    if made["kind"] == "InferencePool" and seen is not None and seen.picker:
        return {"endpointPickerRef": None} if "endpointPickerRef" not in made["spec"] else None
    there = s.deployments.get(made["metadata"].get("labels", {}).get(REVISION_LABEL, ""))
    if made["kind"] != LEADER_WORKER_SET.name or there is None or not there.has_gate:
        return None
    # The plain create that claimed the LeaderWorkerSet's name has set the gate. Server-side apply alone would keep it,
    # so remove it by a patch.
    gated = "readinessGates" in LEADER_WORKER_SET.pod_template(made)["spec"]
    return None if gated else {"leaderWorkerTemplate": {"leaderTemplate": {"spec": {"readinessGates": None}}}}


def replicas(c: Context) -> Context:
    """Decide how many replicas each revision's workload gets."""
    if c.stable is None:
        return c
    if c.canary is None:
        return replace(c, wanted={c.stable.revision: c.replicas})
    wanted, there = _replicas_on_trial(c, c.stable), c.snapshot.deployments.get(c.canary.revision)
    if c.canary.stage == Stage.STARTING and there is not None and not there.has_gate:
        # A revision that has served before has no readiness gate. Delete its workload, and start it again with a gate.
        wanted = {name: count for name, count in wanted.items() if name != c.canary.revision}
    return replace(c, wanted=wanted)


def as_they_are(c: Context) -> Context:
    """Keep the replicas of every workload, because `replicas` raised an error. Scale only a stable revision without a
    trial, or without a workload: to the number that was decided last."""
    there = {name: view.replicas for name, view in c.snapshot.deployments.items()}
    if c.stable is not None and (c.canary is None or c.stable.revision not in there):
        there[c.stable.revision] = c.replicas
    return replace(c, wanted=there)


def deployments(c: Context) -> Context:
    """Render the workloads of the wanted revisions. Older revisions, which the spec cannot render, are only scaled."""
    if c.stable is None:
        return c
    s, engine, there = c.snapshot, c.spec.engine, c.snapshot.deployments
    dtypes = {c.target.dtype, c.stable.dtype, c.spec.kv_cache.baseline}
    if c.canary is not None:
        dtypes.add(c.canary.dtype)
    rendered = dict(c.render(dtype) for dtype in sorted(dtypes))
    engines, seconds, nodes = {}, engine.startup_timeout_seconds, engine.nodes
    note = msgspec.json.encode({"generation": s.generation, "spec": c.spec.as_written()}).decode()
    for name, count in c.wanted.items():
        if name in rendered:
            # Only a canary starts with a readiness gate. Leave the gates of other workloads as they are, because a
            # changed template would restart their pods.
            gate = there[name].has_gate if name in there else name != c.stable.revision
            # A multi-node group loses its gate only by a restart. Restart it after its probes, when it gets no requests
            # yet (decision 80).
            gate = gate and not (nodes > 1 and traffic.has_passed(c, name))
            made = render.workload(s.key, s.uid, rendered[name], count, seconds, nodes=nodes, has_gate=gate)
            # `kubectl kvpilot export` reads this annotation. An invalid spec is not rendered, so the last valid spec
            # stays in it.
            made["metadata"]["annotations"] = {SPEC_ANNOTATION: note}
            engines[name] = made
    return replace(c, engines=engines)


def own_service(c: Context) -> Context:
    """Render the Service, the InferencePool that selects the same pods, and the PodDisruptionBudget."""
    if c.stable is None:
        return c
    s, selected = c.snapshot, traffic.selected(c)
    own: list[Manifest] = [render.service(s.key, s.uid, s.key.name, selected)]
    if c.spec.inference_pool is not None and s.server.inference_pools:
        picker = c.spec.inference_pool.endpoint_picker_ref
        own.append(render.inference_pool(s.key, s.uid, s.key.name, selected, picker))
    names = [name for name in c.wanted if selected in (traffic.EVERY_REVISION, name)]
    # A replica that a canary has replaced counts as unavailable until the trial ends. It does not count during a pause,
    # because a paused trial may never end.
    away = 0 if c.spec.rollout.paused else max(0, c.replicas - sum(c.wanted[name] for name in names))
    most = max(0, c.spec.disruption.unavailable(c.replicas) - away)
    rendered = {name for name in names if name in c.engines or name not in s.deployments}
    nodes = [c.spec.engine.nodes if name in rendered else s.deployments[name].nodes for name in names]
    budget = render.disruption_budget(s.key, s.uid, selected, most, groups=min(nodes, default=1) > 1)
    return replace(c, own=(*own, budget))


def share_traffic(c: Context) -> Context:
    """Render the canary's Service and InferencePool, and the user's HTTPRoute with the canary's share."""
    if c.stable is None:
        return c
    s, canary, lent = c.snapshot, c.canary, canary_service(c.snapshot.key.name)
    selected, percent = traffic.selected(c), traffic.canary_percent(c)
    apply: list[Manifest | None] = []
    absent: tuple[Reference, ...] = ()
    shifts = canary is not None and (canary.stage, canary.traffic_mode) == (Stage.SHIFTING, TrafficMode.HTTP_ROUTE)
    if canary is not None and shifts:
        selected = canary.revision
    # After the trial a gateway may still send requests to the canary's Service, so it then selects the stable revision.
    if shifts or _lingers(c):
        apply.append(render.service(s.key, s.uid, lent, selected))
    elif c.spec.canary.route_ref is not None and s.unread(Question.ROUTE) is None:
        absent = (("v1", "Service", lent),)
    apply += [_canary_pool(c, selected), _route(c, percent)]
    absent += _pools_left_over(c)
    return replace(c, shared=tuple(one for one in apply if one is not None), absent=absent)


def _canary_pool(c: Context, selected: str) -> Manifest | None:
    """Render the canary's InferencePool (decision 31). It exists before any trial: gateways need time to notice it."""
    s, asked, name = c.snapshot, c.spec.inference_pool, canary_service(c.snapshot.key.name)
    routed, there = c.spec.canary.route_ref is not None, s.objects.get(("InferencePool", name))
    if asked is None or not s.server.inference_pools or not (routed or there is not None):
        return None
    made = render.inference_pool(s.key, s.uid, name, selected, asked.canary_endpoint_picker_ref)
    unnamed = asked.endpoint_picker_ref is not None and asked.canary_endpoint_picker_ref is None
    if not routed and unnamed and there is not None and there.picker is not None:
        # The spec names no picker any more, but an earlier route may still use the pool, so keep its picker.
        return {**made, "spec": {**made["spec"], "endpointPickerRef": dict(there.picker)}}
    return made


def _pools_left_over(c: Context) -> tuple[Reference, ...]:
    """Return the InferencePools to delete if the spec asks for none. Keep a pool while the HTTPRoute names it."""
    s = c.snapshot
    if c.spec.inference_pool is not None:
        return ()
    pools = [name for kind, name in s.objects if kind == "InferencePool" and s.objects[kind, name].owned]
    named = canary_service(s.key.name) if traffic.routed(s) else None
    return tuple((INFERENCE_POOL_API, "InferencePool", name) for name in pools if name != named)


def _route(c: Context, percent: tuple[int, int]) -> Manifest | None:
    """Render the user's HTTPRoute with the canary's percentages, if they change its rules."""
    s = c.snapshot
    if s.route is None:
        return None
    shared = weighted(s.route.rules, backend(s), *percent)
    return render.route_rules(s.key, s.route, shared) if shared != s.route.rules else None


def _lingers(c: Context) -> bool:
    """Return True while a gateway may still use the canary's Service: until preStopSeconds after the trial."""
    s, canary, last = c.snapshot, c.canary, c.status.last_trial
    if s.unread(Question.ROUTE) is None and traffic.routed(s):
        return True
    if canary is not None and canary.traffic_mode == TrafficMode.HTTP_ROUTE:
        return True
    if last is None or last.traffic_mode != TrafficMode.HTTP_ROUTE:
        return False
    # kvpilot does not read a route that the spec no longer names, so the route may still use the canary's Service.
    left = last.time + timedelta(seconds=c.spec.drain.pre_stop_seconds)
    return c.spec.canary.route_ref is None or c.now < left


def _replicas_on_trial(c: Context, stable: Stable) -> Mapping[str, int]:
    s, canary = c.snapshot, in_flight(c)
    if canary.stage == Stage.ROLLING_BACK:
        return _back(c, stable)
    most, least = total(c.spec, canary.replaces_one, c.replicas), floor(c.spec, c.replicas)
    ours, theirs = counts(s, canary.revision), counts(s, stable.revision)
    sides = (stable.revision, canary.revision)
    others = sum(view.replicas for name, view in s.deployments.items() if name not in sides)
    reference = baseline.borrowed(c) if s.traffic == stable.revision else None
    waits = [
        name
        for name in (reference, canary.revision)
        if name is not None and name not in s.deployments and of_workload(s, name, s.rejections or ())
    ]
    if waits:
        # Keep all stable replicas while the API server refuses the canary's engines. The operator retries the write.
        kept = {canary.revision: ours.replicas, stable.revision: min(c.replicas, most - others)}
        return {**dict.fromkeys(waits, 0), **kept}
    if reference is not None:
        # A trial may add one pod. That is first the 16-bit replica that captures the baseline, and afterwards the
        # canary.
        one, left = rolling_step(
            counts(s, reference), 1, theirs, total=most, floor=least, both_serve=False, others=ours.replicas
        )
        return {reference: one, canary.revision: 0, stable.revision: left}
    if stable.revision == c.reference and baseline.on_trial(c) and baseline.known(c) is None:
        # Keep one stable replica until its answers are stored as the baseline.
        least = max(least, 1)
    goal, both = _goal(c), canary.stage in (Stage.SHIFTING, Stage.PROMOTING)
    if c.spec.rollout.paused:
        goal = min(goal, ours.replicas)
    grown, left = rolling_step(ours, goal, theirs, total=most, floor=least, both_serve=both, others=others)
    left = max(left, theirs.replicas) if traffic.settles(c) else left
    return {canary.revision: grown, stable.revision: min(left, c.replicas)}


def _goal(c: Context) -> int:
    canary = in_flight(c)
    if canary.stage == Stage.PROMOTING:
        return c.replicas
    if canary.stage == Stage.SHIFTING:
        reached = [p.replicas for p in c.plan.steps if p.index <= (canary.step or 0)]
        return reached[-1] if reached else max(1, counts(c.snapshot, canary.revision).replicas)
    return 1


def _back(c: Context, stable: Stable) -> Mapping[str, int]:
    """Return the replicas during a rollback.

    The canary keeps its pods until they get no requests. If the Service selects both revisions, stable pods replace
    them one by one.
    """
    s, canary, replicas = c.snapshot, in_flight(c), c.replicas
    most, least = total(c.spec, canary.replaces_one, replicas), floor(c.spec, replicas)
    ours, theirs = counts(s, canary.revision), counts(s, stable.revision)
    if s.traffic == stable.revision and not traffic.routed(s):
        # Leave out the canary, so that its pods are deleted. The next reconcile gives their places to stable pods.
        return {stable.revision: min(replicas, max(theirs.replicas, most - ours.replicas))}
    if traffic.selected(c) == stable.revision:
        grown = min(replicas, max(theirs.replicas, most - ours.replicas))
        return {canary.revision: ours.replicas, stable.revision: grown}
    grown, left = rolling_step(theirs, replicas, ours, total=most, floor=least, both_serve=True)
    return {canary.revision: min(left, ours.replicas), stable.revision: grown}
