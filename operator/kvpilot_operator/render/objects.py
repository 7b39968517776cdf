"""The Deployments, the Service, the disruption budget and the baseline's ConfigMap of one service."""

from __future__ import annotations

import base64
from typing import Any

from kvpilot_operator.render.engine import revision
from kvpilot_operator.render.names import (
    DTYPE_LABEL,
    REVISION_LABEL,
    SERVICE_LABEL,
    baseline_name,
    deployment_name,
    owned_labels,
    owner_reference,
)
from kvpilot_operator.state.snapshot import ServiceKey


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
        "metadata": _metadata(key, uid, deployment_name(key.name, revision(template)), labels),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {SERVICE_LABEL: key.name, REVISION_LABEL: revision(template)}},
            "template": template,
            "progressDeadlineSeconds": startup_seconds + 60,
            "revisionHistoryLimit": 0,
        },
    }


def service(key: ServiceKey, uid: str, traffic: str) -> dict[str, Any]:
    """The Service whose selector is the traffic switch: it names the one revision that gets requests."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(key, uid, key.name),
        "spec": {
            "type": "ClusterIP",
            "selector": {SERVICE_LABEL: key.name, REVISION_LABEL: traffic},
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": "http"}],
        },
    }


def disruption_budget(key: ServiceKey, uid: str, traffic: str, min_available: int) -> dict[str, Any]:
    """Keeps voluntary disruptions from taking the serving revision below `min_available`."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(key, uid, key.name),
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": {SERVICE_LABEL: key.name, REVISION_LABEL: traffic}},
        },
    }


def baseline_config_map(key: ServiceKey, uid: str, identity: str, content: bytes) -> dict[str, Any]:
    """The ConfigMap that keeps the 16-bit answers (compressed, under a ConfigMap's limit of 1 MiB)."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(key, uid, baseline_name(key.name, identity)),
        "binaryData": {"baseline": base64.b64encode(content).decode()},
    }
