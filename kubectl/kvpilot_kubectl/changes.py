"""Changes of a service: spec.rollout.paused, spec.rollout.denySeconds, and requests about one trial.

A request is the annotation kvpilot.io/canary. It names the trial, so the operator acts on it once.
"""

import json
import shlex
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvpilot_kubectl.api import Cluster
from kvpilot_kubectl.errors import ToolError
from kvpilot_kubectl.fields import stamp
from kvpilot_kubectl.service import Service, Trial, read
from kvpilot_operator.api.names import CANARY_ANNOTATION
from kvpilot_operator.api.words import Reason, Stage, Verdict


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a change, as text and as a JSON document."""

    said: str
    document: dict[str, Any]


def pause(cluster: Cluster, name: str, *, paused: bool) -> Done:
    """Set spec.rollout.paused. Write nothing if it has that value already."""
    before = read(cluster.service(name))
    if before.paused != paused:
        after = read(cluster.patch(name, {"spec": {"rollout": {"paused": paused}}}))
        _kept(after.paused == paused, "spec.rollout.paused")
    word = "paused" if paused else "not paused"
    already = "" if before.paused != paused else " already"
    meaning = (
        "no canary starts, and a running one is not promoted or rolled back; serving and scaling continue"
        if paused
        else "changes continue where they stopped"
    )
    return Done(
        f"{_name(before)} is {word}{already}: {meaning}",
        {**_about(before), "paused": paused, "changed": before.paused != paused},
    )


def undeny(cluster: Cluster, name: str, dtype: str | None, now: datetime) -> Done:
    """Set spec.rollout.denySeconds to 0. No denial counts while it is 0.

    Raises:
        ToolError: `dtype` is not denied, or other dtypes are denied, too. The API can only lift all denials together.
    """
    before = read(cluster.service(name))
    standing = before.standing(now)
    denied = sorted({one.dtype for one in standing})
    if dtype is not None:
        _only(before, dtype, denied)
    lifted = [f"{one.dtype} ({one.reason}, until {stamp(one.until) or 'an unknown time'})" for one in standing]
    changed = bool(standing) and before.deny_seconds != 0
    if changed:
        after = read(cluster.patch(name, {"spec": {"rollout": {"denySeconds": 0}}}))
        _kept(after.deny_seconds == 0, "spec.rollout.denySeconds")
    document = {
        **_about(before),
        "lifted": denied if changed else [],
        "denySeconds": 0 if changed else before.deny_seconds,
        "denySecondsBefore": before.deny_seconds,
        "changed": changed,
    }
    if not standing:
        return Done(f"{_name(before)}: no dtype is denied", document)
    if not changed:
        return Done(f"{_name(before)}: spec.rollout.denySeconds is already 0, so no denial counts", document)
    held = "\nThe service is paused: no canary starts before `kubectl kvpilot resume`." if before.paused else ""
    return Done(
        f"{_name(before)}: no longer denied: {', '.join(lifted)}\n"
        f"spec.rollout.denySeconds is 0 (was {before.deny_seconds}). While it is 0, no denial counts and none is "
        f"added. Set it back after the trial. A dtype that passed is then no longer denied; the others are:\n"
        f"  {_back(before)}{held}",
        document,
    )


_SKIPS = "hold times and the least number of requests are skipped"
_PROMOTED = {
    Stage.STARTING: f"the operator promotes it once its probes have passed; then {_SKIPS}",
    Stage.PROBING: f"the operator promotes it once its probes have passed; then {_SKIPS}",
    Stage.SHIFTING: f"the operator promotes it now, unless live traffic has shown it to be worse; {_SKIPS}",
}


def end(cluster: Cluster, name: str, *, deny: bool) -> Done:
    """Ask the operator to end the canary, and to deny its dtype if `deny` is set."""
    before, canary = _in_flight(cluster, name)
    again = f"in an hour, after a change of the spec, or by `kubectl kvpilot retry {name}`"
    after = (
        f"{canary.dtype} is denied; `retry` lifts that" if deny else f"nothing is denied; it may start again {again}"
    )
    return _ask(
        cluster, before, "deny" if deny else "abort", canary, f"the operator ends canary {_of(canary)}; {after}"
    )


def promote(cluster: Cluster, name: str) -> Done:
    """Ask the operator to promote the canary without the rest of its traffic steps. Its probes must pass first."""
    before, canary = _in_flight(cluster, name)
    if before.paused:
        raise ToolError(f"{_name(before)} is paused, so nothing is promoted: run `kubectl kvpilot resume {name}` first")
    if canary.stage not in _PROMOTED:
        raise ToolError(f"{_name(before)}: canary {_of(canary)} is {canary.stage} already: there is nothing to skip")
    return _ask(cluster, before, "promote", canary, f"canary {_of(canary)}: {_PROMOTED[Stage(canary.stage)]}")


def retry(cluster: Cluster, name: str, now: datetime) -> Done:
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
        hint = f"; `kubectl kvpilot undeny` lifts denials ({others})" if others else ""
        return Done(f"{_name(before)}: the last trial left nothing to lift{hint}", {**_about(before), "request": None})
    return _ask(cluster, before, "retry", last, f"the operator lets {_of(last)} be tried again at once")


def _in_flight(cluster: Cluster, name: str) -> tuple[Service, Trial]:
    before = read(cluster.service(name))
    if before.canary is None:
        raise ToolError(f"{_name(before)} has no canary: `kubectl kvpilot why {name}` tells how the last trial ended")
    if before.canary.stage == Stage.ROLLING_BACK:
        raise ToolError(f"{_name(before)}: canary {_of(before.canary)} is being rolled back already: wait for its end")
    return before, before.canary


def _ask(cluster: Cluster, service: Service, verb: str, trial: Trial, said: str) -> Done:
    request = f"{verb}@{trial.revision}/{stamp(trial.started or trial.since)}"
    cluster.patch(service.name, {"metadata": {"annotations": {CANARY_ANNOTATION: request}}})
    return Done(f"{_name(service)}: {said}", {**_about(service), "request": request})


def _of(trial: Trial) -> str:
    return f"{trial.revision} ({trial.dtype})"


def _only(service: Service, dtype: str, denied: list[str]) -> None:
    if dtype not in denied:
        raise ToolError(f"{_name(service)}: {dtype} is not denied; denied: {', '.join(denied) or 'nothing'}")
    others = [one for one in denied if one != dtype]
    if others:
        raise ToolError(
            f"{_name(service)}: {', '.join(others)} {'is' if len(others) == 1 else 'are'} denied, too, and denials are "
            "lifted together. Leave DTYPE out to lift all, or first remove from spec.kvCache.ladder the dtypes that "
            "must not be tried"
        )


def _kept(there: bool, field: str) -> None:
    """Raise ToolError unless the field was stored (`there`). A server drops fields that its CRD does not know."""
    if not there:
        raise ToolError(
            f"the server dropped {field}, because its CRD is older than this tool: update the CRD (docs/install.md)"
        )


def _back(service: Service) -> str:
    patch = json.dumps({"spec": {"rollout": {"denySeconds": service.deny_seconds}}}, separators=(",", ":"))
    where = ["kubectl", "-n", service.namespace, "patch", "qllm", service.name, "--type", "merge", "-p", patch]
    return shlex.join(where)


def _about(service: Service) -> dict[str, Any]:
    return {"namespace": service.namespace, "name": service.name}


def _name(service: Service) -> str:
    return f"{service.namespace}/{service.name}"
