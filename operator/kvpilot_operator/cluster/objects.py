"""Kubernetes' objects as JSON: where the API server keeps them, and what tells that one has changed."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

Object = dict[str, Any]

_COLLECTIONS = {
    ("v1", "Pod"): "/api/v1/namespaces/{namespace}/pods",
    ("v1", "Service"): "/api/v1/namespaces/{namespace}/services",
    ("v1", "ConfigMap"): "/api/v1/namespaces/{namespace}/configmaps",
    ("v1", "Event"): "/api/v1/namespaces/{namespace}/events",
    ("v1", "Node"): "/api/v1/nodes",
    ("authentication.k8s.io/v1", "TokenReview"): "/apis/authentication.k8s.io/v1/tokenreviews",
    ("authorization.k8s.io/v1", "SubjectAccessReview"): "/apis/authorization.k8s.io/v1/subjectaccessreviews",
    ("coordination.k8s.io/v1", "Lease"): "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    ("apps/v1", "Deployment"): "/apis/apps/v1/namespaces/{namespace}/deployments",
    ("policy/v1", "PodDisruptionBudget"): "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): (
        "/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/httproutes"
    ),
    ("kvpilot.io/v1alpha1", "QuantizedLLMService"): (
        "/apis/kvpilot.io/v1alpha1/namespaces/{namespace}/quantizedllmservices"
    ),
}


def path_of(api_version: str, kind: str, namespace: str = "", name: str = "") -> str:
    """The REST path of a collection, of all namespaces where none is named, or of one object in it."""
    collection = _COLLECTIONS[(api_version, kind)]
    if not namespace:
        collection = collection.replace("/namespaces/{namespace}", "")
    collection = collection.format(namespace=quote(namespace))
    return f"{collection}/{quote(name)}" if name else collection


def version_of(kind: str, obj: Object) -> str:
    """Moves when somebody changes what a Deployment or a Service should be; empty for other kinds: nobody can tell."""
    if kind == "Deployment":
        # Its resourceVersion moves with every pod that comes or goes.
        return str(obj["metadata"].get("generation", ""))
    return str(obj["metadata"].get("resourceVersion", "")) if kind == "Service" else ""
