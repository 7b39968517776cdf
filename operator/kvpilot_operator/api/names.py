"""Names, labels and annotations of kvpilot's objects. Never change them: selectors, watches and users rely on them."""

GROUP = "kvpilot.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "QuantizedLLMService"
PLURAL = "quantizedllmservices"

HTTP_ROUTE_API = "gateway.networking.k8s.io/v1"
INFERENCE_POOL_API = "inference.networking.k8s.io/v1"
LEADER_WORKER_SET_API = "leaderworkerset.x-k8s.io/v1"
OPENSHIFT_SECURITY_API = "security.openshift.io/v1"
"""API group of OpenShift, which assigns users and groups to each namespace."""

SERVICE_LABEL = "kvpilot.io/service"
REVISION_LABEL = "kvpilot.io/revision"
DTYPE_LABEL = "kvpilot.io/dtype"
GROUP_LABEL = "kvpilot.io/group"
"""Label on all pods of multi-node groups. Workers have no SERVICE_LABEL, so that Services select only leaders."""
CLAIM_LABEL = "kvpilot.io/claim"
"""Label on pods that must run on one node, because they share the claim that the label names."""
CANARY_ANNOTATION = "kvpilot.io/canary"
"""Annotation by which a user ends a service's canary early or lets a failed one be tried again. Its value is
VERB@REVISION/TIME, with the verb abort, deny, promote or retry (decide/rollout/requested.py)."""
SPEC_ANNOTATION = "kvpilot.io/spec"
"""Annotation on a workload: the spec that it was last rendered from, as JSON with the service's `generation`."""

MESH_LABEL, MESH_VALUE = "security.istio.io/tlsMode", "istio"
"""Label that Istio sets on a pod whose sidecar accepts mutual TLS. Istio's proxies choose TLS by this label, too."""

ADMITTED = "kvpilot.io/admitted"
"""Name of a pod's readiness gate, and of the pod condition that opens it: True once the pod may get requests."""

ENGINE_CONTAINER = "engine"
ADAPTERS_OPTION = "--lora-modules"
"""Engine option for LoRA adapters. Its values are NAME=PATH for each adapter."""
ENGINE_PORT = 8000
SERVICE_PORT = 80


def engine_url(ip: str | None, mesh: bool) -> str:
    """Return the URL of an engine pod: https in a mesh, else http. Put an IPv6 address into brackets."""
    host = f"[{ip}]" if ip and ":" in ip else ip
    return f"{'https' if mesh else 'http'}://{host}:{ENGINE_PORT}"


def service_url(namespace: str, service: str) -> str:
    """Return the service's URL for clients in the cluster. It works with any cluster domain."""
    return f"http://{service}.{namespace}.svc"


def owned_labels(service: str) -> dict[str, str]:
    """Return the labels of every object that belongs to a service."""
    return {
        "app.kubernetes.io/name": "kvpilot-engine",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/managed-by": "kvpilot",
        SERVICE_LABEL: service,
    }


def deployment_name(service: str, revision: str) -> str:
    """Return `NAME-<revision>`, the name of a revision's workload. Two revisions can run side by side."""
    return f"{service}-{revision}"


def canary_service(service: str) -> str:
    """Return `NAME-canary`, the Service or InferencePool to which an HTTPRoute sends the canary's share."""
    return f"{service}-canary"


def weights_claim(service: str) -> str:
    """Return `NAME-weights`, the claim that keeps the engines' downloads."""
    return f"{service}-weights"


def baseline_name(service: str, identity: str) -> str:
    """Return the name of the ConfigMap that stores a baseline.

    `identity` is the hash of everything but the image that the 16-bit answers depend on, such as prompts and model.
    """
    return f"{service}-baseline-{identity[:8]}"
