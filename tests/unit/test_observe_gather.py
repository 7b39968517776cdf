"""A Snapshot from the cluster and the engines' pages: only our pods are asked, and what is missing is None."""

from __future__ import annotations

import gc
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvpilot_localcluster.engines import PAGE_LATER
from kvpilot_operator.budget import METRICS_WORK_PER_SECOND
from kvpilot_operator.cluster.objects import path_of
from kvpilot_operator.errors import ClusterError, ScrapeError
from kvpilot_operator.observe import gather, informers
from kvpilot_operator.observe.gather import NODE_SECONDS, PACKS_SECONDS, Observations, Observer
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.observe.page import PodMetrics, parse_page
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.observe.views import node_facts, route_view
from kvpilot_operator.render.names import API_VERSION, HTTP_ROUTE_API, KIND
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts, ProbePlan, ServerFacts, Snapshot
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
    """The one read that an Observer asks of Cluster, over a dict of objects by path."""

    objects: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    broken: dict[str, Exception] = field(default_factory=dict)
    """By kind: what reading it raises."""

    async def find(self, api_version: str, kind: str, namespace: str, name: str) -> Any:
        path = path_of(api_version, kind, namespace, name)
        self.asked.append(path)
        if kind in self.broken:
            raise self.broken[kind]
        return self.objects.get(path)

    async def find_json(self, api_version: str, kind: str, namespace: str, name: str, *, most: int) -> bytes | None:
        found = await self.find(api_version, kind, namespace, name)
        return None if found is None else json.dumps(found).encode()


class World:
    """An Observer over a cache that is filled by hand, and engines that answer from `pages` by URL."""

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
        return parse_page(self.pages[url])


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    one = World(monkeypatch, http_routes=True)
    yield one
    await one.scraper.close()


async def test_a_snapshot_holds_what_engines_and_nodes_say(world: World) -> None:
    await world.scrape(2)
    found = await world.snapshot()
    assert found.model == ModelFacts(head_dim=64, kv_heads=2, layers=2, window_layers=0, mla=False)
    assert found.node == NodeFacts("NVIDIA-H200", (9, 0), 143_771)
    sample = found.last_sample("r1")
    assert sample is not None
    assert (sample.pods, sample.observed_dtype, sample.flows.seconds) == (1, "k4v4", 5)
    assert world.asked == ["http://10.0.0.1:8000"] * 2


async def test_versions_move_with_what_a_deployment_should_be_and_not_with_its_pods(world: World) -> None:
    about = {"name": "chat-r1", "namespace": KEY.namespace, "labels": {"kvpilot.io/service": KEY.name}}
    told = []
    for generation, resource_version in ((1, "10"), (1, "11"), (2, "12")):
        about |= {"generation": generation, "resourceVersion": resource_version}
        world.put({"kind": "Deployment", "metadata": dict(about), "spec": {"replicas": 1}})
        told.append((await world.snapshot()).objects["Deployment", "chat-r1"].version)
    assert told == ["1", "1", "2"]


def deployment(**more: Any) -> dict[str, Any]:
    labels = {"kvpilot.io/service": KEY.name, "kvpilot.io/revision": "r1", "kvpilot.io/dtype": "auto"}
    about = {"name": "chat-r1", "namespace": KEY.namespace, "labels": labels, "resourceVersion": "9", **OURS}
    return {"kind": "Deployment", "metadata": {**about, **more.pop("metadata", {})}, "spec": {"replicas": 1}, **more}


def service(selector: dict[str, str], **more: Any) -> dict[str, Any]:
    labels = {"kvpilot.io/service": KEY.name}
    about = {"name": KEY.name, "namespace": KEY.namespace, "labels": labels, **OURS, **more}
    return {"kind": "Service", "metadata": about, "spec": {"selector": selector}}


