"""Replicas that are groups of pods on several nodes go through the same trials, as whole groups.

Only their leaders take requests, a canary adds one group, and a group with an ended pod is recreated.
"""

import signal
import time

import pytest
import pytest_asyncio

from kvpilot_operator.api.names import GROUP_LABEL, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.render.workloads import LEADER_WORKER_SET
from support.faulty_plane import Component, engine_process
from support.faulty_record import record
from support.faulty_world import IMAGE, NAMESPACE, until
from support.gateway import ROUTE_CRD
from support.inference_kinds import POOL_CRD
from support.leader_workers import LEADER_WORKER_SET_CRD, LeaderWorkerSets
from support.ready_pods import holds
from support.routed import by_route
from support.unprobed import DRAIN, promoted_and_rolled_back

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3600)]

ENGINE = {"image": IMAGE, "nodes": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def groups(whole_world):
    """Install the CRD after the operator has started, and a controller that creates the groups' pods."""
    world = whole_world
    await world.create("early", 1, engine=ENGINE)

    async def refused() -> bool:
        return await world.condition("early", "Stalled") == ("True", "SpecInvalid")

    await until(refused, "nodes are refused without the definition")
    assert not await world.pods("early")
    controllers = Component(world.local.plane.folder, "kube-controller-manager")
    controllers.kill()
    controllers.start("--controllers=-statefulset")
    await world.define(LEADER_WORKER_SET_CRD, POOL_CRD, ROUTE_CRD)
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


def moves_groups(written: str) -> bool:
    """Return True for a write that concerns groups. Tests of single-pod replicas cover kills after other writes."""
    return written.split()[1].startswith(("services", "leaderworkersets"))


async def test_canaries_of_groups_are_promoted_and_rolled_back_and_only_leaders_get_requests(world, groups):
    name = "grouped"
    killer, seen, taken = await promoted_and_rolled_back(world, name, moves_groups, nodes=2)

    async def two_groups_of_two() -> bool:
        return (len(await world.pods(name)), len(await all_pods(world, name))) == (2, 2 * 2)

    await until(two_groups_of_two, "only the serving revision remains")
    second = (await world.status(name))["stable"]["revision"]
    # With two replicas and one canary, rollouts never request more than three groups at any moment. Do not count
    # pods, because they outlive their set.
    assert groups.most[name] == 2 + 1
    [left] = await sets_of(world, name)
    assert left["metadata"]["labels"][REVISION_LABEL] == second
    assert any("leaderworkersets" in written for written in killer.killed)
    await groups_need_no_operator(world, name)
    await a_canary_of_groups_waits_for_an_operator(world, name)
    record(
        f"operator killed {len(killer.killed)} times while a canary of groups is promoted and another rolled back",
        taken,
        what="both trials end, with at most one additional group; no request reached an unprobed group",
        answered=seen.answered.total(),
    )
    await world.delete(name)


async def groups_need_no_operator(world, name):
    """Replace each group of a promoted revision while no operator runs."""
    await world.stop_operator()
    for count in (1, 2):
        gone = {pod["metadata"]["uid"] for pod in (await world.pods(name))[:1]}
        [leader] = [pod["metadata"]["name"] for pod in await world.pods(name) if pod["metadata"]["uid"] in gone]
        await world.cluster.delete(Ref("v1", "Pod", NAMESPACE, leader))

        async def replaced(gone=gone):
            pods = [pod for pod in await world.pods(name) if pod["metadata"]["uid"] not in gone]
            return len(pods) == 2 and all(holds(pod, "Ready") for pod in pods)

        await until(replaced, f"group {count} is replaced and Ready")
    await world.start_operator()
    await world.until_ready(name, 2)


async def a_canary_of_groups_waits_for_an_operator(world, name):
    """Kill the operator while a canary starts. The canary's group answers but stays unready, even if replaced."""
    await world.patch(name, {"kvCache": {"dtype": "fp8"}})

    async def begun():
        canary = (await world.status(name)).get("canary", {})
        return canary.get("stage") == "Starting" and bool(await leaders_of(canary["revision"]))

    async def leaders_of(revision):
        return [pod for pod in await world.pods(name) if pod["metadata"]["labels"][REVISION_LABEL] == revision]

    await until(begun, "the canary has a group", pause=0.02)
    world.kill_operator()
    revision = (await world.status(name))["canary"]["revision"]
    gone = ""
    for _ in range(2):

        async def answers(gone=gone):
            found = await leaders_of(revision)
            return [pod["metadata"]["uid"] == gone for pod in found] == [False] and holds(found[0], "ContainersReady")

        await until(answers, "the engine of the canary's group answers")
        [leader] = await leaders_of(revision)
        assert not holds(leader, "Ready")
        gone = leader["metadata"]["uid"]
        await world.cluster.delete(Ref("v1", "Pod", NAMESPACE, leader["metadata"]["name"]))
    await world.start_operator()


def moves_routed_groups(written: str) -> bool:
    return moves_groups(written) or written.split()[1].startswith(("inferencepools", "httproutes"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Service", "InferencePool"])
async def test_a_route_never_sends_requests_to_an_unprobed_group(world, groups, kind):
    killer, _, _ = await by_route(world, f"grouped-{kind.lower()}", moves_routed_groups, kind, engine=ENGINE)
    assert {"httproutes", "leaderworkersets"} <= {written.split()[1].partition("/")[0] for written in killer.killed}


async def test_a_group_whose_worker_ends_is_recreated_as_a_whole_and_scaling_counts_groups(world, groups):
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
    await until(anew, "the group is deleted")
    await world.until_ready(name, 2)
    taken = time.monotonic() - began
    record("worker of a replica over two nodes killed", taken, what="its whole group is recreated, and both answer")
    assert lost["name"].rpartition("-")[0] in groups.made_anew
    await world.scale(name, 1)
    await world.until_ready(name, 1)

    async def fewer() -> bool:
        return len(await all_pods(world, name)) == 2

    await until(fewer, "the workers of the deleted group are gone")
    await world.delete(name)
