"""A Snapshot from the cluster and the engines' pages: only our pods are asked, and what is missing is None."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpilot_operator.cluster.client import path_of
from kvpilot_operator.observe.gather import Observer
from kvpilot_operator.observe.views import node_facts, route_view
from kvpilot_operator.observe.windows import Windows
from kvpilot_operator.render.names import HTTP_ROUTE_API
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts, ServerFacts, Snapshot
from support.services import KEY, manifest

REAL = (Path(__file__).parent / "data" / "vllm-0.32.0-later.txt").read_text()
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


def pod(name: str, ip: str, *, revision: str = "r1", owner: str | None = "chat-r1-5d9", ready: bool = True) -> Any:
    reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "controller": True}
    return {
        "metadata": {
            "name": name,
            "labels": {"kvpilot.io/service": KEY.name, "kvpilot.io/revision": revision},
            "ownerReferences": [reference] if owner else [],
        },
        "spec": {"nodeName": "node-1"},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def route(*rules: Any) -> dict[str, Any]:
    return {"metadata": {"name": "chat-route", "resourceVersion": "7"}, "spec": {"rules": list(rules)}}


@dataclass
class FakeCluster:
    """The reads of Cluster over a dict of objects by path."""

    service: Any
    pods: list[Any] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def find(self, api_version: str, kind: str, namespace: str, name: str) -> Any:
        path = path_of(api_version, kind, namespace, name)
        self.asked.append(path)
        return self.service if kind == "QuantizedLLMService" else self.objects.get(path)

    async def list(self, api_version: str, kind: str, namespace: str, selector: str) -> list[Any]:
        assert selector == f"kvpilot.io/service={KEY.name}"
        if kind == "Pod":
            return self.pods
        labels = {"kvpilot.io/revision": "r1", "kvpilot.io/dtype": "auto"}
        return [{"metadata": {"labels": labels}, "spec": {"replicas": 1}}]


class World:
    """An Observer over a fake cluster and engines that answer from `pages` by address."""

    def __init__(self, **facts: bool) -> None:
        self.cluster = FakeCluster(manifest(), [pod("a", "10.0.0.1")])
        self.cluster.objects[path_of("v1", "Node", "", "node-1")] = NODE
        self.pages = {"10.0.0.1": REAL}
        self.asked: list[str] = []
        self.now = datetime(2026, 11, 21, 12, 0, 0, 400_000, tzinfo=UTC)
        self.windows = Windows()
        self.observer = Observer(self.cluster, self.windows, ServerFacts(**facts), lambda: self.now)  # type: ignore[arg-type]
        self.observer._http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    async def scrape(self, times: int = 1) -> None:
        for _ in range(times):
            await self.observer.scrape(KEY)
            self.now += timedelta(seconds=5)

    async def snapshot(self) -> Snapshot:
        found = await self.observer.snapshot(KEY, None)
        assert found is not None
        return found

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        page = self.pages.get(request.url.host)
        return httpx.Response(404) if page is None else httpx.Response(200, text=page)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = World(http_routes=True)
    yield one
    await one.observer.close()


async def test_a_snapshot_holds_what_engines_and_nodes_say(world: World) -> None:
    await world.scrape(2)
    found = await world.snapshot()
    assert found.model == ModelFacts(head_dim=64, kv_heads=2, layers=2, window_layers=0, mla=False)
    assert found.node == NodeFacts("NVIDIA-H200", (9, 0), 143_771)
    sample = found.last_sample("r1")
    assert sample is not None
    assert (sample.pods, sample.observed_dtype, sample.flows.seconds) == (1, "k4v4", 5)
    assert world.asked == ["http://10.0.0.1:8000/metrics"] * 2


async def test_no_sample_is_later_than_the_snapshot_that_holds_it(world: World) -> None:
    await world.observer.scrape(KEY)
    found = await world.snapshot()
    assert found.now.microsecond == 0
    assert all(sample.time <= found.now for sample in found.samples["r1"])


async def test_scrapes_within_one_second_lose_no_flows(world: World) -> None:
    later = REAL.replace("vllm:prompt_tokens_total{", 'vllm:prompt_tokens_total{x="1",')
    for tokens in (2404, 2500, 2600):
        world.pages["10.0.0.1"] = later.replace("} 2404.0", f"}} {tokens}.0")
        await world.observer.scrape(KEY)
        world.now += timedelta(seconds=0.25)
    samples = (await world.snapshot()).samples["r1"]
    assert sum(s.flows.prompt_tokens for s in samples) == 2600 - 2404


@pytest.mark.parametrize("owner", [None, "other-r1-5d9", "chat-r2-5d9"])
async def test_a_pod_that_only_wears_our_label_is_neither_asked_nor_counted(world: World, owner: str | None) -> None:
    world.cluster.pods.append(pod("stranger", "10.6.6.6", owner=owner))
    await world.scrape()
    assert world.asked == ["http://10.0.0.1:8000/metrics"]
    assert [view.name for view in (await world.snapshot()).pods] == ["a"]


async def test_a_pod_that_does_not_answer_is_counted_and_one_that_is_not_ready_is_not(world: World) -> None:
    world.cluster.pods += [pod("b", "10.0.0.2"), pod("c", "10.0.0.3", ready=False)]
    await world.scrape()
    sample = (await world.snapshot()).last_sample("r1")
    assert sample is not None
    assert (sample.pods, sample.unanswered) == (1, 1)


async def test_an_address_of_version_6_is_written_in_brackets(world: World) -> None:
    world.cluster.pods = [pod("a", "fd00::7")]
    await world.scrape()
    assert world.asked == ["http://[fd00::7]:8000/metrics"]


async def test_a_liar_and_an_older_name_are_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    lie = REAL.replace('vllm:num_requests_running{engine="0",model_name="m"} 8.0', "vllm:num_requests_running 0.0")
    world.pages["10.0.0.1"] = lie.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    with caplog.at_level(logging.WARNING):
        await world.scrape(20)
    texts = [record.getMessage() for record in caplog.records]
    assert sum("a: use is 27% while nothing runs" in text for text in texts) == 1
    assert sum("vllm:gpu_cache_usage_perc" in text for text in texts) == 1
    assert len(texts) == 2


async def test_the_route_that_the_spec_names_is_read(world: World) -> None:
    world.cluster.service = manifest(canary={"routeRef": {"name": "chat-route"}})
    rule = {"backendRefs": [{"name": "chat", "weight": 95}, {"name": "chat-canary", "weight": 5}, {"name": "docs"}]}
    path = path_of(HTTP_ROUTE_API, "HTTPRoute", KEY.namespace, "chat-route")
    assert path == "/apis/gateway.networking.k8s.io/v1/namespaces/models/httproutes/chat-route"
    assert (await world.snapshot()).route is None
    world.cluster.objects[path] = route(rule)
    found = (await world.snapshot()).route
    assert found is not None
    assert (found.name, found.resource_version, found.rules) == ("chat-route", "7", (rule,))
    assert found.weights == {"chat": 95, "chat-canary": 5}


async def test_no_route_is_asked_for_where_the_server_knows_none() -> None:
    world = World(http_routes=False)
    world.cluster.service = manifest(canary={"routeRef": {"name": "chat-route"}})
    assert (await world.snapshot()).route is None
    assert not any("httproutes" in path for path in world.cluster.asked)


async def test_a_service_that_is_deleted_has_no_snapshot(world: World) -> None:
    world.cluster.service = None
    assert await world.observer.snapshot(KEY, None) is None


def test_weights_of_rules_add_up_and_other_backends_are_nobodys_business() -> None:
    view = route_view(
        route(
            {"backendRefs": [{"name": "chat"}]},
            {"backendRefs": [{"name": "chat", "weight": 3}, {"name": "chat", "namespace": "elsewhere", "weight": 50}]},
            {"backendRefs": [{"name": "chat-canary", "kind": "ServiceImport", "group": "multicluster.x-k8s.io"}]},
            {"filters": []},
        ),
        KEY,
    )
    assert view is not None
    assert view.weights == {"chat": 4}


def test_a_node_without_labels_of_its_gpu_says_so() -> None:
    bare = {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}
    assert node_facts([{"metadata": {"name": "cpu-only"}}, bare]) == NodeFacts("unlabelled-gpu")
    assert node_facts([{"metadata": {"name": "cpu-only"}}]) == NodeFacts()
