"""Whose turn it is: one replica's view of the Lease that replicas elect their leader by. Pure: it is told the time.

The times that stand in a Lease are for people. A replica believes its own steady clock alone: the holder counts from
the moment before it sent a renewal, everybody else from the moment after they saw the Lease change. The second is
always later than the first, so however wrong wall clocks are, nobody takes a Lease that its holder still counts on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvpilot_operator.cluster.objects import Object, Ref

API_VERSION = "coordination.k8s.io/v1"
KIND = "Lease"


@dataclass(frozen=True)
class Timing:
    """How long a Lease lasts, in seconds; the rest follows from it in the proportions that Kubernetes itself uses."""

    lease: int = 15

    @property
    def renew_deadline(self) -> float:
        """A leader that has not renewed for so long starts no further write."""
        return self.lease * 2 / 3

    @property
    def write_deadline(self) -> float:
        """All writes are over so long after the last renewal: one part in fifteen before others may take the Lease."""
        return self.lease * 14 / 15

    @property
    def retry(self) -> float:
        """Pause between two renewals."""
        return self.lease * 2 / 15

    @property
    def look(self) -> float:
        """Pause between two looks of a replica that stands by: what it sees late, it takes over late."""
        return self.lease / 15

    @property
    def request(self) -> float:
        """An attempt is given up after so long: two of them fit into the renew deadline."""
        return self.lease / 3


@dataclass(eq=False)
class Candidate:
    """What one replica knows of the Lease, and since when."""

    identity: str
    namespace: str
    name: str
    timing: Timing

    def __post_init__(self) -> None:
        self._found: Object | None = None
        self._changed: float | None = None
        self._renewed: float | None = None
        self.blind = False

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def ref(self) -> Ref:
        """The Lease."""
        return Ref(API_VERSION, KIND, self.namespace, self.name)

    @property
    def holder(self) -> str:
        """Who holds the Lease as far as is known; empty where nobody does."""
        return str(self._spec.get("holderIdentity") or "")

    def observe(self, found: Object | None, now: float) -> None:
        """Take in the Lease as it was just read, or that there is none."""
        before = None if self._found is None else self._spec
        self._found = found
        if self._changed is None or (None if found is None else self._spec) != before:
            self._changed = now

    def wait(self, now: float) -> float:
        """Seconds until the Lease may be claimed as far as is known; 0 for: now."""
        if self._changed is None:
            return self.timing.lease
        if self._found is None or self.holder == "" or (self.holder == self.identity and not self.blind):
            return 0.0
        promised = self._spec.get("leaseDurationSeconds")
        lasts = max(self.timing.lease, promised if isinstance(promised, int) else 0)
        return max(0.0, self._changed + lasts - now)

    def claim(self, wall: datetime, now: float) -> Object:
        """The Lease as it is to be written to claim or renew it; refused by the server if it changed meanwhile.

        A Lease that is missing was perhaps deleted under a leader who still counts on it. So whoever creates it (but
        that leader) is `blind`, and claims it once more when it has stood there for its whole time.
        """
        self.blind = self._found is None and self.left(now) <= 0
        time, spec = _micro_time(wall), self._spec
        ours = self.holder == self.identity
        return self._with(
            {
                **spec,
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self.timing.lease,
                "acquireTime": spec.get("acquireTime", time) if ours else time,
                "renewTime": time,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if ours or self._found is None else 1),
            }
        )

    def release(self, wall: datetime) -> Object:
        """The Lease as it is to be written to let it go: the next replica that looks may take it at once."""
        return self._with({**self._spec, "holderIdentity": "", "renewTime": _micro_time(wall)})

    def renewed(self, answer: Object, sent: float) -> None:
        """The server took a claim that was sent at `sent`."""
        self.observe(answer, sent)
        self._renewed = sent

    def left(self, now: float) -> float:
        """Seconds until the renew deadline, negative once it has passed."""
        return -math.inf if self._renewed is None else self._renewed + self.timing.renew_deadline - now

    def lost(self) -> bool:
        """True where somebody else holds the Lease, or nobody."""
        return self._found is not None and self.holder != self.identity

    @property
    def exists(self) -> bool:
        """True where there is a Lease to write over."""
        return self._found is not None

    @property
    def _spec(self) -> Mapping[str, Any]:
        return (self._found or {}).get("spec") or {}

    def _with(self, spec: Object) -> Object:
        """What others wrote beside the spec (labels, an owner) stays, and so does the version that was read."""
        found = self._found or {"metadata": {"namespace": self.namespace, "name": self.name}}
        return {**found, "apiVersion": API_VERSION, "kind": KIND, "spec": spec}


def _micro_time(wall: datetime) -> str:
    return wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
