"""The objects of a service: workloads by revision, Services, the disruption budget, the route.

At every moment, a trial asks for at most one pod more than the service's replicas, over all workloads. If the canary
replaces a replica, it asks for no additional pod. A pod is added only after its place was observed to be free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from kvpilot_operator.api.names import HTTP_ROUTE_API, canary_service
from kvpilot_operator.api.words import Stage, TrafficMode
from kvpilot_operator.decide.accuracy import baseline
from kvpilot_operator.decide.context import Context, Placed, in_flight
from kvpilot_operator.decide.objects import pools, traffic
from kvpilot_operator.decide.rejections import of_workload
from kvpilot_operator.decide.traffic_plan import counts, floor, rolling_step, total
from kvpilot_operator.render.objects import (
    disruption_budget,
    http_route,
    named_by_pods,
    route_rules,
    service,
    workload,
)
from kvpilot_operator.render.route import backend, own_rules, weighted
from kvpilot_operator.state.decision import Manifest, Objects
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Stable


def in_order(c: Context) -> Context:
    """Put the objects of the decided status into the order in which they go out.

    The serving objects (claim, engines, Service, budget) come first, so that a failed write of the canary does not
    block them. The canary's objects and its share of the traffic follow. Engines that shrink come last. If Deployments
    cannot be rendered, existing ones are still scaled.
    """
    named = named_by_pods(c.snapshot.key.name, c.spec)
    if c.stable is None:
        # Without a revision, place only the claim and Job for the weights, and delete nothing.
        there = frozenset(c.snapshot.deployments)
        placed = Objects(c.storage.apply, {}, there, c.storage.absent, named) if any(c.storage) else None
        return replace(c, objects=placed)
    serving = {*traffic.serving_revisions(c), c.stable.revision}
    fewer = {name for name, count in c.wanted.items() if count < counts(c.snapshot, name).replicas}
    shrinking = [manifest for name, manifest in c.engines.items() if name in fewer]
    kept = [manifest for name, manifest in c.engines.items() if name in serving - fewer]
    tried = [manifest for name, manifest in c.engines.items() if name not in serving | fewer]
    return replace(c, objects=_objects(c, (*kept, *c.own.apply, *tried, *c.shared.apply, *shrinking), named))


def in_any_order(c: Context) -> Context:
    """Keep all objects of a serving service if their order could not be decided."""
    if c.stable is None:
        return c
    return replace(c, objects=_objects(c, (*c.engines.values(), *c.own.apply, *c.shared.apply), ()))


def _objects(c: Context, apply: tuple[Manifest, ...], named: tuple[tuple[str, str, str], ...]) -> Objects:
    return Objects(
        apply=(*c.storage.apply, *apply),
        scale={name: count for name, count in c.wanted.items() if name not in c.engines},
        keep=frozenset(c.wanted),
        absent=(*c.storage.absent, *c.own.absent, *c.shared.absent),
        named=named,
    )


def replicas(c: Context) -> Context:
    """Decide the replicas of each revision."""
    if c.stable is None:
        return c
    wanted = {c.stable.revision: c.replicas} if c.canary is None else _replicas_on_trial(c, c.stable)
    return replace(c, wanted=wanted)


def as_they_are(c: Context) -> Context:
    """Keep the present replicas. Without a trial, the stable revision still gets its target number."""
    there = {name: view.replicas for name, view in c.snapshot.deployments.items()}
    if c.stable is not None:
        kept = there.get(c.stable.revision, c.replicas) if c.canary is not None else c.replicas
        there[c.stable.revision] = kept
    return replace(c, wanted=there)


def deployments(c: Context) -> Context:
    """Render the workloads of the wanted revisions; the spec cannot render older ones, which are only scaled."""
    if c.stable is None:
        return c
    s, seconds, nodes = c.snapshot, c.spec.engine.startup_timeout_seconds, c.spec.engine.nodes
    dtypes = {c.target.dtype, c.stable.dtype}
    if c.canary is not None:
        dtypes.add(c.canary.dtype)
    rendered = dict([*(c.render(dtype) for dtype in sorted(dtypes)), c.render_reference()])
    return replace(
        c,
        engines={
            name: workload(s.key, s.uid, rendered[name], count, seconds, nodes=nodes, has_gate=_has_gate(s, name))
            for name, count in c.wanted.items()
            if name in rendered
        },
    )


def own_service(c: Context) -> Context:
    """Render the Service, the pool that selects the same pods, and the disruption budget."""
    if c.stable is None:
        return c
    s, selected, kept = c.snapshot, traffic.selected(c), c.spec.disruption.min_available
    own: list[Manifest] = [service(s.key, s.uid, s.key.name, selected)]
    pool = pools.own_pool(c, selected)
    if pool is not None:
        own.append(pool)
    covered = sum(count for name, count in c.wanted.items() if selected in (traffic.EVERY_REVISION, name))
    if not _lets_go(c, covered):
        return replace(c, own=Placed(tuple(own), (("policy/v1", "PodDisruptionBudget", s.key.name),)))
    workers = covered * (_nodes(c, selected) - 1)
    budget = disruption_budget(s.key, s.uid, selected, kept, workers=workers)
    return replace(c, own=Placed((*own, budget)))


def share_traffic(c: Context) -> Context:
    """Render the canary's Service and pool, and the route with its share: ours, or the user's."""
    if c.stable is None:
        return c
    s, canary, lent = c.snapshot, c.canary, canary_service(c.snapshot.key.name)
    selected, percent = traffic.selected(c), traffic.canary_percent(c)
    apply: list[Manifest] = []
    absent: tuple[tuple[str, str, str], ...] = ()
    shifting = canary is not None and canary.stage == Stage.SHIFTING
    if canary is not None and shifting and canary.traffic_mode == TrafficMode.HTTP_ROUTE:
        selected = canary.revision
        apply.append(service(s.key, s.uid, lent, selected))
    elif _lingers(c):
        # A gateway may still send requests to the canary's Service: they reach the stable revision.
        apply.append(service(s.key, s.uid, lent, selected))
    elif c.spec.route_of(s.key.name) is not None and s.unread(Question.ROUTE) is None:
        absent = (("v1", "Service", lent),)
    lent_pool = pools.canarys(c, selected)
    if lent_pool is not None:
        apply.append(lent_pool)
    absent += pools.left_over(c)
    route = _route(c, percent)
    if route is not None:
        apply.append(route)
    left = s.objects.get(("HTTPRoute", s.key.name))
    if c.spec.route is None and left is not None and left.owned:
        absent += ((HTTP_ROUTE_API, "HTTPRoute", s.key.name),)
    return replace(c, shared=Placed(tuple(apply), absent))


def _route(c: Context, percent: int) -> Manifest | None:
    """Render the route with this share: always for our own route, only on a change for a user's."""
    s, asked = c.snapshot, c.spec.route
    there = s.route.rules if s.route is not None else None
    # Leave our route unchanged while its backend is unknown.
    rules = there if asked is None else own_rules(s) or there
    if rules is None or (asked is not None and not s.server.http_routes):
        return None
    shared = weighted(rules, backend(s), percent)
    if asked is not None:
        return http_route(s.key, s.uid, asked, shared)
    return route_rules(s.key, s.route, shared) if s.route is not None and shared != tuple(rules) else None


