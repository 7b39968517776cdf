"""What do tools wait for? The conditions `Reconciling` and `Stalled`, as kstatus (sigs.k8s.io/cli-utils) defines them.

`Reconciling` is True while the service is on its way to what its newest spec asks for, `Stalled` where it gets no
further without a change by a person. Never are both True; where both are False, the newest spec is acted on and nothing
is under way. docs/conditions.md has the states.
"""

from __future__ import annotations

from kvpilot_operator.api.words import ConditionType, Reason
from kvpilot_operator.decide.conditions.measured import Line
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.diagnosis import engine_failure
from kvpilot_operator.decide.objects import storage, traffic
from kvpilot_operator.decide.steps.ladder import ACCURACY_REASONS
from kvpilot_operator.state.decision import Cause

_BOTH = (ConditionType.RECONCILING, ConditionType.STALLED)
_SETTLED = Cause(Reason.SETTLED, "the spec is acted on, and nothing is under way")


def lines(kind: ConditionType | None = None, cause: Cause = _SETTLED) -> dict[str, Line]:
    """Both conditions: that of this type is True for this cause and the other one False; without a type both are."""
    other = Cause(kind, f"see {kind}") if kind else cause
    return {one: Line("True", *cause) if one == kind else Line("False", *other) for one in _BOTH}


def standing(c: Context, *, progressing: Line, serving: Line, objects: Line, route: Line | None) -> dict[str, Line]:
    """Both conditions, with the reason and message of the condition that causes them."""
    stalled = _stalled(c, progressing, objects, route)
    if stalled is not None:
        return lines(ConditionType.STALLED, stalled)
    under_way = _under_way(c, progressing, serving, route)
    return lines() if under_way is None else lines(ConditionType.RECONCILING, under_way)


def _stalled(c: Context, progressing: Line, objects: Line, route: Line | None) -> Cause | None:
    """What a person has to change. A trial goes on to its end by itself (it has a deadline), unless it is paused."""
    if c.canary is not None:
        return _cause(progressing) if progressing.status == "False" else None
    if objects.status == "False":
        return _cause(objects)
    if c.snapshot.probes.fault is not None:
        return Cause(Reason.PROBE_SET_INVALID, c.snapshot.probes.fault)
    if not _reached(c) and progressing.status == "False" and progressing.reason != Reason.SETTLED:
        return _cause(progressing)
    if route is not None and route.status == "False":
        return _cause(route)
    return engine_failure(c.snapshot.pods_of(c.stable.revision)) if c.stable is not None else None


def _under_way(c: Context, progressing: Line, serving: Line, route: Line | None) -> Cause | None:
    s, stable, replicas = c.snapshot, c.stable, c.replicas
    if c.canary is not None:
        return _cause(progressing)
    if stable is None:
        return _cause(serving)
    if not _reached(c):
        if progressing.status == "True":
            return _cause(progressing)
        return Cause(Reason.SPEC_NOT_REACHED, f"the newest spec is not served yet: {c.target.message or c.target.held}")
    if replicas and serving.status != "True":
        return _cause(serving)
    ready = len(s.ready_pods(stable.revision))
    if ready != replicas:
        why = storage.held_up(c, s.pods_of(stable.revision))
        return Cause(Reason.SCALING, f"{ready} of {replicas} replicas answer{f': {why.message}' if why else ''}")
    if s.traffic != stable.revision:
        return Cause(Reason.TRAFFIC_MOVING, f"the Service does not select revision {stable.revision} alone yet")
    if route is not None and route.status == "Unknown":
        return _cause(route)
    leaving = traffic.orphans(c)
    return (
        Cause(Reason.LEAVING, f"{len(leaving)} of other revisions are still there: {leaving[0]}") if leaving else None
    )


def _reached(c: Context) -> bool:
    """Whether the revision that serves is what the newest spec asks for, and not denied for its answers.

    A step to another dtype that mode Auto would like to take, and cannot, is no part of the spec.
    """
    stable = c.stable
    if stable is None:
        return False
    standing = c.denial(stable.dtype)
    harmful = standing is not None and standing.reason in ACCURACY_REASONS
    return c.asked == stable.revision and not harmful


def _cause(line: Line) -> Cause:
    return Cause(line.reason, line.message)
