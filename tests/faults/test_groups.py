"""Replicas that are groups of pods on several nodes go through the same trials, as whole groups.

Only their leaders take requests, a canary adds one group, and a group with an ended pod is recreated.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import pytest_asyncio

from kvpilot_localcluster.toolbox.kubectl import kubectl
from kvpilot_operator.api.names import GROUP_LABEL, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.render.workloads import LEADER_WORKER_SET
from support.faulty_plane import Component, engine_process
from support.faulty_record import record
from support.faulty_world import IMAGE, NAMESPACE, until
from support.gateway import ROUTE_CRD
from support.inference_kinds import POOL_CRD
from support.leader_workers import LEADER_WORKER_SET_CRD, LeaderWorkerSets
from support.routed import a_users_route, by_route, our_route
from support.unprobed import DRAIN, promoted_and_rolled_back

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3600)]

ENGINE = {"image": IMAGE, "nodes": 2}
RUNBOOK = Path(__file__).parents[2] / "docs" / "runbooks" / "KvpilotOperatorDown.md"


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
    """Return True after a write that concerns groups. Other kills are the same as for replicas of one pod."""
    return written.split()[1].startswith(("services", "leaderworkersets"))


async def test_a_canary_of_groups_is_promoted_and_another_rolled_back_and_leaders_alone_are_asked(world, groups):
    name = "grouped"
    killer, seen, taken = await promoted_and_rolled_back(world, name, moves_groups, nodes=2)

    async def two_groups_of_two() -> bool:
        return (len(await world.pods(name)), len(await all_pods(world, name))) == (2, 2 * 2)

    await until(two_groups_of_two, "only what serves is left")
    second = (await world.status(name))["stable"]["revision"]
    # With two replicas and one canary, rollouts never request more than three groups at any moment. Count the requested
    # groups in one answer of the API server: pods outlive their set.
    assert groups.most[name] == 2 + 1
    [left] = await sets_of(world, name)
    assert left["metadata"]["labels"][REVISION_LABEL] == second
    assert any("leaderworkersets" in written for written in killer.killed)
    await a_leader_is_admitted_by_hand(world, name)
    record(
        f"operator killed {len(killer.killed)} times while a canary of groups is promoted and another rolled back",
        taken,
        what="both trials end, with one group more than replicas at most; no request met an unprobed group",
        answered=seen.answered.total(),
    )
    await world.delete(name)


async def a_leader_is_admitted_by_hand(world, name):
    """Replace a group of a promoted revision while no operator runs, and admit its leader as the runbook says."""
    await world.stop_operator()
    gone = (await world.pods(name))[0]["metadata"]
    await world.cluster.delete(Ref("v1", "Pod", NAMESPACE, gone["name"]))

    async def replaced(kind):
        pods = [pod for pod in await world.pods(name) if pod["metadata"]["uid"] != gone["uid"]]
        return len(pods) == 2 and all(
            any((one["type"], one["status"]) == (kind, "True") for one in pod["status"].get("conditions", ()))
            for pod in pods
        )

    await until(lambda: replaced("ContainersReady"), "the engine of the new group answers")
    assert not await replaced("Ready")
    [script] = [
        found for found in re.findall(r"```sh\n(.*?)```", RUNBOOK.read_text(), re.DOTALL) if "ADMITTED" in found
    ]
    path = f"{kubectl().parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "KUBECONFIG": str(world.local.kubeconfig), "NAMESPACE": NAMESPACE, "NAME": name}
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-euc", script], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    await until(lambda: replaced("Ready"), "the leader that was admitted by hand is Ready")
    await world.start_operator()


def moves_routed_groups(written: str) -> bool:
    return moves_groups(written) or written.split()[1].startswith(("inferencepools", "httproutes"))


@pytest.mark.long
@pytest.mark.parametrize(("fields", "kind"), [(our_route, "Service"), (a_users_route, "InferencePool")])
async def test_a_route_never_leads_to_an_unprobed_group(world, groups, fields, kind):
    killer, _, _ = await by_route(world, f"grouped-{kind.lower()}", moves_routed_groups, fields, kind, engine=ENGINE)
    assert {"httproutes", "leaderworkersets"} <= {written.split()[1].partition("/")[0] for written in killer.killed}


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
