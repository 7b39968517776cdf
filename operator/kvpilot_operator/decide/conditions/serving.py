"""The condition `Serving`: True while engines answer requests."""

from kvpilot_operator.api.words import Reason, Stage, TrafficMode
from kvpilot_operator.decide.conditions.measured import Line
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.diagnosis import engine_failure
from kvpilot_operator.decide.objects import storage, traffic
from kvpilot_operator.decide.rejections import finding, of_workload, rejected
from kvpilot_operator.state.status import Canary

_WAYS = {TrafficMode.HTTP_ROUTE: " by HTTPRoute", TrafficMode.REPLICA_RATIO: " by replica ratio"}


def serving(c: Context) -> Line:
    """Report whether pods are ready and kvpilot's Service selects them."""
    s, replicas, canary = c.snapshot, c.replicas, c.canary
    if c.stable is None:
        waits = storage.wait(c)
        return Line("False", *((Reason.ENGINES_STARTING, "nothing serves yet") if waits is None else waits.cause))
    revisions = traffic.serving_revisions(c)
    ready = sum(len(s.ready_pods(revision)) for revision in revisions)
    refused = s.rejection("Service", s.key.name)
    if ready and s.traffic is None and refused is not None:
        return Line("False", *finding([refused]))
    if ready and s.traffic is None:
        text = f"{ready} replicas answer, but kvpilot's Service {s.key.name} does not select them yet"
        return Line("False", Reason.TRAFFIC_MOVING, text)
    if ready:
        trial = f"; {canary.dtype} is on trial{share(canary)}" if canary is not None else ""
        there = s.deployments.get(c.stable.revision)
        # Name the image, because the spec does not show one that comes from the installation's defaults.
        image = f" with {there.image}" if s.engine_defaults and there is not None and there.image else ""
        return Line("True", Reason.SERVING, f"{c.stable.dtype} serves{image}{trial}")
    if replicas == 0:
        return Line("False", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    pods = [pod for revision in revisions for pod in s.pods_of(revision)]
    found = rejected(s)
    blocking = [one for one in found if (one.kind, one.name) == ("Service", s.key.name)]
    blocking += [one for revision in revisions for one in of_workload(s, revision, found)]
    why = engine_failure(pods) or storage.held_up(c, pods) or (finding(blocking) if blocking else None)
    if why is not None:
        return Line("False", *why)
    return Line("False", Reason.ENGINES_STARTING, f"0 of {replicas} replicas answer yet")


def share(canary: Canary) -> str:
    """Describe the canary's share of the traffic, and how it gets it, for a message; empty if it has no share."""
    if canary.stage not in (Stage.SHIFTING, Stage.PROMOTING) or canary.weight_percent is None:
        return ""
    way = _WAYS.get(canary.traffic_mode, "") if canary.traffic_mode is not None else ""
    return f", at {canary.weight_percent}% of the traffic{way}"