@pytest.mark.parametrize(
    "metadata", [{"ownerReferences": []}, {"ownerReferences": [{"uid": "u-0"}]}, {"name": "chat-other"}]
)
async def test_a_deployment_that_only_wears_our_labels_is_none_of_ours(world: World, metadata: Any) -> None:
    world.drop("Deployment", "chat-r1")
    world.put(deployment(metadata=metadata))
    assert (await world.snapshot()).deployments == {}


OWN = {"kvpilot.io/service": KEY.name}


@pytest.mark.parametrize(
    ("selector", "owner", "traffic"),
    [
        (OWN | {"kvpilot.io/revision": "r1"}, "u-1", "r1"),
        (OWN, "u-1", ""),
        (OWN | {"app": "shop"}, "u-1", None),
        ({"kvpilot.io/service": "other"}, "u-1", None),
        ({}, "u-1", None),
        (OWN | {"kvpilot.io/revision": "r1"}, "somebody else", None),
    ],
)
async def test_only_a_service_of_ours_that_selects_our_pods_alone_brings_them_traffic(
    world: World, selector: dict[str, str], owner: str, traffic: str | None
) -> None:
    world.put(service(selector, ownerReferences=[{"uid": owner}]))
    assert (await world.snapshot()).traffic == traffic


async def test_why_pods_cannot_be_created_is_told_without_the_name_that_each_attempt_has(world: World) -> None:
    told = set()
    for version, name in (("10", "chat-r1-5d9-vtgc2"), ("11", "chat-r1-5d9-89qxh")):
        message = f'pods "{name}" is forbidden: exceeded quota: team'
        failed = [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}]
        world.put(deployment(metadata={"resourceVersion": version}, status={"conditions": failed}))
        told.add((await world.snapshot()).deployments["r1"].failure)
    assert told == {"exceeded quota: team"}
    over = [{"type": "ReplicaFailure", "status": "False"}]
    world.put(deployment(metadata={"resourceVersion": "12"}, status={"conditions": over}))
    assert (await world.snapshot()).deployments["r1"].failure is None


async def test_no_sample_is_later_than_the_snapshot_that_holds_it(world: World) -> None:
    await world.observer.scrape(world.known)
    found = await world.snapshot()
    assert found.now.microsecond == 0
    assert all(sample.time <= found.now for sample in found.samples["r1"])


async def test_scrapes_within_one_second_lose_no_flows(world: World) -> None:
    later = REAL.replace("vllm:prompt_tokens_total{", 'vllm:prompt_tokens_total{x="1",')
    for tokens in (2404, 2500, 2600):
        world.pages["http://10.0.0.1:8000"] = later.replace("} 2404.0", f"}} {tokens}.0")
        await world.observer.scrape(world.known)
        world.now += timedelta(seconds=0.25)
    samples = (await world.snapshot()).samples["r1"]
    assert sum(s.flows.prompt_tokens for s in samples) == 2600 - 2404


@pytest.mark.parametrize("owner", [None, "other-r1-5d9", "chat-r2-5d9"])
async def test_a_pod_that_only_wears_our_label_is_neither_asked_nor_counted(world: World, owner: str | None) -> None:
    world.put(pod("stranger", "10.6.6.6", owner=owner))
    await world.scrape()
    assert world.asked == ["http://10.0.0.1:8000"]
    assert [view.name for view in (await world.snapshot()).pods] == ["a"]


async def test_a_pod_that_does_not_answer_is_counted_and_one_that_is_not_ready_is_not(world: World) -> None:
    world.put(pod("b", "10.0.0.2"), pod("c", "10.0.0.3", ready=False))
    await world.scrape()
    sample = (await world.snapshot()).last_sample("r1")
    assert sample is not None
    assert (sample.pods, sample.unanswered) == (1, 1)
    assert sorted(world.heard) == [False, True]


