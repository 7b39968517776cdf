"""Process that replaces the Deployment controller, the scheduler and all kubelets.

    python -m benchmarks.operator.fleet_kubelets KUBECONFIG

The process watches our Deployments, and creates as many pods as each of them requests. Pods are bound to a node,
Running and Ready, and each has its own address in 127.0.0.0/8. They are real objects of the real API server, but run no
containers.
"""

import asyncio
import contextlib
import sys
from collections import Counter

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient

from kvpilot_operator.api.names import ADMITTED, DTYPE_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.errors import ClusterError

NODES = 100
AT_ONCE = 12


KINDS = (
    "good", "label", "quoted", "large", "lines", "hang", "drip",
    "objects", "probe-hang", "maps", "yaml", "spec", "route",
)  # fmt: skip
"""Kinds of engines, by the first part of a service's name. Engines of services with other names are good."""


def kind_of(deployment: Object) -> int:
    """Return the index in `KINDS` of the kind of this Deployment's engines."""
    return next((i for i, kind in enumerate(KINDS) if deployment["metadata"]["name"].startswith(f"{kind}-0")), 0)


def address(number: int, deployment: Object) -> str:
    """Return the address of pod `number` of a Deployment.

    Addresses begin at 127.(100 + kind).0.1, and for pods with a quantized dtype at 127.(100 + kind).128.1.
    """
    half = 0 if deployment["metadata"]["labels"].get(DTYPE_LABEL, "auto") == "auto" else 128
    return numbered(number, kind_of(deployment), half)


def numbered(number: int, kind: int = 0, half: int = 0) -> str:
    """Return the address of pod `number` of a kind of engines. `half` is 128 for pods with a quantized dtype."""
    return f"127.{100 + kind}.{half + number // 250}.{number % 250 + 1}"


def status_of_paused(deployment: Object) -> Object | None:
    """Return the status that a Deployment controller would write to a paused Deployment.

    Return None if the Deployment is not paused, or if its status is up to date. The operator pauses a promoted
    Deployment, and resumes it once the status shows that the controller has seen the new template.
    """
    spec, seen = deployment["spec"], deployment["metadata"]["generation"]
    if not spec.get("paused") or (deployment.get("status") or {}).get("observedGeneration") == seen:
        return None
    pods = ("replicas", "updatedReplicas", "readyReplicas")
    return {"observedGeneration": seen, **dict.fromkeys(pods, spec.get("replicas", 1))}


class Kubelets:
    """Creator of pods for every Deployment. A pod gets a number that is unique among pods of its kind of engine."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[tuple[str, str], int] = {}
        self._numbers: Counter[int] = Counter()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Follow the Deployments and create their pods, forever."""
        version = ""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    if not version:
                        async for items, listed in self._cluster.pages("apps/v1", "Deployment", "", SERVICE_LABEL):
                            version = listed
                            for one in items:
                                self._take(group, one)
                    watch = self._cluster.watch("apps/v1", "Deployment", "", SERVICE_LABEL, version)
                    async for kind, one in watch:
                        version = one["metadata"]["resourceVersion"]
                        if kind in ("ADDED", "MODIFIED"):
                            self._take(group, one)
                except ClusterError as error:
                    version = "" if error.status else version
                    await asyncio.sleep(0.5)

    def _take(self, group: asyncio.TaskGroup, deployment: Object) -> None:
        about = deployment["metadata"]
        key = (about["namespace"], about["name"])
        have = self._made.get(key, 0)
        wanted = deployment["spec"].get("replicas", 1)
        for i in range(have, wanted):
            kind = kind_of(deployment)
            self._numbers[kind] += 1
            group.create_task(self._start(deployment, i, self._numbers[kind]))
        self._made[key] = max(have, wanted)
        if (status := status_of_paused(deployment)) is not None:
            group.create_task(self._tell(about["namespace"], about["name"], status))

    async def _tell(self, namespace: str, name: str, status: Object) -> None:
        with contextlib.suppress(ClusterError):
            ref = Ref("apps/v1", "Deployment", namespace, name)
            await self._cluster.merge(ref, {"status": status}, subresource="status")

    async def _start(self, deployment: Object, i: int, number: int) -> None:
        about, template = deployment["metadata"], deployment["spec"]["template"]
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{about['name']}-5d9c7", "uid": about["uid"]}
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "namespace": about["namespace"],
                "name": f"{about['name']}-5d9c7-{i}",
                "labels": template["metadata"]["labels"],
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {**template["spec"], "nodeName": f"gpu-{number % NODES}"},
        }
        async with self._places:
            with contextlib.suppress(ClusterError):
                await self._cluster.create(pod)
            await set_ready(
                self._cluster, about["namespace"], pod["metadata"]["name"], True, address(number, deployment)
            )


async def set_ready(cluster: Cluster, namespace: str, name: str, ready: bool, ip: str | None = None) -> Object:
    """Write a pod's status as a kubelet would report it, and return the pod."""
    word = "True" if ready else "False"
    status: Object = {
        "phase": "Running",
        # A merge patch replaces the whole list. So repeat the condition of the readiness gate (ADMITTED), which would
        # close otherwise.
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": ADMITTED, "status": "True"},
            {"type": "ContainersReady", "status": word},
            {"type": "Ready", "status": word},
        ],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": ready,
                "restartCount": 0,
                "image": "runtime",
                "imageID": "",
                "state": {"running": {"startedAt": "2026-11-21T12:00:00Z"}},
            }
        ],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "127.0.0.1"}
    patch = {"status": status}
    return await cluster.merge(Ref("v1", "Pod", namespace, name), patch, subresource="status")


async def main(kubeconfig: str) -> None:
    """Connect to the API server, and create pods forever."""
    await config.load_kube_config(config_file=kubeconfig)
    await Kubelets(Cluster(ApiClient())).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
