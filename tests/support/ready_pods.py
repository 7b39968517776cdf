"""Ready pods that match the selector of an InferencePool or a Service."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

from kvpilot_operator.api.names import ENGINE_PORT, INFERENCE_POOL_API
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import ClusterError

Backend = Literal["InferencePool", "Service"]
API_OF: dict[Backend, str] = {"InferencePool": INFERENCE_POOL_API, "Service": "v1"}


def selected_by(backend: Object) -> dict[str, str]:
    """Return the labels by which an InferencePool or a Service selects pods."""
    selector: Object = backend["spec"].get("selector") or {}
    labels: dict[str, str] = selector.get("matchLabels", {}) if backend["kind"] == "InferencePool" else selector
    return labels


def holds(pod: Object, condition: str) -> bool:
    """Return True if this condition of the pod is True."""
    return any((one["type"], one["status"]) == (condition, "True") for one in pod["status"].get("conditions", ()))


class ReadyPods:
    """Endpoints of one InferencePool or Service, from a watch of that object and of its namespace's pods."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, kind: Backend = "InferencePool") -> None:
        self._cluster, self._namespace, self._name, self._kind = cluster, namespace, name, kind
        self._backends: dict[str, Object] = {}
        self._pods: dict[str, Object] = {}

    @contextlib.asynccontextmanager
    async def following(self) -> "AsyncIterator[ReadyPods]":
        """Follow the backend and its pods until the block ends."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(follow(self._cluster, *about, self._namespace, store))
                for about, store in (
                    ((API_OF[self._kind], self._kind), self._backends),
                    (("v1", "Pod"), self._pods),
                )
            ]
            yield self
            for task in tasks:
                task.cancel()

    def backend(self) -> Object | None:
        """Return the InferencePool or the Service whose pods are watched; None while it is unknown."""
        return self._backends.get(self._name)

    def endpoints(self) -> list[str] | None:
        """Return ADDRESS:PORT of each Ready pod that the backend selects, or None while the backend is unknown."""
        backend = self.backend()
        if backend is None:
            return None
        wanted = selected_by({**backend, "kind": self._kind}).items()
        ready = [pod for _, pod in sorted(self._pods.items()) if wanted <= _labels(pod).items() and _is_ready(pod)]
        port = backend["spec"]["targetPorts"][0]["number"] if self._kind == "InferencePool" else ENGINE_PORT
        return [f"{pod['status']['podIP']}:{port}" for pod in ready]


async def follow(cluster: Cluster, api_version: str, kind: str, namespace: str, store: dict[str, Object]) -> None:
    """Keep the objects of a kind in `store`, by name and up to date, until cancelled."""
    while True:
        with contextlib.suppress(ClusterError):
            version, found = "", {}
            async for items, listed in cluster.pages(api_version, kind, namespace, ""):
                version = listed
                found.update({item["metadata"]["name"]: item for item in items})
            store.clear()
            store.update(found)
            async for event, obj in cluster.watch(api_version, kind, namespace, "", version):
                _take(store, event, obj)
        await asyncio.sleep(0.1)


def _take(store: dict[str, Object], event: str, obj: Object) -> None:
    if event == "DELETED":
        store.pop(obj["metadata"]["name"], None)
    elif event != "BOOKMARK":
        store[obj["metadata"]["name"]] = obj


def _labels(pod: Object) -> dict[str, str]:
    return pod["metadata"].get("labels") or {}


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