def _nodes(c: Context, selected: str) -> int:
    """Return the pods per selected replica, or 1 if replicas differ."""
    spread, there = c.spec.engine.nodes, c.snapshot.deployments
    names = [name for name in c.wanted if selected in (traffic.EVERY_REVISION, name)]
    found = {spread if name in c.engines or name not in there else there[name].nodes for name in names}
    return found.pop() if len(found) == 1 else 1


def _has_gate(s: Snapshot, revision: str) -> bool:
    """Return True if a revision's pods have our readiness gate: adding it would restart them."""
    there = s.deployments.get(revision)
    return there is None or there.has_gate


def _lets_go(c: Context, covered: int) -> bool:
    """Return True if a budget over so many pods can let one leave. Otherwise it would block node drains for ever.

    A replica that a canary has replaced returns when the trial ends, so it counts unless the trial is paused.
    """
    waits = min(c.replicas, covered) if c.spec.rollout.paused else c.replicas
    return waits > c.spec.disruption.min_available


def _lingers(c: Context) -> bool:
    """Return True if a gateway may still send requests to the canary's Service: until preStopSeconds after the route
    dropped it."""
    s, canary, last = c.snapshot, c.canary, c.status.last_trial
    if s.unread(Question.ROUTE) is None and traffic.routed(s):
        return True
    if canary is not None and canary.traffic_mode == TrafficMode.HTTP_ROUTE:
        return True
    if last is None or last.traffic_mode != TrafficMode.HTTP_ROUTE:
        return False
    # A route that the spec no longer names is not read, and it may name the canary's Service for ever.
    left = last.time + timedelta(seconds=c.spec.drain.pre_stop_seconds)
    return c.spec.route_of(s.key.name) is None or c.now < left


