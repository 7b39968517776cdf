"""From Kubernetes' JSON to the views of a Snapshot. Pure; tolerant of fields that are not set yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpilot_operator.render.names import DTYPE_LABEL, ENGINE_CONTAINER, REVISION_LABEL
from kvpilot_operator.state.snapshot import DeploymentView, NodeFacts, PodView

Object = Mapping[str, Any]


def pod_view(pod: Object) -> PodView:
    """One engine pod."""
    status = pod.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or ()}
    container = _engine_status(status)
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = scheduled.get("message") if scheduled.get("reason") == "Unschedulable" else None
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
    )


def deployment_view(deployment: Object) -> DeploymentView:
    """One revision's Deployment."""
    labels = deployment["metadata"].get("labels") or {}
    return DeploymentView(
        revision=labels.get(REVISION_LABEL, ""),
        dtype=labels.get(DTYPE_LABEL, ""),
        replicas=int((deployment.get("spec") or {}).get("replicas", 1)),
    )


def traffic_of(service: Object | None) -> str | None:
    """The revision that a Service selects."""
    if service is None:
        return None
    selector = (service.get("spec") or {}).get("selector") or {}
    revision = selector.get(REVISION_LABEL)
    return str(revision) if revision else None


def node_facts(nodes: Sequence[Object]) -> NodeFacts:
    """The accelerator of the first node that has one, by GPU feature discovery's labels; "cpu" where none has any."""
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        product = labels.get("nvidia.com/gpu.product")
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        if not product and allocatable.get("nvidia.com/gpu", "0") == "0":
            continue
        major, minor = labels.get("nvidia.com/gpu.compute.major", ""), labels.get("nvidia.com/gpu.compute.minor", "")
        known = major.isdigit() and minor.isdigit()
        return NodeFacts(
            gpu=product or "unlabelled-gpu", compute_capability=(int(major), int(minor)) if known else None
        )
    return NodeFacts()


def _engine_status(status: Object) -> Object:
    statuses: Sequence[Object] = status.get("containerStatuses") or ()
    return next((c for c in statuses if c.get("name") == ENGINE_CONTAINER), {})


def _exit_message(container: Object) -> str | None:
    for where in ("state", "lastState"):
        ended = (container.get(where) or {}).get("terminated")
        if ended:
            message = ended.get("message") or f"{ended.get('reason', 'exited')} with code {ended.get('exitCode')}"
            return str(message)
    return None
