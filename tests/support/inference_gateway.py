"""The Gateway API Inference Extension as far as a test needs it: its InferencePool, and an endpoint picker of ours.

The picker does what the extension's protocol asks of one: it follows one pool by its name, and answers with the address
of a pod that the pool's selector matches and that is Ready, or with 503 where there is none. What Kubernetes makes a
Service's endpoints of is the same, and so a Service is followed likewise.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.render.names import HTTP_ROUTE_API, INFERENCE_POOL_API
from support.community_kinds import definition

_NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}
_PORT = {"type": "object", "required": ["number"], "properties": {"number": _NUMBER}}
_PICKER = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "maxLength": 253},
        "kind": {"type": "string", "default": "Service", "minLength": 1, "maxLength": 63},
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
        "port": _PORT,
        "failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"], "default": "FailClose"},
    },
    "x-kubernetes-validations": [
        {"rule": "self.kind != 'Service' || has(self.port)", "message": "a Service as the picker needs its port"}
    ],
}
_SPEC = {
    "type": "object",
    "required": ["endpointPickerRef", "selector", "targetPorts"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 64,
                    "additionalProperties": {"type": "string", "maxLength": 63},
                }
            },
        },
        "targetPorts": {
            "type": "array",
            "x-kubernetes-list-type": "atomic",
            "minItems": 1,
            "maxItems": 8,
            "items": _PORT,
            "x-kubernetes-validations": [
                {"rule": "self.all(a, self.exists_one(b, a.number == b.number))", "message": "ports must differ"}
            ],
        },
        "appProtocol": {"type": "string", "enum": ["http", "kubernetes.io/h2c"], "default": "http"},
        "endpointPickerRef": _PICKER,
    },
}
POOL_CRD = definition("inference.networking.k8s.io", "InferencePool", "inferencepools", _SPEC)
"""InferencePool v1 with the limits of its spec, in our own words; its status, which gateways write, is left open.

Releases v1.0 to v1.5 of the extension require the endpoint picker.
"""
POOL_CRD_1_6 = definition(
    "inference.networking.k8s.io",
    "InferencePool",
    "inferencepools",
    {**_SPEC, "required": ["selector", "targetPorts"]},
)
"""The same as of v1.6, where a pool may be without a picker."""


Backend = Literal["InferencePool", "Service"]
_API_OF: dict[Backend, str] = {"InferencePool": INFERENCE_POOL_API, "Service": "v1"}


def selected_by(backend: Object) -> dict[str, str]:
    """The labels by which an InferencePool or a Service selects pods."""
    selector: Object = backend["spec"].get("selector") or {}
    labels: dict[str, str] = selector.get("matchLabels", {}) if backend["kind"] == "InferencePool" else selector
    return labels


class EndpointPicker:
    """Picks pods for one InferencePool or Service, by watches of that kind and of the pods of its namespace."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, kind: Backend = "InferencePool") -> None:
        self._cluster, self._namespace, self._name, self._kind = cluster, namespace, name, kind
        self._backends: dict[str, Object] = {}
        self._pods: dict[str, Object] = {}
        self._turn = itertools.count()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[EndpointPicker]:
        """Follow the backend until the block ends."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(follow(self._cluster, *about, self._namespace, store))
                for about, store in (
                    ((_API_OF[self._kind], self._kind), self._backends),
                    (("v1", "Pod"), self._pods),
                )
            ]
            yield self
            for task in tasks:
                task.cancel()

    def pick(self) -> Object | None:
        """A pod to send a request to, each in turn; None is a 503 of the picker's."""
        backend = self._backends.get(self._name)
        if backend is None:
            return None
        wanted = selected_by({**backend, "kind": self._kind}).items()
        ready = [pod for _, pod in sorted(self._pods.items()) if wanted <= _labels(pod).items() and _is_ready(pod)]
        return ready[next(self._turn) % len(ready)] if ready else None


async def follow(cluster: Cluster, api_version: str, kind: str, namespace: str, store: dict[str, Object]) -> None:
    """Keep `store` like the objects of a kind, by name, until cancelled."""
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


def pool(name: str, namespace: str, labels: dict[str, str]) -> Object:
    """An InferencePool as a user writes one."""
    spec = {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": 9002}},
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": INFERENCE_POOL_API, "kind": "InferencePool", "metadata": metadata, "spec": spec}


Pick = Callable[[], Object | None]
"""Who is sent the next request; None is a 503."""


class InferenceGateway:
    """Sends each request to a backend of a route's first rule, drawn by weight, and there to a pod of its picker's.

    All backends that the route ever has are of one kind and among these names.
    """

    def __init__(self, cluster: Cluster, namespace: str, route: str, backends: Sequence[str], kind: Backend) -> None:
        self._cluster, self._namespace, self._route = cluster, namespace, route
        self._pickers = {(kind, name): EndpointPicker(cluster, namespace, name, kind) for name in backends}
        self._routes: dict[str, Object] = {}
        self._random = random.Random(0)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[InferenceGateway]:
        """Follow route and backends until the block ends."""
        async with contextlib.AsyncExitStack() as stack:
            for picker in self._pickers.values():
                await stack.enter_async_context(picker.following())
            task = asyncio.create_task(
                follow(self._cluster, HTTP_ROUTE_API, "HTTPRoute", self._namespace, self._routes)
            )
            try:
                yield self
            finally:
                task.cancel()

    def pick(self) -> Object | None:
        """A pod to send a request to; None is a 503."""
        if self._route not in self._routes:
            return None
        refs = self._routes[self._route]["spec"]["rules"][0]["backendRefs"]
        weights = [ref.get("weight", 1) for ref in refs]
        drawn = self._random.choices(refs, weights)[0]
        return self._pickers[drawn.get("kind", "Service"), drawn["name"]].pick()
