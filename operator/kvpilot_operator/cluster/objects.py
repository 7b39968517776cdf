"""Kubernetes objects as JSON: their REST paths and their versions."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from kvpilot_operator.errors import BadName

Object = dict[str, Any]

# Names of all these kinds are DNS-1123 subdomains.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_NAME = 253
_KINDS = {
    "v1": ("Pod", "Service", "ConfigMap", "PersistentVolumeClaim", "Event", "Node"),
    "authentication.k8s.io/v1": ("TokenReview",),
    "authorization.k8s.io/v1": ("SubjectAccessReview",),
    "coordination.k8s.io/v1": ("Lease",),
    "autoscaling/v1": ("HorizontalPodAutoscaler",),
    "apps/v1": ("Deployment", "ReplicaSet"),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "policy/v1": ("PodDisruptionBudget",),
    "gateway.networking.k8s.io/v1": ("HTTPRoute",),
    "inference.networking.k8s.io/v1": ("InferencePool",),
    "kvpilot.io/v1alpha1": ("QuantizedLLMService",),
}
"""The only kinds that the operator reads or writes, by API version."""


class Ref(NamedTuple):
    """A reference to one object; `namespace` is empty for a cluster-scoped kind."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def to(cls, manifest: Mapping[str, Any]) -> "Ref":
        """Return the reference to the object that a manifest describes."""
        metadata = manifest["metadata"]
        return cls(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])

    @property
    def path(self) -> str:
        """The REST path. Raises BadName for a name that no object can have."""
        return path_of(*self)


def path_of(api_version: str, kind: str, namespace: str = "", name: str | None = None) -> str:
    """Return the REST path of a collection, or of one object in it. Without `namespace`, cover all namespaces.

    Raise BadName for an impossible name. A tenant may have chosen the name, and `..` would lead to another path.
    """
    if kind not in _KINDS.get(api_version, ()):
        raise KeyError((api_version, kind))
    root = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
    within = f"/namespaces/{_segment(kind, namespace)}" if namespace else ""
    return f"{root}{within}/{kind.lower()}s" + (f"/{_segment(kind, name)}" if name is not None else "")


def _segment(kind: str, name: str) -> str:
    if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
        raise BadName(kind, name)
    return quote(name, safe="")


def version_of(kind: str, obj: Object) -> str:
    """Return a version that changes with the object's spec. It is empty for kinds that are not watched."""
    if kind in ("Deployment", "LeaderWorkerSet", "InferencePool"):
        # Use the generation, because the resourceVersion also changes with every change of the status.
        return str(obj["metadata"].get("generation", ""))
    return str(obj["metadata"].get("resourceVersion", "")) if kind == "Service" else ""
