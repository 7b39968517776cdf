"""Engines and nodes end abruptly: requests in flight are lost, and all others are served.

The pilot recognizes an outage and changes nothing.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kvpilot_localcluster.podstatus import timestamp
from kvpilot_operator.cluster.objects import Ref
from support.faulty_plane import Component, SecondNode, engine_process
from support.faulty_record import record
from support.faulty_world import NAMESPACE, FaultyWorld, until

_MEMORY = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_limit(pid: int, mebibytes: int) -> Iterator[bool]:
    """Limit a process's memory while the block runs. Yield False if this machine allows no limit.

    The limit needs control groups of version 1, and root.
    """
    group = _MEMORY / f"kvpilot-fault-{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mebibytes * 1024 * 1024))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        # The control group becomes empty only once its process has ended.
        with contextlib.suppress(OSError):
            group.rmdir()


pytestmark = pytest.mark.asyncio(loop_scope="session")

TWO = "both engines answer again"
STRATEGIC = "application/strategic-merge-patch+json"
SOON = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2}
    for taint in ("unreachable", "not-ready")
]


async def decisions(world, name):
    return (await world.status(name)).get("decisions", [])


def on_node(pods, node):
    return next(p for p in pods if p["spec"].get("nodeName") == node and not p["metadata"].get("deletionTimestamp"))


def is_ready(pod):
    return any((one["type"], one["status"]) == ("Ready", "True") for one in pod["status"].get("conditions", ()))


async def test_an_engine_that_runs_out_of_memory_comes_back_and_costs_only_its_own_requests(world):
    users = 4
    pod = (await world.pods("steady"))[0]
    before = await decisions(world, "steady")
    restarts = pod["status"]["containerStatuses"][0]["restartCount"]
    engine = engine_process(world.local.folder / "node", pod["metadata"]["uid"])
    async with world.load("steady", users) as load:
        with memory_limit(engine.pid, 100) as limited:
            if limited:
                with contextlib.suppress(httpx.HTTPError):  # the engine dies before it answers
                    await world.make_ill(pod, eat_mib=300)
            else:
                engine.signal(signal.SIGKILL)
            await until(lambda: asyncio.sleep(0, not engine.alive), "the engine is killed", pause=0.02)
        began = time.monotonic()

        async def restarted() -> bool:
            found = await world.cluster.get(Ref("v1", "Pod", NAMESPACE, pod["metadata"]["name"]))
            one = found["status"]["containerStatuses"][0]
            return one["restartCount"] > restarts and one["ready"]

        await until(restarted, "the engine is started again")
        await world.until_ready("steady", 2)
        taken = time.monotonic() - began
        failed = load.stats.failed
        await asyncio.sleep(2)
    assert failed <= users, load.stats.failures
    assert load.stats.failed == failed, load.stats.failures
    assert await decisions(world, "steady") == before
    how = "the kernel's OOM killer" if limited else "SIGKILL, as the OOM killer sends it"
    record(f"engine ended by {how}", taken, what=TWO, answered=load.stats.ok, failed=failed)


async def test_an_engine_that_is_evicted_by_the_api_costs_no_request(world):
    pod = (await world.pods("steady"))[0]["metadata"]["name"]
    eviction = {
        "apiVersion": "policy/v1beta1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": NAMESPACE},
    }
    async with world.load("steady") as load:
        began = time.monotonic()
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        await asyncio.to_thread(world.rest.create, path, eviction)

        async def replaced() -> bool:
            names = [one["metadata"]["name"] for one in await world.pods("steady")]
            return pod not in names and len(names) == 2

        await until(replaced, "the evicted pod is gone and replaced")
        await world.until_ready("steady", 2)
        taken = time.monotonic() - began
    assert load.stats.failed == 0, load.stats.failures
    record("engine evicted through the API (a drain)", taken, what=TWO, answered=load.stats.ok)


async def cordon(world: FaultyWorld, node: str, closed: bool) -> None:
    path = f"/api/v1/nodes/{node}"
    await asyncio.to_thread(world.rest.merge, path, {"spec": {"unschedulable": closed or None}})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(whole_world, tmp_path_factory):
    """Yield a second node, and a service `pair` with one engine per node. A node is lost after 16 s of silence."""
    world = whole_world
    controllers = Component(world.local.plane.folder, "kube-controller-manager")
    controllers.start("--node-monitor-grace-period=16s", "--node-monitor-period=1s")
    node = SecondNode(tmp_path_factory.mktemp("second"), world.local.kubeconfig, world.table)
    try:
        await asyncio.to_thread(node.start, world.rest)
        await cordon(world, "local", True)
        await world.serving(
            "pair", 1, engine={"image": "kvpilot/faulty-engine:dev", "podTemplate": {"spec": {"tolerations": SOON}}}
        )
        await cordon(world, "local", False)
        await cordon(world, node.name, True)
        await world.scale("pair", 2)
        await world.until_ready("pair", 2)
        yield node
    finally:
        await asyncio.to_thread(node.stop)
        await asyncio.to_thread(world.rest.delete, f"/api/v1/nodes/{node.name}")


async def test_a_pod_that_a_kubelet_evicted_is_replaced_and_no_longer_counted(world, second):
    pod = on_node(await world.pods("pair"), second.name)
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
    before = await decisions(world, "pair")
    async with world.load("pair") as load:
        # Act as a kubelet that lacks memory: the process ends, and the pod stays as Failed for inspection.
        second.pause()
        second.kill_engines()
        began = time.monotonic()
        failed = {"type": "Ready", "status": "False", "lastTransitionTime": timestamp(time.time())}
        status = {"phase": "Failed", "reason": "Evicted", "message": "low on resource: memory", "conditions": [failed]}
        patch = {"metadata": {"uid": uid}, "status": status}
        await asyncio.to_thread(world.rest.call, "PATCH", f"{path}/status", patch, content=STRATEGIC)

        async def replaced() -> bool:
            return sum(map(is_ready, await world.pods("pair"))) == 2

        await until(replaced, "a new engine answers beside the remaining one")
        await world.until_ready("pair", 2)
        taken = time.monotonic() - began
    lies_there = await world.cluster.get(Ref("v1", "Pod", NAMESPACE, name))
    assert lies_there["status"]["reason"] == "Evicted"
    assert await world.condition("pair", "Ready") == ("True", "Serving")
    assert load.stats.failed <= 2, load.stats.failures
    assert await decisions(world, "pair") == before
    record("engine evicted by its kubelet", taken, what=TWO, answered=load.stats.ok, failed=load.stats.failed)
    await asyncio.to_thread(world.rest.delete, path, grace=0)
    second.resume()


async def test_the_engine_of_a_lost_node_is_started_on_another_node(world, second):
    # The first node runs the evicted engine's successor, so a new engine goes to the second node.
    await cordon(world, "local", True)
    await cordon(world, second.name, False)
    await world.scale("pair", 3)
    await world.until_ready("pair", 3)
    await cordon(world, "local", False)
    lost = on_node(await world.pods("pair"), second.name)["metadata"]["name"]
    before = await decisions(world, "pair")
    async with world.load("pair", users=3) as load:
        second.vanish()
        began = time.monotonic()

        async def replaced() -> bool:
            living = [one for one in await world.pods("pair") if one["metadata"]["name"] != lost]
            return len(living) == 3 and all(one["spec"].get("nodeName") == "local" for one in living)

        await until(replaced, "a new pod is bound to the remaining node")
        await world.until_ready("pair", 3)
        taken = time.monotonic() - began
    assert load.stats.failed <= 3, load.stats.failures
    assert await decisions(world, "pair") == before
    record(
        "node gone (noticed after 16 s, pods given up 2 s later)",
        taken,
        what="all three engines answer again",
        answered=load.stats.ok,
        failed=load.stats.failed,
    )
