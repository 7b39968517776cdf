"""Kubernetes objects as JSON: their REST paths and their versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from kvpilot_operator.errors import BadName

Object = dict[str, Any]

# Names of all these kinds are DNS-1123 subdomains. The CRD has the same pattern (`pattern: *name`).
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_NAME = 253
_COLLECTIONS = {
    ("v1", "Pod"): "/api/v1/namespaces/{namespace}/pods",
    ("v1", "Service"): "/api/v1/namespaces/{namespace}/services",
    ("v1", "ConfigMap"): "/api/v1/namespaces/{namespace}/configmaps",
    ("v1", "PersistentVolumeClaim"): "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    ("v1", "Event"): "/api/v1/namespaces/{namespace}/events",
    ("v1", "Node"): "/api/v1/nodes",
    ("authentication.k8s.io/v1", "TokenReview"): "/apis/authentication.k8s.io/v1/tokenreviews",
    ("authorization.k8s.io/v1", "SubjectAccessReview"): "/apis/authorization.k8s.io/v1/subjectaccessreviews",
    ("coordination.k8s.io/v1", "Lease"): "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    ("batch/v1", "Job"): "/apis/batch/v1/namespaces/{namespace}/jobs",
    ("apps/v1", "Deployment"): "/apis/apps/v1/namespaces/{namespace}/deployments",
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): (
        "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets"
    ),
    ("policy/v1", "PodDisruptionBudget"): "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): (
        "/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/httproutes"
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): (
        "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"
    ),
    ("kvpilot.io/v1alpha1", "QuantizedLLMService"): (
        "/apis/kvpilot.io/v1alpha1/namespaces/{namespace}/quantizedllmservices"
    ),
}


class Ref(NamedTuple):
    """Names one object; `namespace` is empty for a cluster-scoped kind."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def to(cls, manifest: Mapping[str, Any]) -> Ref:
        """Return the reference to the object that a manifest describes."""
        metadata = manifest["metadata"]
        return cls(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])

    @property
    def path(self) -> str:
        """The REST path; BadName for a name that no object can have."""
        return path_of(*self)


def path_of(api_version: str, kind: str, namespace: str = "", name: str | None = None) -> str:
    """Return the REST path of a collection (of all namespaces if none is named), or of one object in it.

    A tenant may have chosen the name. An impossible name (`..`) would lead to another path, and raises BadName.
    """
    collection = _COLLECTIONS[(api_version, kind)]
    if not namespace:
        collection = collection.replace("/namespaces/{namespace}", "")
    collection = collection.format(namespace=_segment(kind, namespace)) if namespace else collection
    return f"{collection}/{_segment(kind, name)}" if name is not None else collection


def _segment(kind: str, name: str) -> str:
    if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
        raise BadName(kind, name)
    return quote(name, safe="")


def name_of(answer: Object) -> str:
    """Return the name of the object in an answer; empty for a list or anything else."""
    metadata = answer.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def version_of(kind: str, obj: Object) -> str:
    """Return a version that changes with the spec; empty for kinds that are not watched."""
    if kind in ("Deployment", "LeaderWorkerSet", "InferencePool", "HTTPRoute"):
        # Use the generation, because the resourceVersion also changes with every change of the status.
        return str(obj["metadata"].get("generation", ""))
    return str(obj["metadata"].get("resourceVersion", "")) if kind == "Service" else ""
