"""Decide which revisions get requests: the Service's selector (docs/decisions/0008) and the shares in the HTTPRoute."""

from datetime import timedelta

from kvpilot_operator.api.names import canary_service
from kvpilot_operator.api.words import Reason, Stage, TrafficMode
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.decide.traffic_plan import floor
from kvpilot_operator.render import route
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import Snapshot

EVERY_REVISION = ""
"""Value for a Service that selects pods of every revision: its selector names no revision."""
_NO_FAULT = (Reason.SUPERSEDED, Reason.PROGRESS_DEADLINE_EXCEEDED)
"""Reasons to roll back a canary that has no fault. It keeps traffic while stable pods replace its pods one by one. A
faulty canary loses all traffic as soon as one stable pod is ready."""
# Gateways and endpoint pickers take seconds to notice a new ready pod. Meanwhile the old pods still get the requests,
# so keep them for this long.
SETTLE_SECONDS = 10


def selected(c: Context) -> str:
    """Return the revision that the Service selects, or EVERY_REVISION."""
    s, stable, canary, paused = c.snapshot, c.stable, c.canary, c.spec.rollout.paused
    if stable is None:
        raise LookupError("a service without a stable revision has no traffic")
    if canary is None:
        return stable.revision
    ours, theirs = len(s.ready_pods(canary.revision)), len(s.ready_pods(stable.revision))
    promoting, both = canary.stage == Stage.PROMOTING, False
    if promoting:
        if s.traffic == canary.revision or (ours >= c.replicas and not paused and not settles(c)):
            return canary.revision
        both = s.traffic != stable.revision or (ours > 0 and not paused)
    elif canary.stage == Stage.SHIFTING:
        both = canary.traffic_mode == TrafficMode.REPLICA_RATIO
    elif canary.stage == Stage.ROLLING_BACK and s.traffic != stable.revision:
        enough = floor(c.spec, c.replicas) if canary.reason in _NO_FAULT else 1
        both = theirs < min(max(enough, 1), c.replicas)
    if both and orphans(c):
        return canary.revision if promoting and ours > theirs else stable.revision
    return EVERY_REVISION if both else stable.revision


def settles(c: Context) -> bool:
    """Return True if the newest pods of a promotion became ready (`stage_time`) less than SETTLE_SECONDS ago."""
    canary, time = c.canary, timedelta(seconds=SETTLE_SECONDS)
    # Use abs(), so that a clock that was set back does not prolong the wait.
    return canary is not None and canary.stage == Stage.PROMOTING and abs(c.now - canary.stage_time) < time


def has_passed(draft: Draft, revision: str) -> bool:
    """Return True for a canary that has passed its probes, so that it may get requests."""
    canary = draft.canary
    return canary is not None and canary.revision == revision and canary.stage in (Stage.SHIFTING, Stage.PROMOTING)


def orphans(c: Context) -> tuple[str, ...]:
    """Return the names of workloads and pods of revisions other than stable and canary. They must get no requests."""
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
    """Return True if the route names the canary's backend. Assume so if the route could not be read."""
    return s.unread(Question.ROUTE) is not None or route.carries(s.route, route.backend(s).canary)


def canary_percent(c: Context) -> tuple[int, int]:
    """Return the percentages of requests that the route sends to the canary, and that it copies to the canary.

    Both percentages are those of the last step so far for which enough canary replicas are ready.
    """
    canary = c.canary
    if canary is None or canary.stage != Stage.SHIFTING or canary.traffic_mode != TrafficMode.HTTP_ROUTE:
        return 0, 0
    kinds = ("Service",) if c.spec.inference_pool is None else ("Service", "InferencePool")
    lent = [c.snapshot.objects.get((kind, canary_service(c.snapshot.key.name))) for kind in kinds]
    if canary.step is None or any(one is None or not one.owned or one.selects != canary.revision for one in lent):
        return 0, 0  # Send nothing: a backend of this name may belong to others, who would get our users' requests.
    ready = len(c.snapshot.ready_pods(canary.revision))
    reached = [p for p in c.plan.steps if p.index <= canary.step and p.replicas <= ready]
    return (reached[-1].weight_percent, reached[-1].mirrored_percent) if reached else (0, 0)
