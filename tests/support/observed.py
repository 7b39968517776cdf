"""The operator's Observer, over a cache and engines that tests fill by hand."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvpilot_localcluster.engines import PAGE_LATER
from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API
from kvpilot_operator.cluster.objects import Ref, path_of
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.gather import Observations, Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServerFacts, Snapshot
from support.metrics_pages import parse_page
from support.services import KEY, manifest

REAL = PAGE_LATER.read_text()
NODE = {
    "metadata": {
        "name": "node-1",
        "labels": {
            "nvidia.com/gpu.product": "NVIDIA-H200",
            "nvidia.com/gpu.compute.major": "9",
            "nvidia.com/gpu.compute.minor": "0",
            "nvidia.com/gpu.memory": "143771",
        },
    },
    "status": {"allocatable": {"nvidia.com/gpu": "8"}},
}


OURS = {"uid": "d-1", "ownerReferences": [{"uid": "u-1"}]}


def pod(name: str, ip: str, *, revision: str = "r1", owner: str | None = "chat-r1-5d9", ready: bool = True) -> Any:
    reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "controller": True}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": KEY.namespace,
            "labels": {"kvpilot.io/service": KEY.name, "kvpilot.io/revision": revision},
            "ownerReferences": [reference] if owner else [],
        },
        "spec": {"nodeName": "node-1"},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def edited(**spec: Any) -> dict[str, Any]:
    obj = manifest(**spec)
    obj["metadata"] |= {"generation": 2, "resourceVersion": "2"}
    return obj


def route(*rules: Any) -> dict[str, Any]:
    return {"metadata": {"name": "chat-route", "resourceVersion": "7"}, "spec": {"rules": list(rules)}}


@dataclass
class FakeCluster:
    """Stand-in for Cluster with the reads that an Observer needs, over a dict of objects by path."""

    objects: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    broken: dict[str, Exception] = field(default_factory=dict)
    """Errors to raise when an object of a kind is read, by kind."""
    served: set[str] = field(default_factory=lambda: {HTTP_ROUTE_API, INFERENCE_POOL_API})

    async def serves(self, api_version: str) -> bool:
        self.asked.append(api_version)
        return api_version in self.served

    async def find(self, ref: Ref) -> Any:
        path = ref.path
        self.asked.append(path)
        if ref.kind in self.broken:
            raise self.broken[ref.kind]
        return self.objects.get(path)

    async def first(self, api_version: str, kind: str, namespace: str, *, limit: int) -> list[Any]:
        path = path_of(api_version, kind, namespace)
        self.asked.append(path)
        if kind in self.broken:
            raise self.broken[kind]
        return list(self.objects.get(path, ()))[:limit]

    async def find_json(self, ref: Ref, *, most: int) -> bytes | None:
        found = await self.find(ref)
        return None if found is None else json.dumps(found).encode()


class World:
    """Observer over a hand-filled cache, with engines that answer from `pages`, by URL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **facts: bool) -> None:
        self.cluster = FakeCluster({path_of("v1", "Node", "", "node-1"): NODE})
        self.cache = InformerCache(self.cluster, ())  # type: ignore[arg-type]
        self.put(manifest(), pod("a", "10.0.0.1"))
        labels = {"kvpilot.io/service": KEY.name, "kvpilot.io/revision": "r1", "kvpilot.io/dtype": "auto"}
        about = {"name": "chat-r1", "namespace": KEY.namespace, "labels": labels, "generation": 1, **OURS}
        self.put({"kind": "Deployment", "metadata": about, "spec": {"replicas": 1}})
        self.pages = {"http://10.0.0.1:8000": REAL}
        self.asked: list[str] = []
        self.heard: list[bool] = []
        self.work = 0
        self.now = datetime(2026, 11, 21, 12, 0, 0, 400_000, tzinfo=UTC)
        self.scraper, self.known = Scraper(), Observations(KEY, "u-1")
        self.observer = Observer(
            self.cluster,  # type: ignore[arg-type]
            self.cache,
            self.scraper,
            ServerFacts(**facts),
            lambda: self.now,
            self.heard.append,
            lambda: self.now.timestamp(),
        )
        monkeypatch.setattr(self.scraper, "scrape", self._answer)

    def put(self, *objects: Any) -> None:
        for obj in objects:
            about = obj["metadata"]
            self.cache.wrote(obj["kind"], about["namespace"], about["name"], obj)

    def drop(self, kind: str, name: str) -> None:
        self.cache.wrote(kind, KEY.namespace, name, None)

    async def scrape(self, times: int = 1) -> None:
        for _ in range(times):
            await self.observer.scrape(self.known)
            self.now += timedelta(seconds=5)

    async def snapshot(self) -> Snapshot:
        found = await self.observer.snapshot(self.known, None)
        assert found is not None
        return found

    async def _answer(self, service: object, url: str, spend: Callable[[int], None]) -> PodMetrics:
        self.asked.append(url)
        spend(self.work)
        if url not in self.pages:
            raise ScrapeError(f"{url}: HTTP 404")
        page = parse_page(self.pages[url])
        # A working engine generates tokens between two scrapes.
        made = page.totals.generation_tokens + len(self.asked)
        return replace(page, totals=replace(page.totals, generation_tokens=made))
