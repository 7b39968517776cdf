"""What the API server that the operator talks to can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What this API server serves."""

    pod_disruption_budgets: bool = True
    unhealthy_pod_eviction: bool = True
    """Whether a budget can let pods leave that are not ready (Kubernetes 1.27 and newer)."""
    http_routes: bool = False
    inference_pools: bool = False
    assigns_users: bool = False
    """Whether each namespace has users and groups that its pods are given (OpenShift)."""
