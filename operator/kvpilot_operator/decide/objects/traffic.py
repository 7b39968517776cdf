"""The traffic of a service: the Service's selector, and the share in the HTTPRoute.

The selector normally names one revision. While two serve together (steps by replica ratio, rolling steps of a
promotion), it names none and so selects both. It always names one while other pods of the service exist, so that a
borrowed 16-bit replica gets no request. See docs/decisions/0008.
"""

from __future__ import annotations

from kvpilot_operator.api.names import canary_service
from kvpilot_operator.api.words import Stage, TrafficMode
from kvpilot_operator.decide.context import Context, Draft, in_flight
from kvpilot_operator.decide.traffic_plan import floor
from kvpilot_operator.render import route
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot

EVERY_REVISION = ""
"""The selected revision if the selector of a Service names none."""


def selected(c: Context) -> str:
    """Return the revision that the Service selects, or EVERY_REVISION."""
    stable, canary = c.stable, c.canary
    if stable is None:
        raise LookupError("a service without a stable revision has no traffic")
    if canary is None:
        return stable.revision
    wanted = _wanted(c, stable.revision)
    if wanted == EVERY_REVISION and orphans(c):
        ready = {name: len(c.snapshot.ready_pods(name)) for name in (stable.revision, canary.revision)}
        promoting = canary.stage == Stage.PROMOTING and ready[canary.revision] > ready[stable.revision]
        return canary.revision if promoting else stable.revision
    return wanted


def orphans(c: Context) -> tuple[str, ...]:
    """Return Deployments and pods that belong to neither side and so must not get requests."""
    pods = [p.name for p in c.snapshot.pods if not p.terminating and p.revision not in c.sides]
    return (*sorted(set(c.snapshot.deployments).difference(c.sides)), *pods)


def serving_revisions(draft: Draft) -> tuple[str, ...]:
    """Return the revisions that get requests now, according to the observed objects."""
    s, stable, canary = draft.snapshot, draft.stable, draft.canary
    if canary is None or stable is None:
        return (s.traffic,) if s.traffic else draft.sides
    if not s.traffic:
        return draft.sides if canary.stage not in (Stage.STARTING, Stage.PROBING) else (stable.revision,)
    shared = routed(s) and canary.stage == Stage.SHIFTING
    return draft.sides if shared else (s.traffic,)


def routed(s: Snapshot) -> bool:
    """Return True if the route names the canary's backend, or could not be read."""
    return s.unread(Question.ROUTE) is not None or route.carries(s.route, route.backend(s).canary)


def canary_percent(c: Context) -> int:
    """Return the canary's percentage in the route: the percentage of the furthest step with enough ready replicas."""
    canary = c.canary
    if canary is None or canary.stage != Stage.SHIFTING or canary.traffic_mode != TrafficMode.HTTP_ROUTE:
        return 0
    kinds = ("Service",) if c.spec.inference_pool is None else ("Service", "InferencePool")
    lent = [c.snapshot.objects.get((kind, canary_service(c.snapshot.key.name))) for kind in kinds]
    if canary.step is None or any(one is None or not one.owned or one.selects != canary.revision for one in lent):
        return 0  # Otherwise another object of that name would get our users' requests.
    ready = len(c.snapshot.ready_pods(canary.revision))
    reached = [p for p in c.plan.steps if p.index <= canary.step and p.replicas <= ready]
    return reached[-1].weight_percent if reached else 0


def _wanted(c: Context, stable: str) -> str:
    s, canary, paused = c.snapshot, in_flight(c), c.spec.rollout.paused
    unmoved = s.traffic == stable
    if canary.stage == Stage.SHIFTING:
        return EVERY_REVISION if canary.traffic_mode == TrafficMode.REPLICA_RATIO else stable
    if canary.stage == Stage.PROMOTING:
        ready = len(s.ready_pods(canary.revision))
        if s.traffic == canary.revision or (ready >= c.replicas and not paused):
            return canary.revision
        return stable if unmoved and (ready == 0 or paused) else EVERY_REVISION
    if canary.stage == Stage.ROLLING_BACK and not unmoved:
        needed = max(floor(c.spec, c.replicas), 1) if c.replicas else 0
        return stable if len(s.ready_pods(stable)) >= needed else EVERY_REVISION
    return stable
