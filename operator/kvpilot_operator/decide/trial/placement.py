"""Which objects must exist? Deployments by revision, Services, the disruption budget, the share in the user's route.

A trial never asks for more than one pod beyond the service's replicas (none, where the canary replaces one), counted
over all Deployments at every moment: room is taken only when it is observed to be free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide import baseline
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.questions import Questions
from kvpilot_operator.decide.target import Target, render
from kvpilot_operator.decide.trial import traffic
from kvpilot_operator.decide.trial.exchange import exchange, side
from kvpilot_operator.decide.trial.route import weighted
from kvpilot_operator.render.names import canary_service, deployment_name
from kvpilot_operator.render.objects import deployment, disruption_budget, route_rules, service
from kvpilot_operator.render.startup import startup_budget_seconds
from kvpilot_operator.state.decision import Manifest, Objects
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary, Stable, Status

_Placed = tuple[Sequence[Manifest], Sequence[tuple[str, str, str]]]
"""What is to be applied, and (apiVersion, kind, name) of what must not be there."""

_NOTHING: _Placed = ((), ())


def place(ask: Questions, draft: Draft, s: Snapshot, spec: Spec, target: Target, replicas: int) -> Objects:
    """The objects of the decided status, in the order in which they go out.

    First what serves (its engines, Service, budget), then what is on trial with its share of the traffic: nothing that
    befalls a trial's writes keeps the others from being mended. Last the engines that give way. Where Deployments
    cannot be rendered, those that are there are still scaled.
    """
    status = draft.status
    wanted = ask.ask(Question.ENGINES, lambda: _replicas(draft, s, spec, replicas), _as_they_are(status, s, replicas))
    none: dict[str, Manifest] = {}
    engines = ask.ask(Question.TEMPLATES, lambda: _engines(draft, s, spec, target, wanted), none)
    fewer = {name for name, count in wanted.items() if count < side(s, name).replicas}
    serving = {*traffic.serving(s, status), status.stable.revision if status.stable is not None else ""}
    shrinking = [manifest for name, manifest in engines.items() if name in fewer]
    growing = {name: manifest for name, manifest in engines.items() if name not in fewer}
    kept = [manifest for name, manifest in growing.items() if name in serving]
    tried = [manifest for name, manifest in growing.items() if name not in serving]
    own, absent = ask.ask(Question.TRAFFIC, lambda: _traffic(status, s, spec, replicas, wanted), _NOTHING)
    lent, unlent = ask.ask(Question.SHARE, lambda: _share(status, s, spec, replicas), _NOTHING)
    scale = {name: count for name, count in wanted.items() if name not in engines}
    return Objects((*kept, *own, *tried, *lent, *shrinking), scale, frozenset(wanted), (*absent, *unlent))


def traffic_revision(status: Status, s: Snapshot, replicas: int) -> str:
    """The revision that the service's figures are told of: the one that the Service is to select, or the stable one."""
    if s.spec is None or status.stable is None:
        raise LookupError("a service without a stable revision has no traffic")
    return traffic.selected(s, s.spec, status, replicas) or status.stable.revision


def _traffic(status: Status, s: Snapshot, spec: Spec, replicas: int, wanted: Mapping[str, int]) -> _Placed:
    """The Service and its disruption budget."""
    selected = traffic.selected(s, spec, status, replicas)
    own: list[Manifest] = [service(s.key, s.uid, s.key.name, selected)]
    absent: list[tuple[str, str, str]] = []
    if s.server.pod_disruption_budgets:
        covered = sum(count for name, count in wanted.items() if selected in (traffic.EVERY_REVISION, name))
        if _lets_go(spec, replicas, covered):
            own.append(
                disruption_budget(
                    s.key, s.uid, selected, spec.disruption.min_available,
                    evict_unready=s.server.unhealthy_pod_eviction,
                )
            )  # fmt: skip
        else:
            absent.append(("policy/v1", "PodDisruptionBudget", s.key.name))
    return own, absent


def _share(status: Status, s: Snapshot, spec: Spec, replicas: int) -> _Placed:
    """The canary's Service and its share in the user's route."""
    selected = traffic.selected(s, spec, status, replicas)
    apply: list[Manifest] = []
    absent: list[tuple[str, str, str]] = []
    lent = canary_service(s.key.name)
    share = traffic.share(s, spec, status.canary, replicas)
    if status.canary is not None and status.canary.stage == "Shifting" and status.canary.traffic_mode == "HTTPRoute":
        apply.append(service(s.key, s.uid, lent, status.canary.revision))
    elif _lingers(status, s, spec):
        # Whoever still sends to it gets what everybody gets.
        apply.append(service(s.key, s.uid, lent, selected))
    elif spec.canary.route_ref is not None and s.unread(Question.ROUTE) is None:
        absent.append(("v1", "Service", lent))
    if s.route is not None:
        rules = weighted(s.route.rules, s.key.namespace, s.key.name, lent, share)
        if rules != tuple(s.route.rules):
            apply.append(route_rules(s.key, s.route, rules))
    return apply, absent


def _lets_go(spec: Spec, replicas: int, covered: int) -> bool:
    """Whether a budget over so many pods lets one leave at some time: one that never does keeps a node for ever.

    A replica that a canary has replaced comes back when the trial ends. Only a paused trial may never end.
    """
    waits = min(replicas, covered) if spec.rollout.paused else replicas
    return waits > spec.disruption.min_available


