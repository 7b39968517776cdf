"""Kinds of workloads that run the pods of one revision, and all differences between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpilot_operator.api.names import LEADER_WORKER_SET_API, deployment_name

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of workload. Its `spec.replicas` is the number of the service's replicas."""

    name: str
    api_version: str
    optional: bool
    """True if a cluster may lack the definition."""
    template: tuple[str, ...]
    """Path in `spec` of the template of pods that take requests."""
    pods_owner: str
    """The kind, of apps/v1, that owns these pods."""
    owner_is_named: str
    """Pattern of that owner's name, in which NAME stands for the workload's name. A trailing dash makes it a prefix."""

    def pod_template(self, workload: Object) -> Object:
        """Return the template of pods that take requests; {} if there is none."""
        found: Any = workload.get("spec") or {}
        for part in self.template:
            found = found.get(part) or {}
        return found if isinstance(found, Mapping) else {}

    def owns(self, owner: Object, name: str) -> bool:
        """Return True if a pod's owner reference points to an object of the workload of this name."""
        wanted, found = self.owner_is_named.replace("NAME", name), _controller(owner, self.pods_owner)
        return found.startswith(wanted) if wanted.endswith("-") else found == wanted


DEPLOYMENT = Kind("Deployment", "apps/v1", False, ("template",), "ReplicaSet", "NAME-")
LEADER_WORKER_SET = Kind(
    "LeaderWorkerSet",
    LEADER_WORKER_SET_API,
    True,
    ("leaderWorkerTemplate", "leaderTemplate"),
    "StatefulSet",
    "NAME",
)
KINDS = {kind.name: kind for kind in (DEPLOYMENT, LEADER_WORKER_SET)}


def kind_for(nodes: int) -> Kind:
    """Return the kind for replicas of so many nodes each."""
    return DEPLOYMENT if nodes == 1 else LEADER_WORKER_SET


def makes(service: str, revision: str, owner: Object) -> bool:
    """Return True if a pod with this owner reference takes requests for the revision."""
    return any(kind.owns(owner, deployment_name(service, revision)) for kind in KINDS.values())


def leader_of(service: str, revision: str, owner: Object) -> str | None:
    """Return the leader of a worker with this owner reference: its StatefulSet has the leader's name."""
    name = _controller(owner, LEADER_WORKER_SET.pods_owner)
    return name if name.startswith(f"{deployment_name(service, revision)}-") else None


def _controller(owner: Object, kind: str) -> str:
    """Return the name in an owner reference to a controller of this kind, of apps/v1; "" for any other."""
    ours = owner.get("controller") and str(owner.get("apiVersion", "")).startswith("apps/")
    return str(owner.get("name", "")) if ours and owner.get("kind") == kind else ""
