"""While no operator runs, new pods of the serving revision get requests, and those of an unprobed canary get none."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from kvpilot_operator.api.names import INFERENCE_POOL_API, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.objects import Object, Ref
from support.drains import evicted
from support.faulty_record import record
from support.faulty_world import NAMESPACE, FaultyWorld, until
from support.inference_gateway import ServiceWay, picked
from support.inference_kinds import POOL_CRD, pool
from support.ready_pods import ReadyPods, holds
from support.unprobed import ACCURACY, DRAIN, InTurns, Requests, ends, requests

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3600)]


async def pods_of(world: FaultyWorld, name: str, revision: str) -> list[Object]:
    """Return the revision's pods that are not terminating."""
    pods = [pod for pod in await world.pods(name) if pod["metadata"]["labels"][REVISION_LABEL] == revision]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


@contextlib.asynccontextmanager
async def asked_by_everybody(world: FaultyWorld, name: str) -> AsyncIterator[Requests]:
    """Send requests alternately to the Service and to an InferencePool that selects all pods of the service."""
    everyone = f"all-of-{name}"
    await world.define(POOL_CRD)
    await world.cluster.create(pool(everyone, NAMESPACE, {SERVICE_LABEL: name}))
    pool_of_all = ReadyPods(world.cluster, NAMESPACE, everyone)
    endpoints = ReadyPods(world.cluster, NAMESPACE, name, "Service")
    async with pool_of_all.following(), endpoints.following(), picked(pool_of_all) as by_picker:
        await until(
            lambda: asyncio.sleep(0, bool(pool_of_all.endpoints() and endpoints.endpoints())),
            "pool and Service have a pod",
        )
        async with requests(world, name, InTurns(by_picker, ServiceWay(endpoints))) as seen:
            yield seen
    await world.cluster.delete(Ref(INFERENCE_POOL_API, "InferencePool", NAMESPACE, everyone))


async def test_without_an_operator_replaced_serving_pods_get_requests_and_a_canarys_pods_get_none(world):
    name = "away"
    await world.serving(name, 2, canary={"steps": []}, accuracy=ACCURACY, drain=DRAIN)
    async with asked_by_everybody(world, name) as seen:
        await world.patch(name, {"kvCache": {"dtype": "k4v4"}})
        await ends(world, name, "Promoted", "k4v4")
        serves = (await world.status(name))["stable"]["revision"]
        promoted = await pods_of(world, name, serves)
        assert all(pod["spec"].get("readinessGates") for pod in promoted)

        async def ungated() -> bool:
            found = await world.cluster.get(Ref("apps/v1", "Deployment", NAMESPACE, f"{name}-{serves}"))
            spec = found["spec"]
            return not spec.get("paused") and not spec["template"]["spec"].get("readinessGates")

        await until(ungated, "the template of the promoted revision has no gate")
        await world.stop_operator()
        # The readiness gate was removed without a restart of the pod.
        ran_on = {pod["metadata"]["uid"] for pod in await pods_of(world, name, serves)}
        assert ran_on == {pod["metadata"]["uid"] for pod in promoted}
        began = time.monotonic()
        await replaced_one_by_one(world, name, serves, promoted)
        record(
            "both pods of a promoted revision evicted one by one while no operator runs",
            time.monotonic() - began,
            what="two new pods are Ready, and no request fails",
            answered=seen.answered.total(),
        )
        await world.start_operator()
        await world.until_ready(name, 2)
        await a_canary_without_an_operator(world, name, serves)
        assert (seen.unprobed, seen.failed, seen.nobody) == ([], [], 0)
        await world.start_operator()
        await ends(world, name, "Promoted", "k8v4")
    assert (seen.unprobed, seen.failed, seen.nobody) == ([], [], 0)
    await world.dial()
    await world.delete(name)


async def replaced_one_by_one(world: FaultyWorld, name: str, revision: str, pods: list[Object]) -> None:
    """Evict each pod as soon as the budget allows it, and wait until all new pods are Ready."""
    gone = {pod["metadata"]["uid"] for pod in pods}

    async def new_ones(count: int) -> bool:
        now = await pods_of(world, name, revision)
        ready = [pod for pod in now if holds(pod, "Ready")]
        assert len(ready) >= len(pods) - 1, "fewer pods are Ready than the budget must leave"
        return sum(pod["metadata"]["uid"] not in gone for pod in ready) >= count

    for count, pod in enumerate(pods, start=1):
        await until(lambda pod=pod: evicted(world, pod), f"the budget lets pod {count} be evicted")
        await until(lambda count=count: new_ones(count), f"new pod {count} is Ready")


async def a_canary_without_an_operator(world: FaultyWorld, name: str, serves: str) -> None:
    """Kill the operator while a canary starts. The canary's pods answer and stay unready, even after a replacement."""

    async def begun() -> bool:
        return (await world.status(name)).get("canary", {}).get("stage") == "Starting"

    await world.patch(name, {"kvCache": {"dtype": "k8v4"}})
    await until(begun, "a canary starts", pause=0.02)
    canary = (await world.status(name))["canary"]["revision"]

    async def made() -> bool:
        return bool(await pods_of(world, name, canary))

    await until(made, "the canary has a pod", pause=0.02)
    world.kill_operator()
    for _ in range(2):
        [pod] = await pods_of(world, name, canary)

        async def answers(uid: str = pod["metadata"]["uid"]) -> bool:
            found = await pods_of(world, name, canary)
            return [(one["metadata"]["uid"], holds(one, "ContainersReady")) for one in found] == [(uid, True)]

        await until(answers, "the engine of the canary answers")
        [pod] = await pods_of(world, name, canary)
        assert not holds(pod, "Ready")
        await world.cluster.delete(Ref("v1", "Pod", NAMESPACE, pod["metadata"]["name"]))
        await until(made, "the canary's pod is replaced")
    assert len(await pods_of(world, name, serves)) == 2


async def test_an_engine_that_hangs_with_a_full_cache_and_a_queue_is_reported_and_changes_nothing(world):
    pressure = {"highPercent": 80, "sustainedSeconds": 10}
    await world.serving("hangs", 2, kvCache={"mode": "Recommend", "ladder": ["k4v4"], "pressure": pressure})
    before = (await world.status("hangs")).get("decisions")
    for pod in await world.pods("hangs"):
        await world.make_ill(pod, usage=0.9, running=24, waiting=15, stalled=True)

    async def told() -> bool:
        return await world.condition("hangs", "MetricsAvailable") == ("False", "EnginesStalled")

    taken = await until(told, "the condition says that the engines are stalled", seconds=700)
    assert await world.condition("hangs", "MemoryPressured") == ("Unknown", "EnginesStalled")
    assert (await world.status("hangs")).get("decisions") == before
    record("engines that hang with a full cache and a queue", taken, what="MetricsAvailable says EnginesStalled")
    await world.delete("hangs")