async def test_a_pod_whose_pages_are_refused_is_asked_less_often_until_one_is_good(world: World) -> None:
    world.put(pod("b", "10.0.0.2"))
    bad = "http://10.0.0.2:8000"
    await world.scrape(60)
    assert world.asked.count("http://10.0.0.1:8000") == 60
    # At 0, 5, 10, 15, 25 and 45 seconds, and then every 30.
    assert world.asked.count(bad) == 6 + 8
    found = await world.snapshot()
    # It is one that did not answer in the scrapes that left it out, too.
    assert {(s.pods, s.unanswered) for s in found.samples["r1"]} == {(1, 1)}
    assert found.backed_off == {"b": f"{bad}: HTTP 404"}
    world.pages[bad] = REAL
    await world.scrape(7)
    assert (await world.snapshot()).backed_off == {}
    del world.asked[:]
    await world.scrape(4)
    assert world.asked.count(bad) == 4


async def test_a_service_whose_pages_take_long_to_read_is_scraped_whole_but_less_often(world: World) -> None:
    world.put(pod("b", "10.0.0.2"))
    world.pages["http://10.0.0.2:8000"] = REAL
    world.work = 7 * METRICS_WORK_PER_SECOND
    await world.scrape(60)
    assert len(world.asked) == 60
    found = await world.snapshot()
    assert {(s.pods, s.unanswered) for s in found.samples["r1"]} == {(2, 0)}
    assert found.backed_off == {}


async def test_a_service_that_is_deleted_is_not_scraped(world: World) -> None:
    await world.scrape()
    world.drop(KIND, KEY.name)
    await world.scrape()
    assert len(world.asked) == 1


async def test_an_evicted_pod_is_neither_asked_nor_counted(world: World) -> None:
    evicted = pod("b", "10.0.0.2")
    evicted["status"]["phase"] = "Failed"
    world.put(evicted)
    await world.scrape()
    assert len(world.asked) == 1
    assert [view.name for view in (await world.snapshot()).pods] == ["a"]


async def test_a_pass_that_finds_all_it_needs_in_the_cache_asks_the_server_for_nothing(world: World) -> None:
    await world.snapshot()
    world.cluster.asked.clear()
    await world.snapshot()
    assert world.cluster.asked == []
    world.now += timedelta(seconds=NODE_SECONDS)
    await world.snapshot()
    assert world.cluster.asked == ["/api/v1/nodes/node-1"]


async def test_the_packs_are_read_again_only_after_an_edit_of_what_they_depend_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    real = gather.probe_plan
    monkeypatch.setattr(gather, "probe_plan", lambda spec, maps: read.append(spec) or real(spec, maps))
    first = (await world.snapshot()).probes
    edits: tuple[dict[str, Any], ...] = ({"rollout": {"denySeconds": 5}}, {"model": {"revision": "v2"}})
    for generation, spec in enumerate(edits, start=2):
        obj = manifest(**spec)
        obj["metadata"] |= {"generation": generation, "resourceVersion": str(generation)}
        world.put(obj)
        last = (await world.snapshot()).probes
    assert len(read) == 2
    assert last != first


async def test_a_pack_that_is_edited_makes_another_plan_and_only_then_is_it_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    real = gather.probe_plan
    monkeypatch.setattr(gather, "probe_plan", lambda spec, maps: read.append(spec) or real(spec, maps))
    path = path_of("v1", "ConfigMap", KEY.namespace, "mine")
    world.put(edited(accuracy={"probeSets": ["configmap/mine"]}))
    text = "prompts: [{name: a, messages: [{role: user, content: %s}]}]"
    plans = []
    for word in ("one", "one", "two", "two"):
        world.cluster.objects[path] = {"data": {"prompts.yaml": text % word, "more": "x" * 1000}}
        plans.append((await world.snapshot()).probes)
        world.now += timedelta(seconds=PACKS_SECONDS)
    assert (len(read), plans[0], plans[2]) == (2, plans[1], plans[3])
    assert plans[0].identity != plans[2].identity


