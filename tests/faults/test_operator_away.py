"""While no operator runs, a new pod gets no requests, and the runbook's commands help."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from kvpilot_localcluster.toolbox.kubectl import kubectl
from kvpilot_operator.cluster.objects import Ref
from support.faulty_record import record
from support.faulty_world import NAMESPACE, FaultyWorld, Object, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbooks" / "KvpilotOperatorDown.md"


def commands(word: str) -> str:
    """Return the runbook's only block of shell commands with this word."""
    (block,) = [found for found in re.findall(r"```sh\n(.*?)```", RUNBOOK.read_text(), re.DOTALL) if word in found]
    return block


async def shell(world: FaultyWorld, script: str, **variables: str) -> str:
    """Run it as a user would, with kubectl on the PATH."""
    path = f"{kubectl().parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "KUBECONFIG": str(world.local.kubeconfig), "NAMESPACE": NAMESPACE, **variables}
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-euc", script], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def holds(pod: Object, kind: str) -> bool:
    return any((one["type"], one["status"]) == (kind, "True") for one in pod["status"].get("conditions", ()))


async def newest(world: FaultyWorld, name: str, gone: str) -> Object:
    """Return the pod that replaced the deleted one, once its engine answers."""
    found: list[Object] = []

    async def answers() -> bool:
        found[:] = [pod for pod in await world.pods(name) if pod["metadata"]["name"] != gone]
        return bool(found) and holds(found[0], "ContainersReady")

    await until(answers, "the engine of the new pod answers")
    return found[0]


async def test_a_pod_that_is_replaced_while_no_operator_runs_gets_requests_once_it_is_admitted_by_hand(world):
    await world.serving("away", 1)
    (before,) = await world.pods("away")
    await world.stop_operator()
    await world.cluster.delete(Ref("v1", "Pod", NAMESPACE, before["metadata"]["name"]))
    pod = await newest(world, "away", before["metadata"]["name"])
    assert not holds(pod, "Ready")
    began = time.monotonic()
    await shell(world, commands("--subresource=status"), NAME="away")

    async def ready() -> bool:
        return holds(await world.cluster.get(Ref("v1", "Pod", NAMESPACE, pod["metadata"]["name"])), "Ready")

    await until(ready, "the pod that was admitted by hand is Ready")
    record(
        "pod replaced while no operator runs, and admitted by hand", time.monotonic() - began, what="it gets requests"
    )
    await world.start_operator()
    await world.dial()
    assert await ready()
    await world.delete("away")


async def test_engines_without_the_gate_need_no_operator_and_one_that_comes_back_leaves_them_as_they_are(world):
    await world.serving("ungated", 1)
    await world.stop_operator()
    await shell(world, commands("readinessGates"), NAME="ungated")

    async def replaced() -> bool:
        pods = [pod for pod in await world.pods("ungated") if not pod["spec"].get("readinessGates")]
        return [holds(pod, "Ready") for pod in pods] == [True] and len(await world.pods("ungated")) == 1

    await until(replaced, "the Deployment has replaced its pod by one without the gate")
    (pod,) = await world.pods("ungated")
    await world.cluster.delete(Ref("v1", "Pod", NAMESPACE, pod["metadata"]["name"]))
    assert not (await newest(world, "ungated", pod["metadata"]["name"]))["spec"].get("readinessGates")
    await until(replaced, "a pod that is replaced without an operator is Ready")
    (last,) = await world.pods("ungated")
    await world.start_operator()
    await world.until_ready("ungated", 1)
    await world.dial()
    assert [one["metadata"]["uid"] for one in await world.pods("ungated")] == [last["metadata"]["uid"]]
    await world.delete("ungated")


async def test_an_engine_that_hangs_with_a_full_cache_and_a_queue_is_told_and_changes_nothing(world):
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
