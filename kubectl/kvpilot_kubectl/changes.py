"""Changes of a service's spec: spec.rollout.paused and spec.rollout.denySeconds."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvpilot_kubectl.api import Cluster
from kvpilot_kubectl.errors import ToolError
from kvpilot_kubectl.fields import stamp
from kvpilot_kubectl.service import Service, read


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a change, as text and as a JSON document."""

    said: str
    document: dict[str, Any]


def pause(cluster: Cluster, name: str, *, paused: bool) -> Done:
    """Set spec.rollout.paused. Write nothing if it has that value already."""
    before = read(cluster.service(name))
    if before.paused != paused:
        after = read(cluster.patch(name, {"rollout": {"paused": paused}}))
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
        _kept(read(cluster.patch(name, {"rollout": {"denySeconds": 0}})).deny_seconds == 0, "spec.rollout.denySeconds")
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
