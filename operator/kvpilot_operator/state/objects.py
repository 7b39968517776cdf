"""Views of a service's objects in the API server: pods, workloads, Services and route. Frozen, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

ON_ITS_WAY = ("PodInitializing", "ContainerCreating")
"""Waiting reasons of a container that starts normally."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One engine pod as its kubelet reports it."""

    name: str
    revision: str
    ip: str | None
    node: str | None
    ready: bool
    """True if the pod is Ready, gates included, so that it gets requests."""
    terminating: bool
    restarts: int
    waiting_reason: str | None
    exit_message: str | None
    """The message of the engine's last exit: kvpilot-serve's refusal to start, or the end of the engine's log."""
    unschedulable: str | None
    """The scheduler's message, while no node fits the pod, or while a queue such as Kueue holds the pod back."""
    unheard_since: datetime | None = None
    """Creation time of a pod that has neither a node nor a message of the scheduler. The scheduler reports nothing
    while a volume is created."""
    held_up: tuple[str, str] | None = None
    """(reason, message) of an init container or sidecar that keeps the pod from being ready."""
    needs: tuple[str, ...] | None = None
    """Objects that the pod's volumes need, such as "Secret certificates"; None once a container has started."""
    uid: str = ""
    mesh: bool = False
    containers_ready: bool = False
    admitted: bool | None = None
    """True if kvpilot's readiness gate is open; None if the pod has no such gate."""
    workers: tuple["PodView", ...] = ()
    """The other pods of a multi-node replica that this pod leads. They take no requests."""

    @property
    def group(self) -> tuple["PodView", ...]:
        """All pods of this replica, this pod first."""
        return (self, *self.workers)

    @property
    def answers(self) -> bool:
        """True if the engine answers, whether or not the pod is admitted."""
        return (self.ready or self.containers_ready) and bool(self.ip) and not self.terminating


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """The Deployment or other workload that runs a revision."""

    revision: str
    dtype: str
    replicas: int
    failure: str | None = None
    """The API server's reason why missing pods cannot be created (from ReplicaFailure or Events)."""
    image: str | None = None
    model: str | None = None
    arguments: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    has_gate: bool = True
    """True if new pods of the workload have kvpilot's readiness gate."""
    paused: bool = False
    """True if the workload is paused, so that a change of its template replaces no pods."""
    in_step: bool = True
    """True if the workload's controller has observed that all its pods come from the present template."""
    kind: str = "Deployment"
    nodes: int = 1
    """Number of pods of each replica."""


@dataclass(frozen=True, slots=True)
class ObjectView:
    """An object with the service's label. It may belong to another owner."""

    uid: str
    owned: bool
    """True if an owner reference has the service's uid. A label alone proves nothing."""
    version: str
    selects: str | None = None
    """The revision that a Service selects, or "" for all revisions; None if kvpilot did not write the selector."""
    picker: Mapping[str, Any] | None = None
    """The endpointPickerRef of an InferencePool."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An object that the API server refused, and the server's answer."""

    kind: str
    name: str
    reason: str
    """The reason in the server's Status, such as Invalid or Forbidden. It may be empty."""
    message: str
    causes: tuple[tuple[str, str], ...] = ()
    """(field, message) of each fault."""


@dataclass(frozen=True, slots=True)
class RouteView:
    """The user's HTTPRoute that sends a canary its share of the requests (spec.canary.routeRef)."""

    name: str
    resource_version: str
    rules: tuple[Mapping[str, Any], ...]
