"""Names, labels and annotations of what we own: the contract that selectors, watches and users rely on."""

from __future__ import annotations

GROUP = "kvpilot.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "QuantizedLLMService"
PLURAL = "quantizedllmservices"

HTTP_ROUTE_API = "gateway.networking.k8s.io/v1"
OPENSHIFT_SECURITY_API = "security.openshift.io/v1"
"""Where it is served, each namespace has users and groups of its own."""

SERVICE_LABEL = "kvpilot.io/service"
REVISION_LABEL = "kvpilot.io/revision"
DTYPE_LABEL = "kvpilot.io/dtype"

SHELTER_ANNOTATION = "kvpilot.io/sheltered"
"""On a pod that a cluster autoscaler is asked to leave where it is for now."""

ENGINE_CONTAINER = "engine"
ADAPTERS_OPTION = "--lora-modules"
"""Of the engine, with NAME=PATH of each adapter in the arguments after it."""
ENGINE_PORT = 8000


def engine_url(ip: str | None) -> str:
    """Where an engine pod with this address answers; IPv6 goes into brackets."""
    return f"http://[{ip}]:{ENGINE_PORT}" if ip and ":" in ip else f"http://{ip}:{ENGINE_PORT}"


def owned_labels(service: str) -> dict[str, str]:
    """Labels on everything that belongs to a service."""
    return {
        "app.kubernetes.io/name": "kvpilot-engine",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/managed-by": "kvpilot",
        SERVICE_LABEL: service,
    }


def deployment_name(service: str, revision: str) -> str:
    """`NAME-<revision>`: one Deployment a revision, so that two can stand side by side."""
    return f"{service}-{revision}"


def canary_service(service: str) -> str:
    """`NAME-canary`: the Service that a user's HTTPRoute sends the canary's share to."""
    return f"{service}-canary"


def baseline_name(service: str, identity: str) -> str:
    """The ConfigMap that keeps the 16-bit answers of one set of probes."""
    return f"{service}-baseline-{identity[:8]}"
