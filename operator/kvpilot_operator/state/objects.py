"""A service's objects in the API server: its pods, workloads, Services and route. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

ON_ITS_WAY = ("PodInitializing", "ContainerCreating")
"""Waiting reasons of a container that has no fault."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One engine pod as its kubelet reports it."""

    name: str
    revision: str
    ip: str | None
    node: str | None
    ready: bool
    """True if requests are sent to it: the kubelet's condition Ready, which needs open readiness gates."""
    terminating: bool
    restarts: int
    waiting_reason: str | None
    """Why the container waits (ErrImagePull, CrashLoopBackOff, ...)."""
    exit_message: str | None
    """The words of the engine's last exit (kvpilot-serve's refusal, or the end of its log)."""
    unschedulable: str | None
    """The scheduler's message while no node fits, or a queue holds the pod back."""
    unheard_since: datetime | None = None
    """Since when it is there without a node and without a word of the scheduler, who says nothing while it waits for a
    volume to be made."""
    held_up: tuple[str, str] | None = None
    """Why an init container or a sidecar keeps the pod from being ready: reason and message."""
    needs: tuple[str, ...] | None = None
    """The objects that its volumes are made from, such as "Secret certificates"; None once a container has started."""
    uid: str = ""
    do_not_evict: bool = False
    """True if kvpilot has asked cluster autoscalers to leave it where it is."""
    mesh: bool = False
    """True if it is reached by the mesh's mutual TLS."""
    containers_ready: bool = False
    admitted: bool | None = None
    """True if kvpilot's readiness gate is open; None where the pod has none."""
    workers: tuple[PodView, ...] = ()
    """The other pods of the group that it leads, none of which takes requests."""

    @property
    def group(self) -> tuple[PodView, ...]:
        """All pods of the replica that it is, or leads."""
        return (self, *self.workers)

    @property
    def answers(self) -> bool:
        """Return True if its engine answers, admitted or not."""
        return (self.ready or self.containers_ready) and bool(self.ip) and not self.terminating


@dataclass(frozen=True, slots=True)
class PrefetchView:
    """The Job that fills the claim for weights."""

    content: str
    """Its annotation: hashes of the claim's content and of the Job's own."""
    done: bool
    failure: str | None
    """Why it ended without being done."""
    pods: tuple[PodView, ...]
    downloaded_bytes: int | None
    """The number that its pod reports now; None where none answers."""
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One revision's Deployment, or what else runs it."""

    revision: str
    dtype: str
    replicas: int
    failure: str | None = None
    """Why pods that it lacks cannot be created, in the API server's words (ReplicaFailure, or Events)."""
    image: str | None = None
    model: str | None = None
    """The engine's, as it is told."""
    arguments: tuple[str, ...] = ()
    """All that the engine is told."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that its engines load at start."""
    has_gate: bool = True
    """True if its pods have kvpilot's readiness gate."""
    kind: str = "Deployment"
    nodes: int = 1
    """Pods of a replica."""


@dataclass(frozen=True, slots=True)
class ObjectView:
    """An object that carries the service's label: which one it is, and whether it is the service's own."""

    uid: str
    owned: bool
    """By an owner reference with the service's uid: a label is easily copied."""
    version: str
    """Moves when somebody changes what the object should be."""
    selects: str | None = None
    """The revision that a Service sends requests to, "" for every one; None where its selector is not ours."""
    picker: Mapping[str, Any] | None = None
    """The endpoint picker that an InferencePool names, as it stands there."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An object that the API server would not have, in its own words."""

    kind: str
    name: str
    reason: str
    """The reason in the server's Status: Invalid, Forbidden, ...; may be empty."""
    message: str
    causes: tuple[tuple[str, str], ...] = ()
    """Field and message, where it names them."""


class Parent(NamedTuple):
    """A Gateway's answer to a route that asks to be attached to it."""

    name: str
    """NAMESPACE/NAME, with the listener where one is named."""
    accepted: bool | None
    """None where nothing has been said of the route as it is now."""
    message: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True)
class RouteView:
    """The Gateway API HTTPRoute that takes a canary's share, as it is now: ours, or the one that routeRef names."""

    name: str
    resource_version: str
    rules: tuple[Mapping[str, Any], ...]
    """`spec.rules`, raw."""
    parents: tuple[Parent, ...] = ()
    """In the order of `spec.parentRefs`."""
