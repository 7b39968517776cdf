"""Audit log of writes to the API server, and a check that only the holder of a Lease has written."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

_WRITES = ["create", "update", "patch", "delete", "deletecollection"]
_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "RequestResponse",
            "verbs": _WRITES,
            "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}],
        },
        {"level": "Metadata", "verbs": _WRITES},
        {"level": "None"},
    ],
}


def flags(policy: Path, log: Path) -> list[str]:
    """Write an audit policy that logs only writes. Return the flags of the API server for it."""
    policy.write_text(json.dumps(_POLICY))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={log}"]


@dataclass(frozen=True)
class Write:
    """One write request, with the API server's times.

    Attributes:
        what: verb and path, e.g. "patch /apis/apps/v1/namespaces/a/deployments/b".
        lease: the Lease (NAMESPACE/NAME) that it changes, or None.
        status: the HTTP status of the answer.
        answer: the object in the answer, only for Leases.
    """

    user: str
    agent: str
    what: str
    lease: str | None
    received: datetime
    completed: datetime
    status: int
    answer: dict[str, Any]


def writes(log: Path) -> list[Write]:
    """Return all writes in the log by time of receipt. Ignore an incomplete last line."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    found = [_write(event) for event in map(json.loads, lines) if event["stage"] == "ResponseComplete"]
    return sorted(found, key=lambda write: write.received)


def _write(event: dict[str, Any]) -> Write:
    about = event.get("objectRef") or {}
    name = about.get("name") or (event.get("responseObject") or {}).get("metadata", {}).get("name", "")
    return Write(
        user=event["user"]["username"],
        agent=event.get("userAgent", ""),
        what=f"{event['verb']} {event['requestURI'].split('?')[0]}",
        lease=f"{about.get('namespace')}/{name}" if about.get("resource") == "leases" else None,
        received=_time(event["requestReceivedTimestamp"]),
        completed=_time(event["stageTimestamp"]),
        status=int(event["responseStatus"]["code"]),
        answer=event.get("responseObject") or {},
    )


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


@dataclass(frozen=True)
class Term:
    """A period in which one replica held the Lease.

    Attributes:
        claimed: time when the API server received this replica's claim.
        released: time when it received this replica's release; None if there was none.
        followed: time when it received the next replica's claim; None if there was none.
    """

    holder: str
    claimed: datetime
    released: datetime | None
    followed: datetime | None

    def covers(self, write: Write) -> bool:
        """Return True if the write began in this term, and ended before the next replica's claim."""
        return (
            self.claimed <= write.received
            and (self.released is None or write.received < self.released)
            and (self.followed is None or write.completed < self.followed)
        )


def terms(log: Sequence[Write], lease: str) -> list[Term]:
    """Return the terms of the Lease (NAMESPACE/NAME), in the order of its resource versions."""
    taken = [write for write in log if write.lease == lease and write.status < 300 and "spec" in write.answer]
    taken.sort(key=lambda write: int(write.answer["metadata"]["resourceVersion"]))
    changes: list[tuple[str, datetime]] = []
    for write in taken:
        holder = str(write.answer["spec"].get("holderIdentity") or "")
        if holder != (changes[-1][0] if changes else ""):
            changes.append((holder, write.received))
    found = []
    for number, (holder, time) in enumerate(changes):
        if holder:
            later = changes[number + 1 :]
            released = later[0][1] if later and not later[0][0] else None
            followed = next((time for name, time in later if name), None)
            found.append(Term(holder, time, released, followed))
    return found


def misplaced(log: Sequence[Write], lease: str, identity: Callable[[Write], str | None]) -> list[str]:
    """Describe each write by a replica that did not hold the Lease. `identity` returns a write's replica, or None."""
    held = terms(log, lease)
    faults = []
    for write in log:
        who = identity(write)
        if who is None or write.lease is not None:
            continue
        if not any(term.holder == who and term.covers(write) for term in held):
            faults.append(f"{write.received.time()} {who}: {write.what}: {write.status}")
    return faults
