"""Plan a canary's live traffic: its steps, and how many pods may exist and must answer meanwhile."""

from dataclasses import dataclass

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import TrafficMode
from kvpilot_operator.render import route
from kvpilot_operator.state.snapshot import Snapshot

# The canary's share of replicas may exceed weightPercent by one point, so that 1 of 3 replicas serves a step of 33%.
_ROUNDING_PERCENT = 1


@dataclass(frozen=True, slots=True)
class TrafficStep:
    """A step of spec.canary.steps that the service has enough replicas for. `index` is its position in the spec."""

    index: int
    weight_percent: int
    """The canary's share: of requests in mode HTTPRoute, of replicas in mode ReplicaRatio."""
    hold_seconds: int
    replicas: int
    """Replicas of the canary."""
    mirrored_percent: int = 0
    """Percentage of requests copied to the canary in a step of 0%: as many as one stable replica gets."""


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """The plan by which a canary gets live traffic. `held` has the reason why it cannot get any yet."""

    mode: TrafficMode
    steps: tuple[TrafficStep, ...] = ()
    message: str = ""
    held: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """The replicas of one revision: how many its workload asks for, and how many are ready."""

    replicas: int
    ready: int


def counts(s: Snapshot, revision: str) -> Counts:
    """Return how many replicas of one revision are requested and how many are ready."""
    view = s.deployments.get(revision)
    return Counts(view.replicas if view is not None else 0, len(s.ready_pods(revision)))


def floor(spec: Spec, replicas: int) -> int:
    """Return how many pods must stay ready, by maxUnavailable. With policy WhenIdle, one may always be missing."""
    least = spec.disruption.least(replicas)
    return min(least, max(0, replicas - 1)) if spec.canary.capacity_policy == "WhenIdle" else least


def one_can_leave(spec: Spec, replicas: int) -> bool:
    """Return True if maxUnavailable, or `WhenIdle`, lets the operator remove one of `replicas` replicas."""
    return replicas - 1 >= floor(spec, replicas)


def total(spec: Spec, replaces_one: bool, replicas: int) -> int:
    """Return the most pods that a trial may request: one more than `replicas`, unless the canary replaces a replica.

    A canary that replaces a replica gets the additional pod, too, if maxUnavailable was lowered during the trial and no
    replica may be removed. Otherwise the trial could not end.
    """
    return replicas if replaces_one and one_can_leave(spec, replicas) else replicas + 1


def rolling_step(
    growing: Counts, goal: int, shrinking: Counts, *, total: int, floor: int, both_serve: bool, others: int = 0
) -> tuple[int, int]:
    """Return the next replicas of the growing and the shrinking revision, while pods are replaced one at a time.

    - The growing revision gets a pod once all its pods are ready and fewer than `total` pods are observed.
    - The shrinking revision loses a ready pod only if at least `floor` ready pods remain.
    - Pods that are not ready may always be removed.

    `goal` is the number of replicas for the growing revision, and `others` that of further revisions. If `both_serve`,
    ready pods of both revisions count towards `floor`, else only those of the shrinking one.
    """
    want = min(goal, max(growing.replicas, growing.ready + 1))
    room = total - shrinking.replicas - others
    grown = min(want, max(room, growing.replicas, 0))
    left = max(0, total - want - others)
    if left < shrinking.replicas:
        beside = min(growing.ready, grown) if both_serve else 0
        if min(shrinking.ready, left) + beside < min(floor, shrinking.ready + beside):
            left = min(shrinking.replicas, total)
    return grown, left


def traffic_plan(s: Snapshot, spec: Spec, begun: TrafficMode | None, replaces_one: bool, replicas: int) -> TrafficPlan:
    """Plan a canary's traffic steps for `replicas` replicas. A trial under way keeps its traffic mode (`begun`)."""
    if not spec.canary.steps:
        return _probe_only("no spec.canary.steps are given: its probes alone decide")
    pods = total(spec, replaces_one, replicas)
    most = pods - 1
    if replicas == 0 or most < 1:
        return _probe_only(f"with {replicas} replicas, two revisions cannot share traffic: the canary's probes decide")
    if begun == TrafficMode.PROBE_ONLY:
        return _probe_only("its probes alone decide")
    if begun == TrafficMode.HTTP_ROUTE or (begun is None and spec.canary.route_ref is not None):
        return _by_route(s, spec, pods, most)
    return _by_ratio(spec, pods, most)


def _probe_only(message: str) -> TrafficPlan:
    return TrafficPlan(TrafficMode.PROBE_ONLY, message=message)


def _by_route(s: Snapshot, spec: Spec, pods: int, most: int) -> TrafficPlan:
    ref, held = spec.canary.route_ref, route.route_fault(s, spec)
    if ref is None or held is not None:
        return TrafficPlan(TrafficMode.HTTP_ROUTE, held=held)
    steps = tuple(
        TrafficStep(
            i,
            one.weight_percent,
            one.hold_seconds,
            min(most, max(1, round(one.weight_percent * pods / 100))),
            0 if one.weight_percent else max(1, round(100 / (pods - 1))),
        )
        for i, one in enumerate(spec.canary.steps)
        if one.weight_percent < 100
    )
    return TrafficPlan(TrafficMode.HTTP_ROUTE, steps, f"by weights of HTTPRoute {ref.name}")


def _by_ratio(spec: Spec, pods: int, most: int) -> TrafficPlan:
    steps: list[TrafficStep] = []
    skipped: list[str] = []
    for i, step in enumerate(spec.canary.steps):
        replicas = min(most, (step.weight_percent + _ROUNDING_PERCENT) * pods // 100)
        # Skip a share of 100%: that is the promotion, and no stable pod would be left for the comparison. Skip a share
        # of 0%, too, because nothing mirrors requests without a route.
        if replicas < 1 or step.weight_percent in (0, 100) or (steps and replicas <= steps[-1].replicas):
            skipped.append(f"{step.weight_percent}%")
        else:
            steps.append(TrafficStep(i, round(100 * replicas / pods), step.hold_seconds, replicas))
    if not steps:
        return _probe_only(
            f"one of {pods} pods gets {100 / pods:.0f}% of the traffic, more than spec.canary.steps ask for (set "
            "routeRef for smaller shares): the canary's probes alone decide"
        )
    left_out = f"; skipped, because {pods} pods cannot give these shares: {', '.join(skipped)}" if skipped else ""
    text = f"by the number of replicas behind the Service{left_out}"
    return TrafficPlan(TrafficMode.REPLICA_RATIO, tuple(steps), text)
