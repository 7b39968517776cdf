"""Reads from the API server for a Snapshot: their number, and the result of an unusual or missing answer."""

import gc
import tracemalloc
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from kvpilot_operator.api.names import API_VERSION, HTTP_ROUTE_API, KIND
from kvpilot_operator.cluster.objects import path_of
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.observe import informers, probe_packs
from kvpilot_operator.observe.api_reads import FORGET_SECONDS, NODE_SECONDS, ApiReads
from kvpilot_operator.observe.probe_packs import PACKS_SECONDS
from kvpilot_operator.state.snapshot import NodeFacts, ProbePlan, ServerFacts
from support.observed import World, edited, route
from support.services import KEY, manifest, pod


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    one = World(monkeypatch)
    yield one
    await one.scraper.close()


async def test_a_reconcile_with_a_complete_cache_sends_no_request(world: World) -> None:
    await world.snapshot()
    world.cluster.asked.clear()
    await world.snapshot()
    assert world.cluster.asked == []
    world.now += timedelta(seconds=NODE_SECONDS)
    await world.snapshot()
    scalers = path_of("autoscaling/v1", "HorizontalPodAutoscaler", KEY.namespace)
    assert world.cluster.asked == ["/api/v1/nodes/node-1", scalers]


async def test_a_node_without_engines_for_long_is_dropped_from_the_cache(world: World) -> None:
    known = ApiReads(world.cluster, ServerFacts(), lambda: world.now.timestamp())  # type: ignore[arg-type]
    old, new = (pod("p", node=name) for name in ("node-1", "node-2"))
    world.cluster.objects["/api/v1/nodes/node-2"] = world.cluster.objects["/api/v1/nodes/node-1"]
    await known.node([old, new])
    world.now += timedelta(seconds=FORGET_SECONDS - 1)
    await known.node([new])
    assert known.known_node([old]).gpu == "NVIDIA-H200"
    world.now += timedelta(seconds=NODE_SECONDS)
    await known.node([new])
    assert (known.known_node([old]), known.known_node([new]).gpu) == (NodeFacts(), "NVIDIA-H200")


async def test_packs_are_read_again_after_an_edit_of_their_inputs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    real = probe_packs.probe_plan
    monkeypatch.setattr(probe_packs, "probe_plan", lambda spec, maps: read.append(spec) or real(spec, maps))
    first = (await world.snapshot()).probes
    edits: tuple[dict[str, Any], ...] = ({"rollout": {"denySeconds": 5}}, {"model": {"revision": "v2"}})
    for generation, spec in enumerate(edits, start=2):
        obj = manifest(**spec)
        obj["metadata"] |= {"generation": generation, "resourceVersion": str(generation)}
        world.put(obj)
        last = (await world.snapshot()).probes
    assert len(read) == 2
    assert last != first


async def test_an_edited_probe_pack_gives_another_probe_plan(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    real = probe_packs.probe_plan
    monkeypatch.setattr(probe_packs, "probe_plan", lambda spec, maps: read.append(spec) or real(spec, maps))
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
async def test_packs_of_an_unchanged_service_are_read_rarely(world: World, text: str) -> None:
    path = path_of("v1", "ConfigMap", KEY.namespace, "mine")
    world.cluster.objects[path] = {"data": {"prompts.yaml": text}}
    world.put(edited(accuracy={"probeSets": ["configmap/mine"]}))
    plans = []
    for _ in range(31):
        plans.append((await world.snapshot()).probes)
        world.now += timedelta(seconds=1)
    assert set(plans) == {plans[0]}
    assert world.cluster.asked.count(path) == 3
    # An edit of the spec takes effect at once, and a clock that was set back delays no read.
    again = edited(accuracy={"probeSets": ["configmap/mine"], "periodSeconds": 901})
    again["metadata"] |= {"generation": 3, "resourceVersion": "3"}
    world.put(again)
    await world.snapshot()
    assert world.cluster.asked.count(path) == 4
    world.now -= timedelta(hours=1)
    await world.snapshot()
    assert world.cluster.asked.count(path) == 5


async def test_unreadable_packs_are_requested_again_in_the_next_reconcile(world: World) -> None:
    path = path_of("v1", "ConfigMap", KEY.namespace, "mine")
    world.put(edited(accuracy={"probeSets": ["configmap/mine"]}))
    world.cluster.broken["ConfigMap"] = ClusterError("GET", path, 500, "no")
    for _ in range(2):
        await world.observer.snapshot(world.known, None)
    assert world.cluster.asked.count(path) == 2


async def test_the_texts_of_a_probe_pack_are_not_kept_in_memory(world: World) -> None:
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
    # The ConfigMaps have 1.6 MB, so the operator must not keep them. The limit leaves room for cached schemas and
    # patterns.
    assert kept < 600_000


async def test_a_stale_service_is_read_again(world: World) -> None:
    path = path_of(API_VERSION, KIND, *KEY)
    world.cluster.objects[path] = edited(engine={"image": "kvpilot/runtime:2"})
    await world.observer.refresh(KEY)
    assert (await world.snapshot()).generation == 2
    del world.cluster.objects[path]
    await world.observer.refresh(KEY)
    assert await world.observer.snapshot(world.known, None) is None


class NotSent(ClusterError):
    """Error for a request that is not sent, because every server would refuse it."""


ODD_READS = [
    NotSent("GET", "/x", 0, "no name of an object"),
    ClusterError("GET", "/x", 403, "forbidden"),
    ClusterError("GET", "/x", 500, "conversion webhook failed"),
    KeyError("rules"),
    RecursionError("too deep"),
]


@pytest.mark.parametrize("error", ODD_READS, ids=repr)
@pytest.mark.parametrize("kind", ["HTTPRoute", "ConfigMap", "Node"])
async def test_an_unreadable_object_fails_only_the_part_of_a_decision_that_needs_it(
    kind: str, error: Exception, world: World
) -> None:
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
async def test_an_unreachable_api_server_fails_the_whole_reconcile(kind: str, status: int, world: World) -> None:
    world.put(edited(canary={"routeRef": {"name": "chat-route"}}, accuracy={"probeSets": ["configmap/mine"]}))
    world.cluster.broken = {kind: ClusterError("GET", "/x", status, "away")}
    with pytest.raises(ClusterError):
        await world.snapshot()


async def test_a_node_that_was_read_before_is_still_known_when_it_cannot_be_read_again(world: World) -> None:
    before = await world.snapshot()
    world.cluster.broken = {"Node": ClusterError("GET", "/x", 403, "forbidden")}
    world.now += timedelta(seconds=NODE_SECONDS + 1)
    after = await world.snapshot()
    assert [one.question for one in after.unanswered] == ["Node"]
    assert after.node == before.node != NodeFacts()


async def test_an_unexpected_error_in_a_spec_is_reported_as_a_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: Any) -> Any:
        raise RecursionError("hunter2")

    monkeypatch.setattr(informers, "judge", odd)
    world.put(edited(replicas=3))
    found = await world.snapshot()
    assert found.spec is None
    (fault,) = found.faults
    assert fault.field == "spec"
    assert "RecursionError in informers.py:" in fault.message
    assert "hunter2" not in fault.message
    assert found.deployments  # running objects stay known
