"""A Snapshot of the cluster and of the engines' pages: only our own pods are scraped, and missing values are None."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API, KIND
from kvpilot_operator.budget import METRICS_WORK_PER_SECOND
from kvpilot_operator.cluster.objects import path_of
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe.api_reads import API_SECONDS, AUTOSCALER_SECONDS, FORGET_SECONDS, ApiReads
from kvpilot_operator.state.objects import ObjectView
from kvpilot_operator.state.questions import Question
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts, ServerFacts, ServiceKey
from support.observed import OURS, REAL, World, edited, pod, route
from support.services import KEY, manifest, spec_of


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    one = World(monkeypatch)
    yield one
    await one.scraper.close()


async def test_a_snapshot_has_the_reports_of_engines_and_nodes(world: World) -> None:
    await world.scrape(2)
    found = await world.snapshot()
    assert found.model == ModelFacts(head_dim=64, kv_heads=2, layers=2, window_layers=0, mla=False)
    assert found.node == NodeFacts("NVIDIA-H200", (9, 0), 143_771)
    sample = found.last_sample("r1")
    assert sample is not None
    assert (sample.pods, sample.observed_dtype, sample.flows.seconds) == (1, "k4v4", 5)
    assert world.asked == ["http://10.0.0.1:8000"] * 2


async def test_a_snapshot_has_the_first_gpu_of_a_services_nodes_and_the_image_of_its_deployment(
    world: World,
) -> None:
    world.cluster.objects[path_of("v1", "Node", "", "node-0")] = {"metadata": {"name": "node-0"}}
    world.put({**pod("b", "10.0.0.2"), "spec": {"nodeName": "node-0"}})
    containers = [{"name": "sidecar", "image": "s:1"}, {"name": "engine", "image": "e:1"}]
    world.put({**deployment(), "spec": {"replicas": 1, "template": {"spec": {"containers": containers}}}})
    found = await world.snapshot()
    assert found.node.gpu == "NVIDIA-H200"
    assert found.deployments["r1"].image == "e:1"


def autoscaler(name: str, target: str, kind: str = KIND, **about: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, **about}, "spec": {"scaleTargetRef": {"kind": kind, "name": target}}}


async def test_an_autoscaler_of_a_service_that_kvpilot_scales_is_found_by_infrequent_list_requests(
    world: World,
) -> None:
    path = path_of("autoscaling/v1", "HorizontalPodAutoscaler", KEY.namespace)
    keda = {"ownerReferences": [{"kind": "ScaledObject", "name": "web"}]}
    world.cluster.objects[path] = [
        autoscaler("a", KEY.name, "Deployment"), autoscaler("b", "other"), autoscaler("keda-hpa-web", KEY.name, **keda)
    ]  # fmt: skip
    assert (await world.snapshot()).autoscaler == "ScaledObject web"
    world.cluster.objects[path] = [autoscaler("hpa", KEY.name)]
    world.now += timedelta(seconds=AUTOSCALER_SECONDS - 1)
    assert (await world.snapshot()).autoscaler == "ScaledObject web"
    world.now += timedelta(seconds=1)
    assert (await world.snapshot()).autoscaler == "HorizontalPodAutoscaler hpa"
    assert world.cluster.asked.count(path) == 2
    world.put(edited(scaling={"mode": "External"}))
    assert (await world.snapshot()).autoscaler is None


async def test_autoscalers_are_dropped_from_the_cache_once_no_service_needs_them(world: World) -> None:
    seconds, spec = 0.0, spec_of(manifest())
    known = ApiReads(world.cluster, ServerFacts(), lambda: seconds)  # type: ignore[arg-type]
    await known.autoscaler(ServiceKey("gone", "a"), spec)
    assert "'gone'): (" in repr(known)
    seconds = FORGET_SECONDS
    await known.autoscaler(ServiceKey("here", "a"), spec)
    assert "'here'): (" in repr(known)
    assert "'gone'): (" not in repr(known)


async def test_a_deployments_version_changes_with_its_spec_and_not_with_its_pods(world: World) -> None:
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
async def test_a_deployment_with_only_our_labels_is_not_ours(world: World, metadata: Any) -> None:
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
async def test_only_our_service_with_our_selector_counts_as_traffic(
    world: World, selector: dict[str, str], owner: str, traffic: str | None
) -> None:
    world.put(service(selector, ownerReferences=[{"uid": owner}]))
    assert (await world.snapshot()).traffic == traffic


async def test_refusals_of_pods_are_reported_without_the_pods_name(world: World) -> None:
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
async def test_a_pod_with_only_our_label_is_neither_scraped_nor_counted(world: World, owner: str | None) -> None:
    world.put(pod("stranger", "10.6.6.6", owner=owner))
    await world.scrape()
    assert world.asked == ["http://10.0.0.1:8000"]
    assert [view.name for view in (await world.snapshot()).pods] == ["a"]


async def test_a_ready_pod_without_an_answer_is_counted_and_an_unready_one_is_not(world: World) -> None:
    world.put(pod("b", "10.0.0.2"), pod("c", "10.0.0.3", ready=False))
    await world.scrape()
    sample = (await world.snapshot()).last_sample("r1")
    assert sample is not None
    assert (sample.pods, sample.unanswered) == (1, 1)
    assert sorted(world.heard) == [False, True]


async def test_a_pod_with_refused_pages_is_scraped_less_often_until_one_is_valid(world: World) -> None:
    world.put(pod("b", "10.0.0.2"))
    bad = "http://10.0.0.2:8000"
    await world.scrape(60)
    assert world.asked.count("http://10.0.0.1:8000") == 60
    # Scrapes are at 0, 5, 10, 15, 25 and 45 seconds, and then every 30 seconds.
    assert world.asked.count(bad) == 6 + 8
    found = await world.snapshot()
    # A pod that a scrape skips because of its failures still counts as unanswered.
    assert {(s.pods, s.unanswered) for s in found.samples["r1"]} == {(1, 1)}
    assert found.backed_off == {"b": f"{bad}: HTTP 404"}
    world.pages[bad] = REAL
    await world.scrape(7)
    assert (await world.snapshot()).backed_off == {}
    del world.asked[:]
    await world.scrape(4)
    assert world.asked.count(bad) == 4


async def test_a_service_with_costly_pages_is_scraped_completely_but_less_often(world: World) -> None:
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


async def test_an_evicted_pod_is_neither_scraped_nor_counted(world: World) -> None:
    evicted = pod("b", "10.0.0.2")
    evicted["status"]["phase"] = "Failed"
    world.put(evicted)
    await world.scrape()
    assert len(world.asked) == 1
    assert [view.name for view in (await world.snapshot()).pods] == ["a"]


async def test_an_address_of_version_6_is_written_in_brackets(world: World) -> None:
    world.drop("Pod", "a")
    world.put(pod("a", "fd00::7"))
    await world.scrape()
    assert world.asked == ["http://[fd00::7]:8000"]


async def test_a_pod_with_implausible_metrics_is_reported_with_its_figure(world: World) -> None:
    lie = REAL.replace('vllm:num_requests_running{engine="0",model_name="m"} 8.0', "vllm:num_requests_running 0.0")
    world.pages["http://10.0.0.1:8000"] = lie
    await world.scrape(20)
    (told,) = (await world.snapshot()).samples["r1"][-1].implausible
    assert told.startswith("a: KV use is 27% while nothing runs, for ")


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


async def test_no_route_is_read_if_the_server_lacks_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.cluster.served.clear()
    world.put(edited(canary={"routeRef": {"name": "chat-route"}}))
    assert (await world.snapshot()).route is None
    assert not any("httproutes" in path for path in world.cluster.asked)
    await world.scraper.close()


POOLS = {"endpointPickerRef": {"name": "epp", "port": {"number": 9002}}}


def pool(revision: str, **about: Any) -> dict[str, Any]:
    labels = {"kvpilot.io/service": KEY.name, "kvpilot.io/revision": revision}
    metadata = {**OURS, "name": KEY.name, "uid": "p-1", "generation": 3, "resourceVersion": "9", "labels": labels}
    return {"metadata": {**metadata, **about}, "spec": {"selector": {"matchLabels": labels}}}


async def test_an_api_that_is_installed_while_the_operator_runs_is_noticed(world: World) -> None:
    world.put(edited(inferencePool=POOLS))
    world.cluster.served.clear()
    assert not (await world.snapshot()).server.inference_pools
    world.cluster.served.add(INFERENCE_POOL_API)
    assert not (await world.snapshot()).server.inference_pools
    world.now += timedelta(seconds=API_SECONDS)
    assert (await world.snapshot()).server.inference_pools
    assert world.cluster.asked.count(INFERENCE_POOL_API) == 2


async def test_an_api_that_no_spec_needs_is_not_looked_up(world: World) -> None:
    await world.snapshot()
    assert not {HTTP_ROUTE_API, INFERENCE_POOL_API} & set(world.cluster.asked)


async def test_traffic_is_the_revision_that_service_and_pool_both_select(world: World) -> None:
    world.put(edited(inferencePool=POOLS), service(pool("r1")["spec"]["selector"]["matchLabels"]))
    path = path_of(INFERENCE_POOL_API, "InferencePool", KEY.namespace, KEY.name)
    assert (await world.snapshot()).traffic == "r1"
    for selected, traffic in (("r1", "r1"), ("r2", "")):
        world.cluster.objects[path] = pool(selected)
        found = await world.snapshot()
        assert found.traffic == traffic
        assert found.objects["InferencePool", KEY.name] == ObjectView("p-1", True, "3", selected)
    world.cluster.objects[path] = pool("r2", ownerReferences=[])
    assert (await world.snapshot()).traffic == "r1"


async def test_an_unreadable_pool_may_select_any_revision(world: World) -> None:
    world.put(edited(inferencePool=POOLS), service(pool("r1")["spec"]["selector"]["matchLabels"]))
    world.cluster.broken["InferencePool"] = ClusterError("GET", "/x", 403, "forbidden")
    found = await world.snapshot()
    assert found.traffic == ""
    assert found.unread(Question.POOLS) is not None


async def test_a_service_that_is_deleted_has_no_snapshot(world: World) -> None:
    world.drop(KIND, KEY.name)
    assert await world.observer.snapshot(world.known, None) is None
