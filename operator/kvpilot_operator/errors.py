"""Every error that the operator raises on purpose.

    KvpilotError
    +-- ClusterError           the Kubernetes API said no
    |   +-- Conflict           somebody else wrote first: observe again
    |   +-- NotFound
    +-- ScrapeError            a pod's /metrics could not be read

Errors of the accuracy probes live with the probes (`kvpilot_operator.probes.errors`).
"""


class KvpilotError(Exception):
    """Base of all errors that the operator raises on purpose."""


class ClusterError(KvpilotError):
    """The Kubernetes API refused a request; `status` is its HTTP status."""

    def __init__(self, method: str, path: str, status: int, message: str) -> None:
        super().__init__(f"{method} {path}: HTTP {status}: {message}")
        self.status = status
        self.message = message


class Conflict(ClusterError):
    """The object changed since it was read (HTTP 409)."""


class NotFound(ClusterError):
    """The object, or the API that it belongs to, does not exist (HTTP 404)."""


class ScrapeError(KvpilotError):
    """A pod's metrics could not be read or made no sense."""
