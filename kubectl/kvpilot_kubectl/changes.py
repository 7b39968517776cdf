"""Change a service: set spec.rollout.paused, or write a request about one trial.

A request is the annotation kvpilot.io/canary. It names the trial, so the operator acts on it once.
"""

from datetime import datetime

from kvpilot_kubectl import service
from kvpilot_kubectl.api import Cluster
from kvpilot_kubectl.errors import ToolError
from kvpilot_kubectl.fields import Json, moment, stamp, text
from kvpilot_operator.api.names import CANARY_ANNOTATION
from kvpilot_operator.api.words import Reason, Stage, Verdict


def pause(cluster: Cluster, name: str, *, paused: bool) -> str:
    """Set spec.rollout.paused, and return a text that explains the effect. Write nothing if the field has the value."""
    before = cluster.service(name)
    if service.is_paused(before) != paused:
        after = cluster.patch(name, {"spec": {"rollout": {"paused": paused}}})
        if service.is_paused(after) != paused:
            # The server drops fields that its CRD does not know. It dropped this one, so its CRD is too old.
            raise ToolError(
                "the server dropped spec.rollout.paused, because its CRD is older than this tool: update the CRD "
                "(docs/install.md)"
            )
    word = "paused" if paused else "not paused"
    already = "" if service.is_paused(before) != paused else " already"
    meaning = (
        "no canary starts, and a running one is not promoted or rolled back; serving and scaling continue"
        if paused
        else "changes continue where they stopped"
    )
    return f"{service.name(before)} is {word}{already}: {meaning}"


_SKIPS = "hold times and the least number of requests are skipped"
_PROMOTED = {
    Stage.STARTING: f"the operator promotes it once its probes have passed; then {_SKIPS}",
    Stage.PROBING: f"the operator promotes it once its probes have passed; then {_SKIPS}",
    Stage.SHIFTING: f"the operator promotes it now, unless live traffic has shown it to be worse; {_SKIPS}",
}


def end(cluster: Cluster, name: str, *, deny: bool) -> str:
    """Ask the operator to end the canary, and to deny its dtype if `deny` is set."""
    before, canary = _in_flight(cluster, name)
    again = f"in an hour, after a change of the spec, or by `kubectl kvpilot retry {name}`"
    after = (
        f"{text(canary, 'dtype')} is denied; `retry` lifts that"
        if deny
        else f"nothing is denied; it may start again {again}"
    )
    return _ask(
        cluster, before, "deny" if deny else "abort", canary, f"the operator ends canary {_of(canary)}; {after}"
    )


def promote(cluster: Cluster, name: str) -> str:
    """Ask the operator to promote the canary without the rest of its traffic steps. Its probes must pass first."""
    before, canary = _in_flight(cluster, name)
    if service.is_paused(before):
        raise ToolError(
            f"{service.name(before)} is paused, so nothing is promoted: run `kubectl kvpilot resume {name}` first"
        )
    reached = service.stage(canary)
    if reached not in _PROMOTED:
        raise ToolError(f"{service.name(before)}: canary {_of(canary)} is {reached} already: there is nothing to skip")
    return _ask(cluster, before, "promote", canary, f"canary {_of(canary)}: {_PROMOTED[Stage(reached)]}")


def retry(cluster: Cluster, name: str, now: datetime) -> str:
    """Ask the operator to lift the wait after the last trial, and the denial of its dtype."""
    before = cluster.service(name)
    last, canary = service.last_trial(before), service.canary(before)
    denied = {text(one, "dtype") for one in service.standing(before, now)}
    if canary is not None:
        raise ToolError(
            f"{service.name(before)}: canary {_of(canary)} is in flight: wait for its end, or abort it first"
        )
    waits = text(last, "verdict") != Verdict.PASSED and text(last, "reason") != Reason.SUPERSEDED
    if last is None or not (waits or text(last, "dtype") in denied):
        others = ", ".join(sorted(denied))
        hint = f"; spec.rollout.denySeconds: 0 lifts all denials ({others})" if others else ""
        return f"{service.name(before)}: the last trial left nothing to lift{hint}"
    return _ask(cluster, before, "retry", last, f"the operator lets {_of(last)} be tried again at once")


def _in_flight(cluster: Cluster, name: str) -> tuple[Json, Json]:
    before = cluster.service(name)
    canary = service.canary(before)
    if canary is None:
        raise ToolError(
            f"{service.name(before)} has no canary: `kubectl kvpilot why {name}` tells how the last trial ended"
        )
    if service.stage(canary) == Stage.ROLLING_BACK:
        raise ToolError(f"{service.name(before)}: canary {_of(canary)} is being rolled back already: wait for its end")
    return before, canary


def _ask(cluster: Cluster, obj: Json, verb: str, trial: Json, said: str) -> str:
    times = (moment(trial, field) for field in ("startedTime", "stageTime", "time"))
    request = f"{verb}@{text(trial, 'revision')}/{stamp(next(filter(None, times), None))}"
    cluster.patch(text(obj, "metadata", "name"), {"metadata": {"annotations": {CANARY_ANNOTATION: request}}})
    return f"{service.name(obj)}: {said}"


def _of(trial: Json) -> str:
    return f"{text(trial, 'revision')} ({text(trial, 'dtype')})"
