"""Replicas that are groups of pods on several nodes go through the same trials, by whole groups: their leaders alone
take requests, a canary is one group more, and a group of which a pod ends is made anew."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import pytest_asyncio

from kvpilot_operator.render.names import GROUP_LABEL, INFERENCE_POOL_API, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.render.workloads import LEADER_WORKER_SET
from support.faulty_plane import Component, engine_process
from support.faulty_record import record
from support.faulty_world import IMAGE, NAMESPACE, until
from support.inference_gateway import POOL_CRD, EndpointPicker, pool
from support.killer import Killer
from support.leader_workers import LEADER_WORKER_SET_CRD, LeaderWorkerSets
from support.unprobed import requests

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3600)]

ACCURACY = {"probeSets": ["builtin/structured"]}
DRAIN = {"preStopSeconds": 5, "timeoutSeconds": 20}
ENGINE = {"image": IMAGE, "nodes": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def groups(whole_world):
    """The definition, which comes after the operator has started, and its controller in the place of StatefulSets'."""
    world = whole_world
    await world.create("early", 1, engine=ENGINE)

    async def refused() -> bool:
        return await world.condition("early", "SpecAccepted") == ("False", "Invalid")

    await until(refused, "nodes are refused without the definition")
    assert not await world.pods("early")
    controllers = Component(world.local.plane.folder, "kube-controller-manager")
    controllers.kill()
    controllers.start("--controllers=-statefulset")
    await world.define(LEADER_WORKER_SET_CRD, POOL_CRD)
    async with LeaderWorkerSets(world.rest, NAMESPACE).kept() as sets:
        await world.until_ready("early", 1)
        await world.delete("early")
        yield sets


async def sets_of(world, name):
    return await world.cluster.list(
        LEADER_WORKER_SET.api_version, LEADER_WORKER_SET.name, NAMESPACE, f"{SERVICE_LABEL}={name}"
    )


async def all_pods(world, name):
    return await world.cluster.list("v1", "Pod", NAMESPACE, f"{GROUP_LABEL}={name}")


async def ends(world, name, stage, dtype):
    async def ended() -> bool:
        status = await world.status(name)
        last = status.get("lastCanary") or {}
        return "canary" not in status and (last.get("stage"), last.get("dtype")) == (stage, dtype)

    return await until(ended, f"the trial of {dtype} ends {stage}", seconds=1500)


def moves_groups(written: str) -> bool:
    """Kills after other writes are the same as where a replica is one pod."""
    return written.split()[1].startswith(("services", "leaderworkersets"))


async def test_a_canary_of_groups_is_promoted_and_another_rolled_back_and_leaders_alone_are_asked(world, groups):
    name = "grouped"
    ill = '{"completions": "hang", "only_dtype": "k8v4"}'
    engine = {**ENGINE, "env": [{"name": "FAULTY_ENGINE", "value": ill}]}
    await world.cluster.create(pool(f"all-of-{name}", NAMESPACE, {SERVICE_LABEL: name}))
    await world.serving(name, 2, engine=engine, canary={"steps": []}, accuracy=ACCURACY, drain=DRAIN)
    assert len(await world.pods(name)) == 2
    assert len(await all_pods(world, name)) == 4
    async with EndpointPicker(world.cluster, NAMESPACE, f"all-of-{name}").following() as picker:
        await until(lambda: asyncio.sleep(0, picker.pick() is not None), "the picker has a pod")
        async with requests(world, name, picker.pick) as seen, Killer.of(world, name, moves_groups) as killer:
            first = (await world.status(name))["stable"]["revision"]
            await world.patch(name, {"kvCache": {"dtype": "k4v4"}})
            taken = await ends(world, name, "Promoted", "k4v4")
            await world.patch(name, {"kvCache": {"dtype": "k8v4"}, "canary": {"progressDeadlineSeconds": 30}})
            taken += await ends(world, name, "RolledBack", "k8v4")
    second = (await world.status(name))["stable"]["revision"]
    assert seen.unprobed == []
    assert seen.failed == []
    assert set(seen.answered) == {first, second}
    # Two replicas, and one more: the canary's one group is made of a set that asks for it while the stable one's asks
    # for two, and rollouts ask for no more in all at any moment. Counted is what sets ask for, in one answer of the API
    # server at a time: pods outlive the set that asked for them.
    assert groups.most[name] == 2 + 1
    [left] = await sets_of(world, name)
    assert left["metadata"]["labels"][REVISION_LABEL] == second
    assert any("leaderworkersets" in written for written in killer.killed)
    record(
        f"operator killed {len(killer.killed)} times while a canary of groups is promoted and another rolled back",
        taken,
        what="both trials end, with one group more than replicas at most; no request met an unprobed group",
        answered=seen.answered.total(),
    )
    await world.delete(name)
    await world.cluster.delete(INFERENCE_POOL_API, "InferencePool", NAMESPACE, f"all-of-{name}")


async def test_a_group_whose_worker_ends_is_made_anew_whole_and_the_service_is_scaled_by_groups(world, groups):
    name = "scaled"
    await world.serving(name, 1, engine=ENGINE, drain=DRAIN)
    await world.scale(name, 2)
    await world.until_ready(name, 2)
    workers = [pod for pod in await all_pods(world, name) if SERVICE_LABEL not in pod["metadata"]["labels"]]
    assert len(workers) == 2
    lost = workers[0]["metadata"]
    engine_process(world.local.folder / "node", lost["uid"]).signal(signal.SIGKILL)

    async def anew() -> bool:
        return lost["uid"] not in [pod["metadata"]["uid"] for pod in await all_pods(world, name)]

    began = time.monotonic()
    await until(anew, "the group goes")
    await world.until_ready(name, 2)
    taken = time.monotonic() - began
    record("worker of a replica over two nodes killed", taken, what="its group is made anew, whole, and both answer")
    assert lost["name"].rpartition("-")[0] in groups.made_anew
    await world.scale(name, 1)
    await world.until_ready(name, 1)

    async def fewer() -> bool:
        return len(await all_pods(world, name)) == 2

    await until(fewer, "the workers of the group that went are gone")
    await world.delete(name)