@pytest.mark.parametrize("text", ["prompts: []", "no pack: ["], ids=["nothing wrong", "a fault"])
async def test_a_service_that_does_not_change_has_its_packs_read_once_in_a_while(world: World, text: str) -> None:
    path = path_of("v1", "ConfigMap", KEY.namespace, "mine")
    world.cluster.objects[path] = {"data": {"prompts.yaml": text}}
    world.put(edited(accuracy={"probeSets": ["configmap/mine"]}))
    plans = []
    for _ in range(31):
        plans.append((await world.snapshot()).probes)
        world.now += timedelta(seconds=1)
    assert set(plans) == {plans[0]}
    assert world.cluster.asked.count(path) == 3
    # Whoever edits the spec need not wait, and a clock that was set back delays nobody.
    again = edited(accuracy={"probeSets": ["configmap/mine"], "periodSeconds": 901})
    again["metadata"] |= {"generation": 3, "resourceVersion": "3"}
    world.put(again)
    await world.snapshot()
    assert world.cluster.asked.count(path) == 4
    world.now -= timedelta(hours=1)
    await world.snapshot()
    assert world.cluster.asked.count(path) == 5


async def test_packs_that_the_api_server_did_not_give_are_asked_for_in_the_next_pass(world: World) -> None:
    path = path_of("v1", "ConfigMap", KEY.namespace, "mine")
    world.put(edited(accuracy={"probeSets": ["configmap/mine"]}))
    world.cluster.broken["ConfigMap"] = ClusterError("GET", path, 500, "no")
    for _ in range(2):
        await world.observer.snapshot(world.known, None)
    assert world.cluster.asked.count(path) == 2


async def test_nothing_of_a_pack_is_kept_but_what_its_plan_needs(world: World) -> None:
    names = [f"m{i}" for i in range(16)]
    world.put(edited(accuracy={"probeSets": [f"configmap/{name}" for name in names]}))
    for i, name in enumerate(names):
        data = {"prompts.yaml": f"{i}: [", "more": "x" * 100_000}
        world.cluster.objects[path_of("v1", "ConfigMap", KEY.namespace, name)] = {"data": data}
    tracemalloc.start()
    plan = (await world.snapshot()).probes
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "configmap/m0" in str(plan.fault)
    # The ConfigMaps have 1.6 MB; what is read for the first time in a process (schemas, patterns) is kept, too.
    assert kept < 600_000


async def test_what_has_proved_to_be_old_is_read_again(world: World) -> None:
    path = path_of(API_VERSION, KIND, *KEY)
    world.cluster.objects[path] = edited(engine={"image": "kvpilot/runtime:2"})
    await world.observer.refresh(KEY)
    assert (await world.snapshot()).generation == 2
    del world.cluster.objects[path]
    await world.observer.refresh(KEY)
    assert await world.observer.snapshot(world.known, None) is None


async def test_an_address_of_version_6_is_written_in_brackets(world: World) -> None:
    world.drop("Pod", "a")
    world.put(pod("a", "fd00::7"))
    await world.scrape()
    assert world.asked == ["http://[fd00::7]:8000"]


async def test_a_liar_and_an_older_name_are_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    lie = REAL.replace('vllm:num_requests_running{engine="0",model_name="m"} 8.0', "vllm:num_requests_running 0.0")
    world.pages["http://10.0.0.1:8000"] = lie.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    with caplog.at_level(logging.WARNING):
        await world.scrape(20)
    texts = [record.getMessage() for record in caplog.records]
    assert sum("a: use is 27% while nothing runs" in text for text in texts) == 1
    assert sum("vllm:gpu_cache_usage_perc" in text for text in texts) == 1
    assert len(texts) == 2


