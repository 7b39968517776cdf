"""Observations of the demo's service, and a timeout that restarts with each sign of progress."""

from dataclasses import dataclass, field
from typing import Any

from kvpilot_operator.cluster.objects import Object

STANDSTILL = 900.0
"""Seconds without progress after which a step fails. A slow step with progress may continue."""


@dataclass(frozen=True)
class Observation:
    """State of the service at one moment.

    Attributes:
        status: the status of the QuantizedLLMService; empty before the operator has written it.
        pods: the service's engine pods.
        work: number of lines in the engines' logs, without requests for health and metrics; 0 if unknown.
    """

    status: dict[str, Any] = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)
    work: int = 0

    def at(self, *path: str) -> Any:
        """Return the field of the status at this path, or None."""
        here: Any = self.status
        for name in path:
            here = here.get(name) if isinstance(here, dict) else None
        return here

    def condition(self, kind: str) -> dict[str, Any]:
        """Return the condition of this type; empty if it is missing."""
        return next((one for one in self.status.get("conditions", ()) if one["type"] == kind), {})

    def true(self, kind: str) -> bool:
        """Return True if the condition of this type is True."""
        return self.condition(kind).get("status") == "True"

    @property
    def trial(self) -> dict[str, Any]:
        """Return the newest canary that has ended; empty if there is none."""
        return next(iter(self.status.get("history", ())), {})

    def ended(self, dtype: str, verdict: str) -> bool:
        """Return True if the newest canary that has ended had this dtype and this verdict."""
        return (self.trial.get("dtype"), self.trial.get("verdict")) == (dtype, verdict)

    @property
    def summary(self) -> str:
        """Describe the current state in a few words for the screen."""
        canary = self.at("canary") or {}
        up = sum(ready(pod) for pod in self.pods)
        parts = [f"{up} of {len(self.pods)} engines ready"]
        parts += [f"canary {canary['dtype']} {canary['stage']}"] if canary else []
        reason = self.condition("Ready").get("reason")
        return ", ".join([*parts, *([str(reason)] if reason else [])])

    @property
    def sign(self) -> object:
        """Return a value that differs from that of an earlier observation only if there was progress."""
        canary = self.at("canary") or {}
        return (
            self.work,
            [(pod["metadata"]["name"], ready(pod), (pod.get("status") or {}).get("phase")) for pod in self.pods],
            [(one["type"], one["status"], one.get("reason")) for one in self.status.get("conditions", ())],
            [canary.get(name) for name in ("revision", "stage", "message", "weightPercent")],
            len(self.status.get("history", ())),
            self.at("kvCache", "activeDtype"),
            self.at("accuracy", "baseline"),
        )


class Patience:
    """Timeout that restarts with each sign of progress."""

    def __init__(self, seconds: float = STANDSTILL) -> None:
        self._seconds = seconds
        self._sign: object = None
        self._since = 0.0

    def ended(self, sign: object, now: float) -> bool:
        """Compare `sign` with that of the last call. Return True if it has not changed for too long."""
        if sign != self._sign:
            self._sign, self._since = sign, now
        return now - self._since >= self._seconds


def work_lines(log: str) -> int:
    """Count the lines of an engine's log, except those about GET requests (health and metrics)."""
    return sum('"GET /' not in line for line in log.splitlines())


def ready(pod: Object) -> bool:
    """Return True if the pod's condition Ready is True."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)
