"""Convert Kubernetes' JSON to the views of a Snapshot. Pure, and tolerant of fields that are not set yet."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvpilot_formats.arguments import read
from kvpilot_formats.untrusted import lines, shown
from kvpilot_operator.api import names
from kvpilot_operator.cluster.objects import version_of
from kvpilot_operator.render.workloads import KINDS, leader_of, makes
from kvpilot_operator.state.objects import ON_ITS_WAY, DeploymentView, ObjectView, PodView, RouteView

Object = Mapping[str, Any]

# Reasons for a pod without a node. A queue such as Kueue holds pods back with a scheduling gate.
_NO_NODE = ("Unschedulable", "SchedulingGated")
_SOURCES = (
    ("Secret", "secret", "secretName"),
    ("ConfigMap", "configMap", "name"),
    ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
)
"""(kind, field of a volume or a projected source, subfield with the object's name)."""
_POD_NAME = re.compile(r'^(?:pods|Pod) "[^"]*" is (?:forbidden|invalid): ')


def pod_view(pod: Object, mesh: bool = False) -> PodView:
    """Return the view of one pod. `mesh` is True if the operator has an identity for a mesh."""
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or ()}
    container = _named(status.get("containerStatuses") or (), names.ENGINE_CONTAINER)
    scheduled = conditions.get("PodScheduled", {})
    gates = [gate.get("conditionType") for gate in (pod.get("spec") or {}).get("readinessGates") or ()]
    # Other causes have the reason SchedulerError, too, so only a message about VolumeBinding counts.
    no_volume = scheduled.get("reason") == "SchedulerError" and "VolumeBinding" in (_words(scheduled) or "")
    unschedulable = _words(scheduled) if no_volume or scheduled.get("reason") in _NO_NODE else None
    unheard = None if scheduled or (pod.get("spec") or {}).get("nodeName") else pod["metadata"].get("creationTimestamp")
    waiting = (container.get("state") or {}).get("waiting") or {}
    return PodView(
        name=pod["metadata"]["name"],
        revision=labels.get(names.REVISION_LABEL, ""),
        ip=status.get("podIP"),
        node=(pod.get("spec") or {}).get("nodeName"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating=pod["metadata"].get("deletionTimestamp") is not None,
        restarts=int(container.get("restartCount", 0)),
        waiting_reason=_words(waiting, "reason"),
        exit_message=_exit_message(container) or _words(waiting),
        unschedulable=unschedulable,
        unheard_since=datetime.fromisoformat(unheard) if unheard else None,
        held_up=_held_up(status),
        needs=_needs(pod) if unheard or not _begun(status) else None,
        uid=pod["metadata"].get("uid", ""),
        mesh=mesh and labels.get(names.MESH_LABEL) == names.MESH_VALUE,
        containers_ready=conditions.get("ContainersReady", {}).get("status") == "True",
        admitted=conditions.get(names.ADMITTED, {}).get("status") == "True" if names.ADMITTED in gates else None,
    )


def _words(said: Object, field: str = "message") -> str | None:
    return None if said.get(field) is None else lines(str(said[field]))


def _held_up(status: Object) -> tuple[str, str] | None:
    """Return (reason, message) of the first init container or sidecar whose wait may never end."""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or ON_ITS_WAY[0]
        if container.get("name") != names.ENGINE_CONTAINER and reason not in ON_ITS_WAY:
            said = _exit_message(container) or _words(waiting) or ""
            return lines(str(reason)), f"container {container.get('name')}: {said}".strip()
    return None


def _begun(status: Object) -> bool:
    """Return True if a container was started, so its volumes exist, or if the pod has no container status yet."""
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return not containers or any(
        one.get("lastState") or (one.get("state") or {}).keys() & {"running", "terminated"} for one in containers
    )


def _needs(pod: Object) -> tuple[str, ...]:
    """Return the objects that the kubelet needs for a pod's volumes, in the order of the volumes."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    parts = [part for one in volumes for part in ((one.get("projected") or {}).get("sources") or (one,))]
    found = [
        f"{kind} {part[field].get(named) or part[field].get('name')}"
        for part in parts
        for kind, field, named in _SOURCES
        if part.get(field) and not part[field].get("optional")
    ]
    return tuple(dict.fromkeys(found))


def is_ours(pod: Object, service: str) -> bool:
    """Return True if an owner reference names one of our workloads. A label alone is too easy to copy."""
    labels = pod["metadata"].get("labels") or {}
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(makes(service, labels.get(names.REVISION_LABEL, ""), owner) for owner in owners)


def leader_name(pod: Object, service: str) -> str | None:
    """Return the name of a worker's leader. Return None if the pod is not a worker of one of our groups."""
    labels = pod["metadata"].get("labels") or {}
    owners = pod["metadata"].get("ownerReferences") or ()
    found = (leader_of(service, labels.get(names.REVISION_LABEL, ""), owner) for owner in owners)
    return next((name for name in found if name is not None), None)


def deployment_view(deployment: Object, kind: str = "Deployment") -> DeploymentView:
    """Return the view of the workload that runs one revision."""
    metadata, spec, status = deployment["metadata"], deployment.get("spec") or {}, deployment.get("status") or {}
    labels, paused = metadata.get("labels") or {}, bool(spec.get("paused"))
    seen = status.get("observedGeneration") == metadata.get("generation")
    template = KINDS[kind].pod_template(deployment).get("spec") or {}
    engine = _named(template.get("containers") or (), names.ENGINE_CONTAINER)
    told = read(map(str, engine.get("args") or ()))
    adapters = told.get(names.ADAPTERS_OPTION)
    holds = {c.get("type"): c for c in status.get("conditions") or () if c.get("status") == "True"}
    failed = holds.get("ReplicaFailure")
    why = None if failed is None else str(failed.get("message") or failed.get("reason") or "FailedCreate")
    return DeploymentView(
        revision=labels.get(names.REVISION_LABEL, ""),
        dtype=labels.get(names.DTYPE_LABEL, ""),
        replicas=int(spec.get("replicas", 1)),
        failure=None if why is None else without_pod_name(why),
        image=engine.get("image"),
        model=told.value("--model"),
        arguments=tuple(map(str, engine.get("args") or ())),
        adapters=tuple(one.partition("=")[0] for one in adapters.values) if adapters is not None else (),
        has_gate=any(gate.get("conditionType") == names.ADMITTED for gate in template.get("readinessGates") or ()),
        paused=paused,
        in_step=not paused or (seen and status.get("updatedReplicas", 0) == status.get("replicas", 0)),
        kind=kind,
        nodes=int((spec.get("leaderWorkerTemplate") or {}).get("size", 1)),
    )


def without_pod_name(message: str) -> str:
    """Return why a pod could not be created, without the pod's name, which differs at each attempt."""
    return _POD_NAME.sub("", shown(message))[:1000]


def traffic_of(service: Object) -> str | None:
    """Return the revision that a Service selects, or "" for all. Return None if the selector is not ours."""
    return _selected(service, (service.get("spec") or {}).get("selector") or {})


def pool_view(pool: Object, uid: str) -> ObjectView:
    """Return the view of an InferencePool with a name that belongs to the service. `uid` is the service's uid."""
    spec = pool.get("spec") or {}
    selects = _selected(pool, (spec.get("selector") or {}).get("matchLabels") or {})
    return replace(named_view("InferencePool", pool, uid), selects=selects, picker=spec.get("endpointPickerRef"))


def named_view(kind: str, obj: Object, uid: str) -> ObjectView:
    """Return the view of an object with a name that belongs to the service. `uid` is the service's uid."""
    metadata = obj["metadata"]
    owned = any(owner.get("uid") == uid for owner in metadata.get("ownerReferences") or ())
    return ObjectView(metadata.get("uid", ""), owned, version_of(kind, dict(obj)))


def together(service: str | None, pool: ObjectView | None) -> str | None:
    """Return the revision that both Service (`traffic_of`) and pool select, or "" (all revisions) if they differ."""
    if service is None or pool is None or not pool.owned or pool.selects == service:
        return service
    return ""


def _selected(service: Object, selector: Object) -> str | None:
    owner = (service["metadata"].get("labels") or {}).get(names.SERVICE_LABEL)
    if selector.get(names.SERVICE_LABEL) != owner or selector.keys() - {names.SERVICE_LABEL, names.REVISION_LABEL}:
        return None
    return str(selector.get(names.REVISION_LABEL, ""))


def route_view(route: Object) -> RouteView:
    """Return the view of an HTTPRoute."""
    metadata, rules = route["metadata"], (route.get("spec") or {}).get("rules") or ()
    return RouteView(metadata["name"], metadata.get("resourceVersion", ""), tuple(rules))


def _named(containers: Sequence[Object], name: str) -> Object:
    return next((c for c in containers if c.get("name") == name), {})


def _exit_message(container: Object) -> str | None:
    for where in ("state", "lastState"):
        ended = (container.get(where) or {}).get("terminated")
        if ended:
            return _words(ended) or lines(f"{ended.get('reason', 'exited')} with code {ended.get('exitCode')}")
    return None
