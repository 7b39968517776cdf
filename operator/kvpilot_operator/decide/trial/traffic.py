"""Who gets requests? The steps that can be set, the Service's selector, and the share in the user's HTTPRoute.

The selector names one revision, except while two serve together (steps by replica ratio, and the exchange of replicas
in a promotion): then it names none and admits both. It never does while other pods of the service stand around: a
borrowed 16-bit replica gets no request. See docs/decisions/0008.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.decide.trial import route
from kvpilot_operator.render.names import HTTP_ROUTE_API, canary_service
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary, Status, TrafficMode

EVERY_REVISION = ""
"""What a Service selects whose selector names no revision."""

# A replica ratio may be above the step it stands for by one point: 1 of 3 replicas will do for 33%.
_ROUNDING_PERCENT = 1
# The longest name of a Service (RFC 1123 label).
_MAX_NAME = 63


@dataclass(frozen=True, slots=True)
class Step:
    """One of spec.canary.steps that can be set: `index` is its place there."""

    index: int
    weight_percent: int
    """What the canary gets: of requests by HTTPRoute, of replicas by replica ratio."""
    hold_seconds: int
    replicas: int
    """Of the canary."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a canary gets live traffic; `held` says why it cannot get any yet."""

    mode: TrafficMode
    steps: tuple[Step, ...] = ()
    message: str = ""
    held: str | None = None


def floor(spec: Spec, replicas: int) -> int:
    """Pods that must go on answering: minAvailable, as far as there are that many."""
    return min(spec.disruption.min_available, replicas)


def one_can_leave(spec: Spec, replicas: int) -> bool:
    """Whether minAvailable lets one of so many replicas give way."""
    return replicas - 1 >= floor(spec, replicas)


def total(spec: Spec, canary: Canary | None, replicas: int) -> int:
    """Pods that a trial may ask for: one more than the service has, unless the canary took the place of one.

    Where minAvailable was raised meanwhile so that none may give way any more, sides can only change places with one
    pod more: it waits for a GPU if it must, but the trial can still end.
    """
    replaces = canary is not None and canary.replaces_one and one_can_leave(spec, replicas)
    return replicas if replaces else replicas + 1


def plan(s: Snapshot, spec: Spec, canary: Canary | None, replicas: int) -> Plan:
    """The steps for this many replicas; a trial that is under way keeps the mode that it began with."""
    if not spec.canary.steps:
        return Plan("ProbeOnly", message="no spec.canary.steps are given: its probes alone decide")
    pods = total(spec, canary, replicas)
    most = pods - max(floor(spec, replicas), 1)
    if replicas == 0 or most < 1:
        return Plan("ProbeOnly", message=f"{replicas} replicas leave no two sides to share traffic: its probes decide")
    begun = canary.traffic_mode if canary is not None else None
    if begun == "ProbeOnly":
        return Plan("ProbeOnly", message="its probes alone decide")
    if begun == "HTTPRoute" or (begun is None and spec.canary.route_ref is not None):
        return _by_route(s, spec, pods, most)
    return _by_ratio(spec, pods, most)


def selected(s: Snapshot, spec: Spec, status: Status, replicas: int) -> str:
    """The revision that the Service is to select, or EVERY_REVISION."""
    stable, canary = status.stable, status.canary
    if stable is None:
        raise LookupError("a service without a stable revision has no traffic")
    if canary is None:
        return stable.revision
    wanted = _wanted(s, spec, canary, stable.revision, replicas)
    if wanted == EVERY_REVISION and strangers(s, status):
        ready = {name: len(s.ready_pods(name)) for name in (stable.revision, canary.revision)}
        promoting = canary.stage == "Promoting" and ready[canary.revision] > ready[stable.revision]
        return canary.revision if promoting else stable.revision
    return wanted


def strangers(s: Snapshot, status: Status) -> tuple[str, ...]:
    """Deployments and pods of the service that are of neither side: none of them may get requests."""
    sides = {part.revision for part in (status.stable, status.canary) if part is not None}
    pods = [p.name for p in s.pods if not p.terminating and p.revision not in sides]
    return (*sorted(set(s.deployments) - sides), *pods)


def serving(s: Snapshot, status: Status) -> tuple[str, ...]:
    """The revisions that get requests now, as far as is observed."""
    stable, canary = status.stable, status.canary
    sides = tuple(part.revision for part in (stable, canary) if part is not None)
    if canary is None or stable is None:
        return (s.traffic,) if s.traffic else sides
    if not s.traffic:
        return sides if canary.stage not in ("Starting", "Probing") else (stable.revision,)
    shared = routed(s) and canary.stage == "Shifting"
    return sides if shared else (s.traffic,)


