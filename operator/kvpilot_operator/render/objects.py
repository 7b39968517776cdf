"""The Deployments, the Services, the disruption budget and the baseline's ConfigMap of one service, and its route."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from kvpilot_operator.render.engine import revision as revision_of
from kvpilot_operator.render.names import (
    DTYPE_LABEL,
    HTTP_ROUTE_API,
    REVISION_LABEL,
    SERVICE_LABEL,
    SHELTER_ANNOTATION,
    baseline_name,
    deployment_name,
    owned_labels,
    owner_reference,
)
from kvpilot_operator.state.snapshot import PodView, RouteView, ServiceKey

_SHELTER = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    SHELTER_ANNOTATION: "true",
}


def _metadata(key: ServiceKey, uid: str, name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": key.namespace,
        "labels": {**owned_labels(key.name), **(labels or {})},
        "ownerReferences": [owner_reference(key.name, uid)],
    }


def deployment(
    key: ServiceKey, uid: str, template: dict[str, Any], replicas: int, startup_seconds: int
) -> dict[str, Any]:
    """One revision's Deployment."""
    labels = {k: v for k, v in template["metadata"]["labels"].items() if k in (REVISION_LABEL, DTYPE_LABEL)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(key, uid, deployment_name(key.name, revision_of(template)), labels),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {SERVICE_LABEL: key.name, REVISION_LABEL: revision_of(template)}},
            "template": template,
            "progressDeadlineSeconds": startup_seconds + 60,
            "revisionHistoryLimit": 0,
        },
    }


def service(key: ServiceKey, uid: str, name: str, revision: str) -> dict[str, Any]:
    """A Service, which selects one revision, or every one where `revision` is empty: the traffic switch."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(key, uid, name),
        "spec": {
            "type": "ClusterIP",
            "selector": _selector(key, revision),
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": "http"}],
        },
    }


def disruption_budget(
    key: ServiceKey, uid: str, revision: str, min_available: int, *, evict_unready: bool
) -> dict[str, Any]:
    """Keeps voluntary disruptions from taking the pods that the Service selects below `min_available`.

    With `evict_unready` a pod that is not ready may always leave: an engine that never starts keeps no node.
    """
    policy = {"unhealthyPodEvictionPolicy": "AlwaysAllow"} if evict_unready else {}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(key, uid, key.name),
        "spec": {"minAvailable": min_available, "selector": {"matchLabels": _selector(key, revision)}, **policy},
    }


def pod_shelter(key: ServiceKey, pod: PodView, sheltered: bool) -> dict[str, Any]:
    """The annotations of ours on one pod: those that cluster autoscalers know, with a mark of ours, or none."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod.name,
            "namespace": key.namespace,
            "uid": pod.uid,
            "annotations": dict(_SHELTER) if sheltered else {},
        },
    }


def route_rules(key: ServiceKey, route: RouteView, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """New rules for a user's HTTPRoute: a merge patch that fails where the route has changed since it was read."""
    return {
        "apiVersion": HTTP_ROUTE_API,
        "kind": "HTTPRoute",
        "metadata": {"name": route.name, "namespace": key.namespace, "resourceVersion": route.resource_version},
        "spec": {"rules": [dict(rule) for rule in rules]},
    }


def _selector(key: ServiceKey, revision: str) -> dict[str, str]:
    return {SERVICE_LABEL: key.name, **({REVISION_LABEL: revision} if revision else {})}


def baseline_config_map(key: ServiceKey, uid: str, identity: str, content: bytes) -> dict[str, Any]:
    """The ConfigMap that keeps the 16-bit answers (compressed, under a ConfigMap's limit of 1 MiB)."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(key, uid, baseline_name(key.name, identity)),
        "binaryData": {"baseline": base64.b64encode(content).decode()},
    }