async def test_the_route_that_the_spec_names_is_read(world: World) -> None:
    world.put(edited(canary={"routeRef": {"name": "chat-route"}}))
    rule = {"backendRefs": [{"name": "chat", "weight": 95}, {"name": "chat-canary", "weight": 5}, {"name": "docs"}]}
    path = path_of(HTTP_ROUTE_API, "HTTPRoute", KEY.namespace, "chat-route")
    assert path == "/apis/gateway.networking.k8s.io/v1/namespaces/models/httproutes/chat-route"
    assert (await world.snapshot()).route is None
    world.cluster.objects[path] = route(rule)
    found = (await world.snapshot()).route
    assert found is not None
    assert (found.name, found.resource_version, found.rules) == ("chat-route", "7", (rule,))
    assert found.weights == {"chat": 95, "chat-canary": 5}


async def test_no_route_is_asked_for_where_the_server_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, http_routes=False)
    world.put(edited(canary={"routeRef": {"name": "chat-route"}}))
    assert (await world.snapshot()).route is None
    assert not any("httproutes" in path for path in world.cluster.asked)
    await world.scraper.close()


async def test_a_service_that_is_deleted_has_no_snapshot(world: World) -> None:
    world.drop(KIND, KEY.name)
    assert await world.observer.snapshot(world.known, None) is None


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


class NotSent(ClusterError):
    """What cannot be asked for, whoever is asked."""


ODD_READS = [
    NotSent("GET", "/x", 0, "no name of an object"),
    ClusterError("GET", "/x", 403, "forbidden"),
    ClusterError("GET", "/x", 500, "conversion webhook failed"),
    KeyError("rules"),
    RecursionError("too deep"),
]


@pytest.mark.parametrize("error", ODD_READS, ids=repr)
@pytest.mark.parametrize("kind", ["HTTPRoute", "ConfigMap", "Node"])
async def test_one_object_that_cannot_be_read_is_one_question_less(
    kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, http_routes=True)
    world.put(edited(canary={"routeRef": {"name": "chat-route"}}, accuracy={"probeSets": ["configmap/mine"]}))
    world.cluster.objects[path_of(HTTP_ROUTE_API, "HTTPRoute", KEY.namespace, "chat-route")] = route()
    world.cluster.broken = {kind: error}
    found = await world.snapshot()
    (one,) = found.unanswered
    assert one.question == {"HTTPRoute": "Route", "ConfigMap": "ProbeSets", "Node": "Node"}[kind]
    assert one.error.startswith(type(error).__name__)
    assert (found.route is None) == (kind == "HTTPRoute")
    assert (found.probes == ProbePlan()) == (kind == "ConfigMap")
    assert (found.node == NodeFacts()) == (kind == "Node")
    assert len(found.pods) == 1


@pytest.mark.parametrize("status", [0, 429, 502, 503, 504])
@pytest.mark.parametrize("kind", ["HTTPRoute", "ConfigMap", "Node"])
async def test_an_api_server_that_is_away_is_no_fault_of_one_question(
    kind: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, http_routes=True)
    world.put(edited(canary={"routeRef": {"name": "chat-route"}}, accuracy={"probeSets": ["configmap/mine"]}))
    world.cluster.broken = {kind: ClusterError("GET", "/x", status, "away")}
    with pytest.raises(ClusterError):
        await world.snapshot()


async def test_a_node_that_was_read_before_is_still_known_when_it_cannot_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    before = await world.snapshot()
    world.cluster.broken = {"Node": ClusterError("GET", "/x", 403, "forbidden")}
    world.now += timedelta(seconds=NODE_SECONDS + 1)
    after = await world.snapshot()
    assert [one.question for one in after.unanswered] == ["Node"]
    assert after.node == before.node != NodeFacts()


async def test_a_spec_that_cannot_be_read_for_an_unforeseen_error_is_refused_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def odd(_: Any) -> Any:
        raise RecursionError("hunter2")

    world = World(monkeypatch)
    monkeypatch.setattr(informers, "parse", odd)
    world.put(edited(replicas=3))
    found = await world.snapshot()
    assert found.spec is None
    (fault,) = found.faults
    assert fault.field == "spec"
    assert "RecursionError in informers.py:" in fault.message
    assert "hunter2" not in fault.message
    assert found.deployments  # what runs is left as it is
