"""Change a service: set spec.rollout.paused, or write a request about one trial.

A request is the annotation kvpilot.io/canary. It names the trial, so the operator acts on it once.
"""

from datetime import datetime

from kvpilot_kubectl.api import Cluster
from kvpilot_kubectl.errors import ToolError
from kvpilot_kubectl.fields import stamp
from kvpilot_kubectl.service import Service, Trial, read
from kvpilot_operator.api.names import CANARY_ANNOTATION
from kvpilot_operator.api.words import Reason, Stage, Verdict


def pause(cluster: Cluster, name: str, *, paused: bool) -> str:
    """Set spec.rollout.paused, and return a text that explains the effect. Write nothing if the value is the same."""
    before = read(cluster.service(name))
    if before.paused != paused:
        after = read(cluster.patch(name, {"spec": {"rollout": {"paused": paused}}}))
        if after.paused != paused:
            # The server drops fields that its CRD does not know. It dropped this one, so its CRD is too old.
            raise ToolError(
                "the server dropped spec.rollout.paused, because its CRD is older than this tool: update the CRD "
                "(docs/install.md)"
            )
    word = "paused" if paused else "not paused"
    already = "" if before.paused != paused else " already"
    meaning = (
        "no canary starts, and a running one is not promoted or rolled back; serving and scaling continue"
        if paused
        else "changes continue where they stopped"
    )
    return f"{_name(before)} is {word}{already}: {meaning}"


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
        f"{canary.dtype} is denied; `retry` lifts that" if deny else f"nothing is denied; it may start again {again}"
    )
    return _ask(
        cluster, before, "deny" if deny else "abort", canary, f"the operator ends canary {_of(canary)}; {after}"
    )


def promote(cluster: Cluster, name: str) -> str:
    """Ask the operator to promote the canary without the rest of its traffic steps. Its probes must pass first."""
    before, canary = _in_flight(cluster, name)
    if before.paused:
        raise ToolError(f"{_name(before)} is paused, so nothing is promoted: run `kubectl kvpilot resume {name}` first")
    if canary.stage not in _PROMOTED:
        raise ToolError(f"{_name(before)}: canary {_of(canary)} is {canary.stage} already: there is nothing to skip")
    return _ask(cluster, before, "promote", canary, f"canary {_of(canary)}: {_PROMOTED[Stage(canary.stage)]}")


def retry(cluster: Cluster, name: str, now: datetime) -> str:
    """Ask the operator to lift the wait after the last trial, and the denial of its dtype."""
    before = read(cluster.service(name))
    last = before.last_trial
    if before.canary is not None:
        raise ToolError(
            f"{_name(before)}: canary {_of(before.canary)} is in flight: wait for its end, or abort it first"
        )
    denied = last is not None and any(one.dtype == last.dtype for one in before.standing(now))
    waits = last is not None and last.verdict != Verdict.PASSED and last.reason != Reason.SUPERSEDED
    if last is None or not (denied or waits):
        others = ", ".join(sorted({one.dtype for one in before.standing(now)}))
        hint = f"; spec.rollout.denySeconds: 0 lifts all denials ({others})" if others else ""
        return f"{_name(before)}: the last trial left nothing to lift{hint}"
    return _ask(cluster, before, "retry", last, f"the operator lets {_of(last)} be tried again at once")


def _in_flight(cluster: Cluster, name: str) -> tuple[Service, Trial]:
    before = read(cluster.service(name))
    if before.canary is None:
        raise ToolError(f"{_name(before)} has no canary: `kubectl kvpilot why {name}` tells how the last trial ended")
    if before.canary.stage == Stage.ROLLING_BACK:
        raise ToolError(f"{_name(before)}: canary {_of(before.canary)} is being rolled back already: wait for its end")
    return before, before.canary


def _ask(cluster: Cluster, service: Service, verb: str, trial: Trial, said: str) -> str:
    request = f"{verb}@{trial.revision}/{stamp(trial.started or trial.since)}"
    cluster.patch(service.name, {"metadata": {"annotations": {CANARY_ANNOTATION: request}}})
    return f"{_name(service)}: {said}"


def _of(trial: Trial) -> str:
    return f"{trial.revision} ({trial.dtype})"


def _name(service: Service) -> str:
    return f"{service.namespace}/{service.name}"