def _lingers(status: Status, s: Snapshot, spec: Spec) -> bool:
    """Whether a gateway may still send to the canary's Service: for preStopSeconds after it has left the route."""
    read = s.unread(Question.ROUTE) is None
    if (read and traffic.routed(s)) or (status.canary is not None and status.canary.traffic_mode == "HTTPRoute"):
        return True
    last = status.last_canary
    if last is None or last.traffic_mode != "HTTPRoute":
        return False
    # Without routeRef the route cannot be read: it may name the canary's Service for ever.
    return spec.canary.route_ref is None or s.now < last.stage_time + timedelta(seconds=spec.drain.pre_stop_seconds)


def _as_they_are(status: Status, s: Snapshot, replicas: int) -> Mapping[str, int]:
    """What stands there now; without a trial the stable side still gets what it is asked for."""
    there = {name: view.replicas for name, view in s.deployments.items()}
    stable = status.stable
    if stable is None:
        return there
    kept = there.get(stable.revision, replicas) if status.canary is not None else replicas
    return {**there, stable.revision: kept}


def _replicas(draft: Draft, s: Snapshot, spec: Spec, replicas: int) -> Mapping[str, int]:
    stable, canary = draft.status.stable, draft.status.canary
    if stable is None:
        return {}
    if canary is None:
        return {stable.revision: replicas}
    if canary.stage == "RollingBack":
        return _back(s, spec, stable, canary, replicas)
    total, floor = traffic.total(spec, canary, replicas), traffic.floor(spec, replicas)
    ours, theirs = side(s, canary.revision), side(s, stable.revision)
    others = sum(
        view.replicas for name, view in s.deployments.items() if name not in (stable.revision, canary.revision)
    )
    reference = baseline.reference_revision(draft, s, spec) if s.traffic == stable.revision else None
    waits = [name for name in (reference, canary.revision) if name is not None and _is_refused(s, name)]
    if waits:
        # No place is given up for engines that the API server will not have; it is asked for them again and again.
        return {
            **dict.fromkeys(waits, 0),
            canary.revision: ours.replicas,
            stable.revision: min(replicas, total - others),
        }
    if reference is not None:
        # One place, taken in turns: first by the 16-bit replica whose answers the canary is measured against.
        one, left = exchange(
            side(s, reference), 1, theirs, total=total, floor=floor, both_serve=False, others=ours.replicas
        )
        return {reference: one, canary.revision: 0, stable.revision: left}
    if _asked_for_the_baseline(draft, s, spec, stable, canary):
        floor = max(floor, 1)
    goal, both = _goal(s, spec, canary, replicas), canary.stage in ("Shifting", "Promoting")
    if spec.rollout.paused:
        goal = min(goal, ours.replicas)
    grown, left = exchange(ours, goal, theirs, total=total, floor=floor, both_serve=both, others=others)
    return {canary.revision: grown, stable.revision: min(left, replicas)}


def _is_refused(s: Snapshot, revision: str) -> bool:
    """Whether a revision has no Deployment because the API server will not have it."""
    name = deployment_name(s.key.name, revision)
    return revision not in s.deployments and s.rejection("Deployment", name) is not None


def _asked_for_the_baseline(draft: Draft, s: Snapshot, spec: Spec, stable: Stable, canary: Canary) -> bool:
    """Whether the stable side must not leave whole before its answers are kept."""
    is_reference = stable.revision == render(s, spec, spec.kv_cache.baseline)[0]
    return baseline.on_trial(canary) and is_reference and baseline.known(draft, s) is None


def _goal(s: Snapshot, spec: Spec, canary: Canary, replicas: int) -> int:
    if canary.stage == "Promoting":
        return replicas
    if canary.stage == "Shifting":
        steps = traffic.plan(s, spec, canary, replicas).steps
        reached = [p.replicas for p in steps if p.index <= (canary.step or 0)]
        return reached[-1] if reached else max(1, side(s, canary.revision).replicas)
    return 1


def _back(s: Snapshot, spec: Spec, stable: Stable, canary: Canary, replicas: int) -> Mapping[str, int]:
    """Traffic first: the canary keeps its pods until nothing is sent to them, or gives them back one by one."""
    total, floor = traffic.total(spec, canary, replicas), traffic.floor(spec, replicas)
    ours, theirs = side(s, canary.revision), side(s, stable.revision)
    if s.traffic == stable.revision and not traffic.routed(s):
        # The room of pods that go now is taken in the next pass.
        return {stable.revision: min(replicas, max(theirs.replicas, total - ours.replicas))}
    grown, left = exchange(theirs, replicas, ours, total=total, floor=floor, both_serve=True)
    if traffic.selected(s, spec, Status(stable=stable, canary=canary), replicas) == stable.revision:
        left = ours.replicas
        grown = min(replicas, max(theirs.replicas, total - left))
    return {canary.revision: min(left, ours.replicas), stable.revision: grown}


def _engines(draft: Draft, s: Snapshot, spec: Spec, target: Target, wanted: Mapping[str, int]) -> dict[str, Manifest]:
    """Deployments of the wanted revisions that the current spec still renders; older ones can only be scaled."""
    dtypes = {target.dtype, spec.kv_cache.baseline}
    dtypes |= {part.dtype for part in (draft.status.stable, draft.status.canary) if part is not None}
    rendered = dict(render(s, spec, dtype) for dtype in sorted(dtypes))
    seconds = startup_budget_seconds(spec)
    return {
        name: deployment(s.key, s.uid, rendered[name], wanted[name], seconds) for name in wanted if name in rendered
    }
