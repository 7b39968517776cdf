"""Builders of a service's objects. `render.engine` has the pod template of its engines."""

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kvpilot_operator.api import names
from kvpilot_operator.api.gateways import EndpointPickerRef
from kvpilot_operator.api.pods import Claim
from kvpilot_operator.render.workloads import DEPLOYMENT, LEADER_WORKER_SET, group_spec
from kvpilot_operator.state.objects import PodView, RouteView
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_operator.times import utc


def owned(
    key: ServiceKey, uid: str, what: tuple[str, str, str], labels: Mapping[str, str] | None = None, **content: Any
) -> dict[str, Any]:
    """Return an object that the service owns; `what` is its apiVersion, kind and name."""
    api_version, kind, name = what
    service = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": key.name, "uid": uid}
    metadata = {
        "name": name,
        "namespace": key.namespace,
        "labels": {**names.owned_labels(key.name), **(labels or {})},
        "ownerReferences": [{**service, "controller": True, "blockOwnerDeletion": True}],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def workload(
    key: ServiceKey,
    uid: str,
    template: dict[str, Any],
    replicas: int,
    startup_seconds: int,
    *,
    nodes: int = 1,
    has_gate: bool = True,
) -> dict[str, Any]:
    """Return the workload of one revision. `template` is that of the pods that take requests.

    The workload's progress deadline is 60 s after the longest time until an engine is ready (`startup_seconds`). With
    `has_gate`, pods do not become Ready before the operator admits them.
    """
    gates = {"readinessGates": [{"conditionType": names.ADMITTED}]} if has_gate else {}
    labels = {k: v for k, v in template["metadata"]["labels"].items() if k in (names.REVISION_LABEL, names.DTYPE_LABEL)}
    revision, kind = labels[names.REVISION_LABEL], DEPLOYMENT if nodes == 1 else LEADER_WORKER_SET
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": _selector(key, revision)},
        "template": {**template, "spec": {**template["spec"], **gates}},
        "progressDeadlineSeconds": startup_seconds + 60,
        "revisionHistoryLimit": 0,
    }
    if nodes > 1:
        spec = group_spec(template, replicas, nodes, gates)
    return owned(key, uid, (kind.api_version, kind.name, names.deployment_name(key.name, revision)), labels, spec=spec)


def service(key: ServiceKey, uid: str, name: str, revision: str) -> dict[str, Any]:
    """Return a Service that selects the pods of one revision, or of all revisions if `revision` is empty."""
    ports = [{"name": "http", "port": names.SERVICE_PORT, "protocol": "TCP", "targetPort": "http"}]
    spec = {"type": "ClusterIP", "selector": _selector(key, revision), "ports": ports}
    return owned(key, uid, ("v1", "Service", name), spec=spec)


def inference_pool(
    key: ServiceKey, uid: str, name: str, revision: str, picker: EndpointPickerRef | None
) -> dict[str, Any]:
    """Return an InferencePool that selects the same pods as the Service of this name."""
    spec: dict[str, Any] = {
        "selector": {"matchLabels": _selector(key, revision)},
        "targetPorts": [{"number": names.ENGINE_PORT}],
    }
    if picker is not None:
        spec["endpointPickerRef"] = {"kind": "Service", "failureMode": picker.failure_mode, **picker.as_written()}
    return owned(key, uid, (names.INFERENCE_POOL_API, "InferencePool", name), spec=spec)


def disruption_budget(
    key: ServiceKey, uid: str, revision: str, max_unavailable: int, *, groups: bool = False
) -> dict[str, Any]:
    """Return the PodDisruptionBudget of a service's pods, of one revision if `revision` is not empty.

    A pod that is not ready may always be evicted, so that an engine that never starts does not block a drain. With
    `groups`, the budget covers the workers of multi-node groups, too.
    """
    selector = _selector(key, revision, names.GROUP_LABEL if groups else names.SERVICE_LABEL)
    spec = {
        "maxUnavailable": max_unavailable,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return owned(key, uid, ("policy/v1", "PodDisruptionBudget", key.name), spec=spec)


def claim(key: ServiceKey, uid: str, asked: Claim) -> dict[str, Any]:
    """Return the manifest of the PersistentVolumeClaim for weights."""
    storage_class = {"storageClassName": asked.storage_class_name} if asked.storage_class_name is not None else {}
    spec = {"accessModes": [asked.access_mode], "resources": {"requests": {"storage": asked.size}}, **storage_class}
    return owned(key, uid, ("v1", "PersistentVolumeClaim", names.weights_claim(key.name)), spec=spec)


def group_service(key: ServiceKey, uid: str, name: str) -> dict[str, Any]:
    """Return the headless Service of a LeaderWorkerSet, as LeaderWorkerSet itself would make it."""
    selector = {"leaderworkerset.sigs.k8s.io/name": name}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return owned(key, uid, ("v1", "Service", name), spec=spec)


def pod_admission(key: ServiceKey, pod: PodView, admitted: bool, now: datetime) -> dict[str, Any]:
    """Return a patch of a pod's status: the condition that opens or closes kvpilot's readiness gate."""
    condition = {
        "type": names.ADMITTED,
        "status": "True" if admitted else "False",
        "reason": "Admitted" if admitted else "NotAdmitted",
        "message": "its revision serves, or has passed its probes" if admitted else "its revision is rolled back",
        "lastTransitionTime": utc(now),
    }
    metadata = {"name": pod.name, "namespace": key.namespace, "uid": pod.uid}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"conditions": [condition]}}


def route_rules(key: ServiceKey, route: RouteView, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return new rules for a user's HTTPRoute: a merge patch that fails if the route has changed since it was read."""
    return {
        "apiVersion": names.HTTP_ROUTE_API,
        "kind": "HTTPRoute",
        "metadata": {"name": route.name, "namespace": key.namespace, "resourceVersion": route.resource_version},
        "spec": {"rules": [dict(rule) for rule in rules]},
    }


def _selector(key: ServiceKey, revision: str, label: str = names.SERVICE_LABEL) -> dict[str, str]:
    return {label: key.name, **({names.REVISION_LABEL: revision} if revision else {})}


def baseline_config_map(key: ServiceKey, uid: str, identity: str, content: bytes) -> dict[str, Any]:
    """Return the ConfigMap with the 16-bit answers (compressed, under a ConfigMap's limit of 1 MiB)."""
    data = {"baseline": base64.b64encode(content).decode()}
    return owned(key, uid, ("v1", "ConfigMap", names.baseline_name(key.name, identity)), binaryData=data)
