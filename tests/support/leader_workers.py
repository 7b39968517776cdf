"""Minimal LeaderWorkerSet: its CRD, and a controller that creates pods as its documentation says.

LeaderWorkerSet numbers workers from 1, but Kubernetes 1.20 numbers the pods of every StatefulSet from 0. So this
controller creates the pods itself, and the cluster's StatefulSet controller must be off. StatefulSets exist only as
owners. StatefulSet NAME owns the leaders. Each leader owns a StatefulSet of its own name, which owns its workers.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from kvpilot_localcluster.rest import ApiError, Rest
from kvpilot_operator.api.names import SERVICE_LABEL
from support.community_kinds import definition

Json = dict[str, Any]

GROUP = "leaderworkerset.x-k8s.io"
LABEL = "leaderworkerset.sigs.k8s.io"
REVISION = f"{LABEL}/template-revision-hash"
_TEMPLATE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_SPEC = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 1000000, "default": 1},
        "startupPolicy": {"type": "string", "enum": ["LeaderCreated", "LeaderReady"], "default": "LeaderCreated"},
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "format": "int32", "minimum": 1, "default": 1},
                "restartPolicy": {
                    "type": "string",
                    "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"],
                    "default": "RecreateGroupOnPodRestart",
                },
                "leaderTemplate": _TEMPLATE,
                "workerTemplate": _TEMPLATE,
            },
        },
    },
}
LEADER_WORKER_SET_CRD = definition(GROUP, "LeaderWorkerSet", "leaderworkersets", _SPEC)
"""CRD of LeaderWorkerSet v1 with the spec fields that the operator sets."""


class LeaderWorkerSets:
    """Controller of one namespace's LeaderWorkerSets. Groups share one Service for their names (policy Shared)."""

    def __init__(self, rest: Rest, namespace: str) -> None:
        self._rest, self._namespace = rest, namespace
        self._sets = f"/apis/{GROUP}/v1/namespaces/{namespace}/leaderworkersets"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._owners = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
        self.most: dict[str, int] = {}
        """Largest number of groups that the sets of a service requested at the same time, by service."""
        self.made_anew: list[str] = []
        """Leaders that were deleted because a pod of their group had ended."""

    @contextlib.asynccontextmanager
    async def kept(self) -> "AsyncIterator[LeaderWorkerSets]":
        """Run the controller's reconcile loop until the block ends."""
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            ended = await asyncio.gather(task, return_exceptions=True)
            if isinstance(ended[0], Exception):
                raise ended[0]

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.reconcile)
            await asyncio.sleep(0.1)

    def reconcile(self) -> None:
        """Bring every set one step closer to its spec. The next step handles concurrent changes."""
        sets = [one for one in self._rest.get(self._sets)["items"] if not _going(one)]
        self._count(sets)
        for one in sets:
            try:
                self._reconcile(one)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise

    def _reconcile(self, one: Json) -> None:
        name, asked = one["metadata"]["name"], one["spec"]["replicas"]
        labels = {f"{LABEL}/name": name}
        found = self._rest.get(f"{self._pods}?labelSelector={LABEL}/name={name}")["items"]
        by_name = {pod["metadata"]["name"]: pod for pod in found}
        leaders = [pod for pod in found if pod["metadata"]["labels"][f"{LABEL}/worker-index"] == "0"]
        whole = self._owner(name, one, labels)
        for leader in leaders:
            if int(leader["metadata"]["labels"][f"{LABEL}/group-index"]) >= asked and not _going(leader):
                self._rest.delete(f"{self._pods}/{leader['metadata']['name']}")
            elif not _going(leader):
                self._group(one, leader, by_name)
        self._roll(one, leaders)
        for index in range(asked):
            if f"{name}-{index}" not in by_name:
                self._pod(one, whole, index, 0)
        ready = sum(map(_ready, leaders))
        status = {"replicas": len(leaders), "readyReplicas": ready, "hpaPodSelector": f"{LABEL}/worker-index=0"}
        if one.get("status") != status:
            self._rest.merge(f"{self._sets}/{name}/status", {"status": status})

    def _roll(self, one: Json, leaders: list[Json]) -> None:
        """Delete the last group of an earlier template once all groups of the present one are ready."""
        earlier = [pod for pod in leaders if pod["metadata"]["labels"][REVISION] != _revision(one)]
        later = [pod for pod in leaders if pod not in earlier]
        if earlier and all(_ready(pod) for pod in later) and not any(map(_going, leaders)):
            last = max(earlier, key=lambda pod: int(pod["metadata"]["labels"][f"{LABEL}/group-index"]))
            self._delete_group(last["metadata"]["name"])

    def _delete_group(self, leader: str) -> None:
        foreground = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
        self._rest.call("DELETE", f"{self._pods}/{leader}", foreground)

    def _group(self, one: Json, leader: Json, by_name: dict[str, Json]) -> None:
        """Reconcile the workers of a leader. Delete the whole group if one of its pods has ended."""
        name, template = leader["metadata"]["name"], one["spec"]["leaderWorkerTemplate"]
        owner = self._owner(name, leader, leader["metadata"]["labels"])
        names = [f"{name}-{worker}" for worker in range(1, template["size"])]
        mine = [by_name[each] for each in names if each in by_name]
        mine = [pod for pod in mine if pod["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]]
        again = template["restartPolicy"] == "RecreateGroupOnPodRestart"
        if again and (_restarted(leader) or any(_restarted(pod) or _going(pod) for pod in mine)):
            self.made_anew.append(name)
            self._delete_group(name)
            return
        group = int(leader["metadata"]["labels"][f"{LABEL}/group-index"])
        for worker, each in enumerate(names, 1):
            if each not in by_name:
                self._pod(one, owner, group, worker)

    def _pod(self, one: Json, owner: Json, group: int, worker: int) -> None:
        parts, name = one["spec"]["leaderWorkerTemplate"], one["metadata"]["name"]
        made = copy.deepcopy(
            parts["workerTemplate"] if worker else parts.get("leaderTemplate", parts["workerTemplate"])
        )
        leader = f"{name}-{group}"
        labels = {
            f"{LABEL}/name": name,
            f"{LABEL}/group-index": str(group),
            f"{LABEL}/worker-index": str(worker),
            REVISION: _revision(one),
            f"{LABEL}/group-key": hashlib.sha1(leader.encode()).hexdigest(),  # noqa: S324
        }
        annotations = {f"{LABEL}/size": str(parts["size"])}
        if worker:
            annotations[f"{LABEL}/leader-name"] = leader
        metadata = made.setdefault("metadata", {})
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        metadata["annotations"] = {**metadata.get("annotations", {}), **annotations}
        metadata["name"] = f"{leader}-{worker}" if worker else leader
        metadata["ownerReferences"] = [_reference(owner, "apps/v1", "StatefulSet")]
        made["spec"].update(hostname=metadata["name"], subdomain=name)
        told = {
            "LWS_LEADER_ADDRESS": f"{leader}.{name}.{self._namespace}",
            "LWS_GROUP_SIZE": str(parts["size"]),
            "LWS_WORKER_INDEX": str(worker),
        }
        for container in (*made["spec"].get("initContainers", ()), *made["spec"]["containers"]):
            # Put these variables first, so that arguments and other variables may refer to them.
            first = [{"name": key, "value": value} for key, value in told.items()]
            container["env"] = first + [each for each in container.get("env", ()) if each["name"] not in told]
        self._rest.create(self._pods, {"apiVersion": "v1", "kind": "Pod", **made})

    def _owner(self, name: str, above: Json, labels: Json) -> Json:
        """Return the StatefulSet of this name that `above` owns, or create it.

        Raise ApiError (409) if a StatefulSet of this name has another owner, which is being deleted.
        """
        leader = "containers" in above["spec"]
        reference = _reference(above, *(("v1", "Pod") if leader else (f"{GROUP}/v1", "LeaderWorkerSet")))
        try:
            found: Json = self._rest.get(f"{self._owners}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine", "image": "none"}]}}
            spec = {"serviceName": name, "selector": {"matchLabels": labels}, "template": template}
            metadata = {"name": name, "labels": labels, "ownerReferences": [reference]}
            made = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}
            found = self._rest.create(self._owners, made)
        if found["metadata"]["ownerReferences"][0]["uid"] != reference["uid"]:
            raise ApiError(409, json.dumps({"message": f"{name} is an earlier one's"}))
        return found

    def _count(self, sets: list[Json]) -> None:
        asked: Counter[str] = Counter()
        for one in sets:
            asked[one["metadata"]["labels"][SERVICE_LABEL]] += one["spec"]["replicas"]
        for service, groups in asked.items():
            self.most[service] = max(self.most.get(service, 0), groups)


def _revision(one: Json) -> str:
    """Return the hash of the templates, which a pod has as a label."""
    return hashlib.sha1(json.dumps(one["spec"]["leaderWorkerTemplate"], sort_keys=True).encode()).hexdigest()  # noqa: S324


def _reference(owner: Json, api_version: str, kind: str) -> Json:
    about = {part: owner["metadata"][part] for part in ("name", "uid")}
    return {"apiVersion": api_version, "kind": kind, **about, "controller": True, "blockOwnerDeletion": True}


def _going(obj: Json) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def _ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _restarted(pod: Json) -> bool:
    status = pod.get("status") or {}
    containers = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    return status.get("phase") in ("Running", "Pending") and any(one["restartCount"] for one in containers)
