"""From Kubernetes' JSON to the views of a Snapshot. Pure; tolerant of fields that are not set yet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import dropwhile, islice, takewhile
from typing import Any

from kvpilot_operator.render.names import (
    ADAPTERS_OPTION,
    DTYPE_LABEL,
    ENGINE_CONTAINER,
    REVISION_LABEL,
    SERVICE_LABEL,
    SHELTER_ANNOTATION,
    deployment_name,
)
from kvpilot_operator.state.snapshot import ON_ITS_WAY, DeploymentView, PodView, RouteView, ServiceKey

Object = Mapping[str, Any]

# A pod is gated while a queue (Kueue's, say) has no room for it: for us it is the same as no room on a node.
_NO_NODE = ("Unschedulable", "SchedulingGated")
_POD_NAME = re.compile(r'^(?:pods|Pod) "[^"]*" is (?:forbidden|invalid): ')


def pod_view(pod: Object) -> PodView:
    """One engine pod."""
    status = pod.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or ()}
    container = _engine_of(status.get("containerStatuses") or ())
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = scheduled.get("message") if scheduled.get("reason") in _NO_NODE else None
    waiting = (container.get("state") or {}).get("waiting") or {}
    return PodView(
        name=pod["metadata"]["name"],
        revision=(pod["metadata"].get("labels") or {}).get(REVISION_LABEL, ""),
        ip=status.get("podIP"),
        node=(pod.get("spec") or {}).get("nodeName"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating=pod["metadata"].get("deletionTimestamp") is not None,
        restarts=int(container.get("restartCount", 0)),
        waiting_reason=waiting.get("reason"),
        exit_message=_exit_message(container) or waiting.get("message"),
        unschedulable=unschedulable,
        held_up=_held_up(status),
        uid=pod["metadata"].get("uid", ""),
        do_not_evict=SHELTER_ANNOTATION in (pod["metadata"].get("annotations") or {}),
    )


def _held_up(status: Object) -> tuple[str, str] | None:
    """Reason and message of the first container beside the engine that waits for what may never come."""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or ON_ITS_WAY[0]
        if container.get("name") != ENGINE_CONTAINER and reason not in ON_ITS_WAY:
            said = _exit_message(container) or waiting.get("message") or ""
            return str(reason), f"container {container.get('name')}: {said}".strip()
    return None


def is_ours(pod: Object, service: str) -> bool:
    """True for a pod of one of our Deployments: a label is easily copied, a controller's reference less so."""
    labels = pod["metadata"].get("labels") or {}
    prefix = f"{deployment_name(service, labels.get(REVISION_LABEL, ''))}-"
    return any(
        owner.get("controller")
        and str(owner.get("apiVersion", "")).startswith("apps/")
        and owner.get("kind") == "ReplicaSet"
        and owner.get("name", "").startswith(prefix)
        for owner in pod["metadata"].get("ownerReferences") or ()
    )


def deployment_view(deployment: Object) -> DeploymentView:
    """One revision's Deployment."""
    labels, spec = deployment["metadata"].get("labels") or {}, deployment.get("spec") or {}
    engine = _engine_of(((spec.get("template") or {}).get("spec") or {}).get("containers") or ())
    told = dict(str(argument).partition("=")[::2] for argument in engine.get("args") or ())
    return DeploymentView(
        revision=labels.get(REVISION_LABEL, ""),
        dtype=labels.get(DTYPE_LABEL, ""),
        replicas=int(spec.get("replicas", 1)),
        failure=_replica_failure(deployment.get("status") or {}),
        image=engine.get("image"),
        model=told.get("--model"),
        adapters=_adapters(engine.get("args") or ()),
    )


def _adapters(arguments: Sequence[str]) -> tuple[str, ...]:
    """Names of the adapters that the engine is told to load."""
    after = islice(dropwhile(lambda argument: argument != ADAPTERS_OPTION, arguments), 1, None)
    return tuple(one.partition("=")[0] for one in takewhile(lambda argument: not argument.startswith("-"), after))


def _replica_failure(status: Object) -> str | None:
    """The condition ReplicaFailure, without the name of the pod that was not created: each attempt has another one."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return _POD_NAME.sub("", str(condition.get("message") or condition.get("reason") or "FailedCreate"))[:1000]
    return None


def traffic_of(service: Object) -> str | None:
    """The revision that a Service of ours sends requests to, "" for every one; None where its selector is not ours."""
    selector = (service.get("spec") or {}).get("selector") or {}
    owner = (service["metadata"].get("labels") or {}).get(SERVICE_LABEL)
    if selector.get(SERVICE_LABEL) != owner or selector.keys() - {SERVICE_LABEL, REVISION_LABEL}:
        return None
    return str(selector.get(REVISION_LABEL, ""))


def route_view(route: Object | None, key: ServiceKey) -> RouteView | None:
    """An HTTPRoute, with the weights that its rules together give to this service's Services (1 where none is set)."""
    if route is None:
        return None
    rules = tuple((route.get("spec") or {}).get("rules") or ())
    weights: dict[str, int] = {}
    for backend in (backend for rule in rules for backend in rule.get("backendRefs") or ()):
        name = backend.get("name")
        ours = name in (key.name, f"{key.name}-canary") and backend.get("namespace", key.namespace) == key.namespace
        if ours and backend.get("kind", "Service") == "Service" and backend.get("group", "") == "":
            weights[name] = weights.get(name, 0) + int(backend.get("weight", 1))
    metadata = route["metadata"]
    return RouteView(metadata["name"], metadata.get("resourceVersion", ""), rules, weights)


def _engine_of(containers: Sequence[Object]) -> Object:
    return next((c for c in containers if c.get("name") == ENGINE_CONTAINER), {})


def _exit_message(container: Object) -> str | None:
    for where in ("state", "lastState"):
        ended = (container.get(where) or {}).get("terminated")
        if ended:
            message = ended.get("message") or f"{ended.get('reason', 'exited')} with code {ended.get('exitCode')}"
            return str(message)
    return None