def routed(s: Snapshot) -> bool:
    """Whether the route has the canary's Service among its backends, or may have: it could not be read."""
    return s.unread(Question.ROUTE) is not None or route.carries(s.route, s.key.namespace, canary_service(s.key.name))


def share(s: Snapshot, spec: Spec, canary: Canary | None, replicas: int) -> int:
    """The canary's percentage in the route now: of the furthest step that it has the ready replicas for."""
    if canary is None or canary.stage != "Shifting" or canary.traffic_mode != "HTTPRoute" or canary.step is None:
        return 0
    lent = s.objects.get(("Service", canary_service(s.key.name)))
    if lent is None or not lent.owned or lent.selects != canary.revision:
        return 0  # Whoever has that name would get our users' requests.
    ready = len(s.ready_pods(canary.revision))
    reached = [p for p in plan(s, spec, canary, replicas).steps if p.index <= canary.step and p.replicas <= ready]
    return reached[-1].weight_percent if reached else 0


def _wanted(s: Snapshot, spec: Spec, canary: Canary, stable: str, replicas: int) -> str:
    unmoved = s.traffic == stable
    if canary.stage == "Shifting":
        return EVERY_REVISION if canary.traffic_mode == "ReplicaRatio" else stable
    if canary.stage == "Promoting":
        ready = len(s.ready_pods(canary.revision))
        if s.traffic == canary.revision or (ready >= replicas and not spec.rollout.paused):
            return canary.revision
        waits = unmoved and (ready == 0 or spec.rollout.paused)
        return stable if waits else EVERY_REVISION
    if canary.stage == "RollingBack" and not unmoved:
        needed = max(floor(spec, replicas), 1) if replicas else 0
        return stable if len(s.ready_pods(stable)) >= needed else EVERY_REVISION
    return stable


def _by_route(s: Snapshot, spec: Spec, pods: int, most: int) -> Plan:
    name = spec.canary.route_ref
    if name is None:
        return Plan(
            "HTTPRoute", held="spec.canary.routeRef was removed during the trial; put it back, or end the trial"
        )
    if len(canary_service(s.key.name)) > _MAX_NAME:
        return Plan(
            "HTTPRoute",
            held=f"spec.canary.routeRef: the Service {canary_service(s.key.name)} would have a name of more than "
            f"{_MAX_NAME} characters; give the service a shorter one, or remove routeRef",
        )
    if not s.server.http_routes:
        return Plan(
            "HTTPRoute",
            held=f"spec.canary.routeRef: this API server does not serve {HTTP_ROUTE_API}; install the Gateway API and "
            "restart the operator, or remove routeRef",
        )
    unread = s.unread(Question.ROUTE)
    if unread is not None:
        return Plan("HTTPRoute", held=f"spec.canary.routeRef: HTTPRoute {name} could not be read: {unread}")
    fault = route.fault(s.route, name, s.key.namespace, s.key.name)
    if fault is not None:
        return Plan("HTTPRoute", held=fault)
    steps = tuple(
        Step(i, step.weight_percent, step.hold_seconds, min(most, max(1, round(step.weight_percent * pods / 100))))
        for i, step in enumerate(spec.canary.steps)
        if step.weight_percent < 100
    )
    return Plan("HTTPRoute", steps, f"by weights of HTTPRoute {name}")


def _by_ratio(spec: Spec, pods: int, most: int) -> Plan:
    steps: list[Step] = []
    skipped: list[str] = []
    for i, step in enumerate(spec.canary.steps):
        replicas = min(most, (step.weight_percent + _ROUNDING_PERCENT) * pods // 100)
        # A share of 100% is the promotion itself: there would be nothing left to compare with.
        if replicas < 1 or step.weight_percent == 100 or (steps and replicas <= steps[-1].replicas):
            skipped.append(f"{step.weight_percent}%")
        else:
            steps.append(Step(i, round(100 * replicas / pods), step.hold_seconds, replicas))
    left_out = f"; steps that {pods} pods cannot show, {', '.join(skipped)}, are left out" if skipped else ""
    if not steps:
        return Plan(
            "ProbeOnly",
            message=f"one of {pods} pods is {100 / pods:.0f}% of the traffic, more than spec.canary.steps ask for "
            "(give routeRef for smaller shares): its probes alone decide",
        )
    return Plan("ReplicaRatio", tuple(steps), f"by the number of replicas behind the Service{left_out}")
