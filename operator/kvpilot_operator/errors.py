"""Errors that the operator raises on purpose, except those of probes (`kvpilot_probes.errors`)."""

import traceback
from pathlib import PurePath

from kvpilot_formats.untrusted import KvpilotError, lines

_PACKAGE = "kvpilot_operator"


class ClusterError(KvpilotError):
    """A failed request (`request`: method and path) to the Kubernetes API. `status` is 0 without an HTTP answer."""

    def __init__(self, method: str, path: str, status: int, message: str) -> None:
        super().__init__(f"{method} {path}: HTTP {status}: {message}")
        self.request = f"{method} {path}"
        self.status = status
        self.message = lines(message)

    @property
    def away(self) -> bool:
        """True if the API server cannot be reached (status 0), or reports itself as unavailable."""
        return self.status in (0, 502, 503, 504)


class Conflict(ClusterError):
    """The object changed since it was read (HTTP 409)."""


class NotFound(ClusterError):
    """The object, or the API that it belongs to, does not exist (HTTP 404)."""


class Throttled(ClusterError):
    """The API server requests a pause of `retry_after` seconds (HTTP 429 or 503 with Retry-After)."""

    def __init__(self, method: str, path: str, status: int, message: str, retry_after: float) -> None:
        super().__init__(method, path, status, message)
        self.retry_after = retry_after


class Rejected(ClusterError):
    """The API server or one of its webhooks refuses an object (HTTP 400, 403, 422, some 500).

    `reason` is that of the server's Status, and may be empty. `causes` has (field, message) of each fault.
    """

    def __init__(
        self,
        method: str,
        path: str,
        status: int,
        message: str,
        reason: str = "",
        causes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(method, path, status, message)
        self.reason = reason
        self.causes = causes


class NameTaken(Rejected):
    """An object with a name that a service needs belongs to another owner. No write was sent."""

    def __init__(self, kind: str, namespace: str, name: str) -> None:
        words = f"{kind} {namespace}/{name} exists and has another owner: {_way_out(kind)}"
        super().__init__("PATCH", f"{namespace}/{name}", 409, words, "NameTaken")


class NotStarted(Rejected):
    """Pods were not started: an object that they need is missing or has another owner. No write was sent."""

    def __init__(self, kind: str, needed: str, namespace: str, name: str, *, missing: bool) -> None:
        state = "does not exist" if missing else f"exists and has another owner: {_way_out(needed)}"
        words = f"this {kind} starts no pod: it needs {needed} {namespace}/{name}, which {state}"
        super().__init__("PATCH", f"{namespace}/{name}", 409, words, "ObjectMissing" if missing else "NameTaken")


def _way_out(kind: str) -> str:
    if kind == "PersistentVolumeClaim":
        return (
            "rename the QuantizedLLMService, or delete the claim if it is not needed; to use its weights, name it in "
            "spec.cache.weightsClaimName instead of spec.cache.weights"
        )
    return "rename the QuantizedLLMService, or delete the other object if it is not needed"


class BadName(ClusterError):
    """No object can have this name. No request was sent."""

    def __init__(self, kind: str, name: str) -> None:
        words = f"not sent: {name[:80]!r} is not a name of a {kind}: use lower-case letters, digits, '-' and '.'"
        super().__init__("GET", kind, 0, words)


class NotLeader(ClusterError):
    """A write was not sent: this replica does not lead, or the time left on its Lease is too short."""

    def __init__(self, method: str, path: str) -> None:
        super().__init__(method, path, 0, "not sent: this replica does not hold the Lease")


class LeadershipLost(KvpilotError):
    """The replica must stop: another replica leads, or the Lease was not renewed in time."""


class ScrapeError(KvpilotError):
    """A pod's metrics could not be read, or are invalid."""


class ScrapeTimeout(ScrapeError):
    """A pod did not send its metrics in time."""


class NoIdentity(KvpilotError):
    """The certificates for engines in a mesh cannot be read."""


class PermitLost(KvpilotError):
    """Work was stopped, because it reported no progress for too long while others waited for its permit."""


def places(error: Exception) -> tuple[str, ...]:
    """Return the lines of the operator's own code in an error's traceback, as FILE:LINE, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = ((PurePath(frame.filename), frame.lineno) for frame in frames)
    return tuple(f"{file.name}:{line}" for file, line in ours if _PACKAGE in file.parts)
