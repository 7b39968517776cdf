"""What a person tells a service, each by a field of its spec: spec.rollout.paused, and spec.rollout.denySeconds."""

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
    """What was changed, in words and for programs."""

    said: str
    document: dict[str, Any]


def pause(cluster: Cluster, name: str, *, paused: bool) -> Done:
    """Set spec.rollout.paused; nothing is written where it says so already."""
    before = read(cluster.service(name))
    if before.paused != paused:
        after = read(cluster.patch(name, {"rollout": {"paused": paused}}))
        _kept(after.paused == paused, "spec.rollout.paused")
    word = "paused" if paused else "not paused"
    already = "" if before.paused != paused else " already"
    meaning = (
        "no canary is started, and a running one is neither promoted nor rolled back; serving and scaling go on"
        if paused
        else "changes go on where they stopped"
    )
    return Done(
        f"{_name(before)} is {word}{already}: {meaning}",
        {**_about(before), "paused": paused, "changed": before.paused != paused},
    )


def undeny(cluster: Cluster, name: str, dtype: str | None, now: datetime) -> Done:
    """Set spec.rollout.denySeconds to 0, while which no denial counts.

    Raises:
        ToolError: the dtype is not denied, or others are too: the API lifts all of them at once.
    """
    before = read(cluster.service(name))
    standing = before.standing(now)
    denied = sorted({one.dtype for one in standing})
    if dtype is not None:
        _only(before, dtype, denied)
    lifted = [f"{one.dtype} ({one.reason}, until {stamp(one.until) or 'no known time'})" for one in standing]
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
        return Done(f"{_name(before)}: spec.rollout.denySeconds is 0 already, so no denial counts", document)
    held = "\nthe service is paused: no canary starts before `kubectl kvpilot resume`" if before.paused else ""
    return Done(
        f"{_name(before)}: no longer denied: {', '.join(lifted)}\n"
        f"spec.rollout.denySeconds is 0 (was {before.deny_seconds}): while it is, no denial counts and none is made. "
        f"Set it back after the trial; the denial of a dtype that has passed is gone by then, any other counts again:\n"
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
            "lifted together: leave DTYPE out to lift all, or first take out of spec.kvCache.ladder what must stay"
        )


def _kept(there: bool, field: str) -> None:
    """A server whose CRD does not know a field drops it without a word."""
    if not there:
        raise ToolError(f"the server dropped {field}: its CRD is older than this tool; update it (docs/install.md)")


def _back(service: Service) -> str:
    patch = json.dumps({"spec": {"rollout": {"denySeconds": service.deny_seconds}}}, separators=(",", ":"))
    where = ["kubectl", "-n", service.namespace, "patch", "qllm", service.name, "--type", "merge", "-p", patch]
    return shlex.join(where)


def _about(service: Service) -> dict[str, Any]:
    return {"namespace": service.namespace, "name": service.name}


def _name(service: Service) -> str:
    return f"{service.namespace}/{service.name}"
