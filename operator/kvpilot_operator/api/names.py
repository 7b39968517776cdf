"""Names, labels and annotations of our objects: the contract that selectors, watches and users rely on."""

GROUP = "kvpilot.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "QuantizedLLMService"
PLURAL = "quantizedllmservices"

HTTP_ROUTE_API = "gateway.networking.k8s.io/v1"
INFERENCE_POOL_API = "inference.networking.k8s.io/v1"
LEADER_WORKER_SET_API = "leaderworkerset.x-k8s.io/v1"
OPENSHIFT_SECURITY_API = "security.openshift.io/v1"
"""Its namespaces have users and groups of their own."""

SERVICE_LABEL = "kvpilot.io/service"
REVISION_LABEL = "kvpilot.io/revision"
DTYPE_LABEL = "kvpilot.io/dtype"
GROUP_LABEL = "kvpilot.io/group"
"""On all pods of groups. Workers have no SERVICE_LABEL, so that a selector for requests finds leaders alone."""
CLAIM_LABEL = "kvpilot.io/claim"
"""On pods that have to be on one node for the claim of this name."""
PREFETCH_LABEL = "kvpilot.io/prefetch"
"""On the pod of the Job that fills a claim, with the service's name."""
CANARY_ANNOTATION = "kvpilot.io/canary"
"""On a service: a person's request about one trial, VERB@REVISION/TIME (decide/rollout/requested.py)."""
IDENTITY_ANNOTATION = "kvpilot.io/identity"
"""Annotation on that Job: hashes of the content required on the claim and of the Job itself."""

MESH_LABEL, MESH_VALUE = "security.istio.io/tlsMode", "istio"
"""Istio's mark of a pod with a sidecar that takes mutual TLS; its proxies decide by it, too."""

DO_NOT_EVICT_ANNOTATION = "kvpilot.io/do-not-evict"
"""Annotation on a pod that a cluster autoscaler should leave in place for now."""

ADMITTED = "kvpilot.io/admitted"
"""A pod's readiness gate, and the condition that opens it: requests may be sent to the pod."""

ENGINE_CONTAINER = "engine"
PREFETCH_CONTAINER = "prefetch"
ADAPTERS_OPTION = "--lora-modules"
"""Option of the engine; NAME=PATH of each adapter follows it."""
ENGINE_PORT = 8000
SERVICE_PORT = 80


def engine_url(ip: str | None, mesh: bool) -> str:
    """Return the URL of an engine pod, in a mesh by TLS; IPv6 goes into brackets."""
    host = f"[{ip}]" if ip and ":" in ip else ip
    return f"{'https' if mesh else 'http'}://{host}:{ENGINE_PORT}"


def service_url(namespace: str, service: str) -> str:
    """Return the URL for clients in the cluster, whatever the cluster's own domain is."""
    return f"http://{service}.{namespace}.svc"


def owned_labels(service: str) -> dict[str, str]:
    """Labels on everything that belongs to a service."""
    return {
        "app.kubernetes.io/name": "kvpilot-engine",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/managed-by": "kvpilot",
        SERVICE_LABEL: service,
    }


OWN_LABELS = frozenset((*owned_labels(""), REVISION_LABEL, DTYPE_LABEL, GROUP_LABEL, CLAIM_LABEL))
"""Keys of the labels of engine pods that are kvpilot's, and not a user's."""


def deployment_name(service: str, revision: str) -> str:
    """`NAME-<revision>`: one workload for each revision, so that two can run side by side."""
    return f"{service}-{revision}"


def canary_service(service: str) -> str:
    """`NAME-canary`: the Service or InferencePool that an HTTPRoute sends the canary's share to."""
    return f"{service}-canary"


def weights_claim(service: str) -> str:
    """`NAME-weights`: the claim that keeps the engines' downloads."""
    return f"{service}-weights"


def prefetch_job(service: str) -> str:
    """`NAME-prefetch`: the Job that fills the claim for weights."""
    return f"{service}-prefetch"


def baseline_name(service: str, identity: str) -> str:
    """Return the name of the ConfigMap with the 16-bit answers of one set of probes."""
    return f"{service}-baseline-{identity[:8]}"
