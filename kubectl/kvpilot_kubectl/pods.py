"""Find engine pods that do not answer, and the last warnings of kubelet and scheduler about them. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from kvpilot_kubectl.fields import Json, at, event_time, items, text, whole

SHOWN = 5
"""Largest number of pods whose Events are read. Other pods of a service usually have the same warnings."""
_WARNINGS = 3
_BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning about a pod: its newest Event with this text, or the reason of its first waiting container."""

    pod: str
    node: str
    reason: str
    message: str
    time: datetime | None = None
    count: int = 1


def unready(pods: Iterable[Json]) -> tuple[Json, ...]:
    """Return the pods whose engines do not answer, sorted by name, without pods that have ended or are terminating."""
    there = (one for one in pods if text(one, "status", "phase") not in ("Failed", "Succeeded"))
    found = [one for one in there if not _answers(one) and not text(one, "metadata", "deletionTimestamp")]
    return tuple(sorted(found, key=lambda one: text(one, "metadata", "name")))


def _answers(pod: Json) -> bool:
    """Return True if the engine answers. A canary answers before it is Ready."""
    told = [(text(one, "type"), text(one, "status")) for one in items(pod, "status", "conditions")]
    return ("ContainersReady", "True") in told or ("Ready", "True") in told


def warned(pod: Json, events: Iterable[Json]) -> tuple[Warned, ...]:
    """Return the warnings about a pod, newest first. Leave out Events of an earlier pod with the same name."""
    name, node, uid = text(pod, "metadata", "name"), text(pod, "spec", "nodeName"), text(pod, "metadata", "uid")
    newest: dict[tuple[str, str], Warned] = {}
    for one in events:
        if text(one, "type") != "Warning" or text(one, "involvedObject", "uid") != uid:
            continue
        found = Warned(
            name, node, text(one, "reason"), text(one, "message"), event_time(one),
            whole(one, "count") or 1,
        )  # fmt: skip
        before = newest.get((found.reason, found.message))
        if before is None or (before.time or _BEGINNING) < (found.time or _BEGINNING):
            newest[found.reason, found.message] = found
    told = sorted(newest.values(), key=lambda one: one.time or _BEGINNING, reverse=True)[:_WARNINGS]
    return tuple(told) or (Warned(name, node, *_waits(pod)),)


def _waits(pod: Json) -> tuple[str, str]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in items(pod, "status", kind):
            waiting = at(one, "state", "waiting")
            if reason := text(waiting, "reason"):
                return reason, text(waiting, "message")
    return text(pod, "status", "phase"), ""
