"""One replica's view of the Lease for leader election. Pure: callers pass the time.

The times in a Lease are only for people. A replica trusts only its own steady clock. The holder measures the Lease's
duration from before it sends a renewal. Other replicas measure it from when they see the Lease change, which is always
later. So no replica takes a Lease while the holder relies on it, even if wall clocks are wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvpilot_operator.cluster.objects import Object, Ref

API_VERSION = "coordination.k8s.io/v1"
KIND = "Lease"


class Timing:
    """Times of an election in seconds, in the proportions that Kubernetes uses, for a Lease of `lease` seconds."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        self.renew_deadline = lease * 2 / 3
        """Time after a renewal within which a leader may start a write."""
        self.write_deadline = lease * 14 / 15
        """Time after a renewal at which all writes must have ended, 1/15 of `lease` before others may take over."""
        self.retry = lease * 2 / 15
        """Pause between two renewals."""
        self.look = lease / 15
        """Pause between two reads by a standby replica."""
        self.request = lease / 3
        """Longest duration of one attempt. Two attempts fit into the renew deadline."""


@dataclass(eq=False)
class Candidate:
    """One replica's knowledge of the Lease: its last state, and when that changed. Times are steady-clock seconds."""

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
        """The reference to the Lease."""
        return Ref(API_VERSION, KIND, self.namespace, self.name)

    @property
    def holder(self) -> str:
        """The last known holder of the Lease; empty if there is none."""
        return str(self._spec.get("holderIdentity") or "")

    def observe(self, found: Object | None, now: float) -> None:
        """Record the Lease as it was just read at `now`, or None if it does not exist."""
        before = None if self._found is None else self._spec
        self._found = found
        if self._changed is None or (None if found is None else self._spec) != before:
            self._changed = now

    def wait(self, now: float) -> float:
        """Return the seconds until this replica may claim the Lease, by its last known state. 0 means now."""
        if self._changed is None:
            return self.timing.lease
        if self._found is None or self.holder == "" or (self.holder == self.identity and not self.blind):
            return 0.0
        promised = self._spec.get("leaseDurationSeconds")
        lasts = max(self.timing.lease, promised if isinstance(promised, int) else 0)
        return max(0.0, self._changed + lasts - now)

    def claim(self, wall: datetime, now: float) -> Object:
        """Return the Lease to write, to claim or renew it. The server refuses the write if the Lease has changed since.

        If the Lease is missing, somebody may have deleted it while another replica still leads. So a replica that
        creates the Lease is `blind`, unless it already leads: a blind replica does not lead yet, but waits for the
        Lease's whole duration and then claims it again.
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
        """Return the Lease object without a holder, which the next replica may take at once."""
        return self._with({**self._spec, "holderIdentity": "", "renewTime": _micro_time(wall)})

    def renewed(self, answer: Object, sent: float) -> None:
        """Record the server's answer to a claim that was sent at `sent`."""
        self.observe(answer, sent)
        self._renewed = sent

    def left(self, now: float) -> float:
        """Return the seconds until the renew deadline. They are negative once it has passed."""
        return -math.inf if self._renewed is None else self._renewed + self.timing.renew_deadline - now

    def lost(self) -> bool:
        """Return True if another replica or nobody holds the existing Lease."""
        return self._found is not None and self.holder != self.identity

    @property
    def exists(self) -> bool:
        """True if the Lease existed when it was last read."""
        return self._found is not None

    @property
    def _spec(self) -> Mapping[str, Any]:
        return (self._found or {}).get("spec") or {}

    def _with(self, spec: Object) -> Object:
        """Return the Lease with this spec, and with the labels, owner and resourceVersion that were read."""
        found = self._found or {"metadata": {"namespace": self.namespace, "name": self.name}}
        return {**found, "apiVersion": API_VERSION, "kind": KIND, "spec": spec}


def _micro_time(wall: datetime) -> str:
    return wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
