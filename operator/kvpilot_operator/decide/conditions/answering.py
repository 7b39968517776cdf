"""Are requests answered? The conditions `Serving` and `Available`."""

from __future__ import annotations

from kvpilot_operator.api.words import Reason, Stage, TrafficMode
from kvpilot_operator.decide.conditions.measured import Line
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.diagnosis import engine_failure
from kvpilot_operator.decide.objects import storage, traffic
from kvpilot_operator.decide.rejections import finding, of_workload, rejected
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary

_WAYS = {TrafficMode.HTTP_ROUTE: " by HTTPRoute", TrafficMode.REPLICA_RATIO: " by replica ratio"}


def serving(c: Context, objects: Line) -> Line:
    """Whether engines answer, behind a Service of ours that selects them.

    Their endpoints follow from that and are not watched: each EndpointSlice is written again whenever a pod becomes
    ready or not, which the pods tell already.
    """
    s, replicas, canary = c.snapshot, c.replicas, c.canary
    if c.stable is None:
        waits = storage.wait(c)
        return Line("False", *(Cause(Reason.NO_REVISION, "nothing serves yet") if waits is None else waits.cause))
    revisions = traffic.serving(c)
    ready = _answering(c)
    if ready and s.traffic is None:
        return _unserved(s, ready)
    if ready:
        trial = f"; {canary.dtype} is on trial{share(canary)}" if canary is not None else ""
        return Line("True", Reason.SERVING, f"{c.stable.dtype} serves{trial}")
    if replicas == 0:
        return Line("False", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    pods = [pod for revision in revisions for pod in s.pods_of(revision)]
    found = rejected(s)
    blocking = [one for one in found if (one.kind, one.name) == ("Service", s.key.name)]
    blocking += [one for revision in revisions for one in of_workload(s, revision, found)]
    why = engine_failure(pods) or storage.held_up(c, pods) or (finding(blocking) if blocking else None)
    if why is not None:
        return Line("False", *why)
    if s.rejections is None and objects.status == "False":
        return objects
    return Line("False", Reason.ENGINES_STARTING, f"0 of {replicas} replicas answer yet")


def available(c: Context, answers: Line) -> Line:
    """Whether as many replicas answer as a Deployment of that size calls available: all but a quarter."""
    replicas, ready = c.replicas, _answering(c)
    if not replicas:
        return Line("True", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    if answers.status != "True":
        return answers
    least = replicas - replicas // 4
    if ready < least:
        return Line("False", Reason.TOO_FEW_REPLICAS, f"{ready} of {replicas} replicas answer, and {least} have to")
    return Line("True", Reason.ENGINES_READY, f"{ready} of {replicas} replicas answer")


def _answering(c: Context) -> int:
    """How many pods answer, of the revisions that have traffic."""
    return sum(len(c.snapshot.ready_pods(revision)) for revision in traffic.serving(c))


def _unserved(s: Snapshot, ready: int) -> Line:
    """Engines answer, and no Service of ours sends them anything."""
    refused = s.rejection("Service", s.key.name)
    if refused is not None:
        return Line("False", *finding([refused]))
    text = f"{ready} replicas answer, and no Service {s.key.name} of kvpilot's selects them: it is written now"
    return Line("False", Reason.NO_SERVICE, text)


def share(canary: Canary) -> str:
    """How much of the traffic the canary has, and how it gets it."""
    if canary.stage not in (Stage.SHIFTING, Stage.PROMOTING) or canary.weight_percent is None:
        return ""
    way = _WAYS.get(canary.traffic_mode, "") if canary.traffic_mode is not None else ""
    return f", at {canary.weight_percent}% of the traffic{way}"
