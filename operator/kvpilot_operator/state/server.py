"""The optional APIs of an API server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The optional APIs that the API server serves."""

    http_routes: bool = False
    inference_pools: bool = False
    assigns_users: bool = False
    """True if the server assigns users and groups to the pods of each namespace (OpenShift)."""