def _replicas_on_trial(c: Context, stable: Stable) -> Mapping[str, int]:
    s, canary = c.snapshot, in_flight(c)
    if canary.stage == Stage.ROLLING_BACK:
        return _back(c, stable)
    most, least = total(c.spec, canary.replaces_one, c.replicas), floor(c.spec, c.replicas)
    ours, theirs = counts(s, canary.revision), counts(s, stable.revision)
    sides = (stable.revision, canary.revision)
    others = sum(view.replicas for name, view in s.deployments.items() if name not in sides)
    reference = baseline.borrowed(c) if s.traffic == stable.revision else None
    waits = [name for name in (reference, canary.revision) if name is not None and _is_refused(s, name)]
    if waits:
        # Keep all stable replicas while the API server refuses the canary's engines. The operator retries the write.
        kept = {canary.revision: ours.replicas, stable.revision: min(c.replicas, most - others)}
        return {**dict.fromkeys(waits, 0), **kept}
    if reference is not None:
        # The 16-bit replica for the reference answers, then the canary, use the same free place in turn.
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
    return {canary.revision: grown, stable.revision: min(left, c.replicas)}


def _is_refused(s: Snapshot, revision: str) -> bool:
    """Return True if a revision has no pods because the API server refuses its workload."""
    return revision not in s.deployments and bool(of_workload(s, revision, s.rejections or ()))


def _goal(c: Context) -> int:
    canary = in_flight(c)
    if canary.stage == Stage.PROMOTING:
        return c.replicas
    if canary.stage == Stage.SHIFTING:
        reached = [p.replicas for p in c.plan.steps if p.index <= (canary.step or 0)]
        return reached[-1] if reached else max(1, counts(c.snapshot, canary.revision).replicas)
    return 1


def _back(c: Context, stable: Stable) -> Mapping[str, int]:
    """Move traffic back first. The canary keeps its pods until they get no requests, or returns them one by one."""
    s, canary, replicas = c.snapshot, in_flight(c), c.replicas
    most, least = total(c.spec, canary.replaces_one, replicas), floor(c.spec, replicas)
    ours, theirs = counts(s, canary.revision), counts(s, stable.revision)
    if s.traffic == stable.revision and not traffic.routed(s):
        # The next reconcile uses the places that these pods free.
        return {stable.revision: min(replicas, max(theirs.replicas, most - ours.replicas))}
    if traffic.selected(c) == stable.revision:
        grown = min(replicas, max(theirs.replicas, most - ours.replicas))
        return {canary.revision: ours.replicas, stable.revision: grown}
    grown, left = rolling_step(theirs, replicas, ours, total=most, floor=least, both_serve=True)
    return {canary.revision: min(left, ours.replicas), stable.revision: grown}
