"""The pilot in a real cluster with real engines: replicas, a canary under live load, and continued observation."""

import asyncio
import copy
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from kvpilot_demo.load import Load
from kvpilot_localcluster.addresses import service_port
from kvpilot_operator.api.names import API_VERSION, KIND, REVISION_LABEL
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ClusterError
from support.gateway import API, ROUTE_CRD, Gateway

pytestmark = [pytest.mark.timeout(3600), pytest.mark.asyncio(loop_scope="session")]
NAMESPACE = "default"
SLOT = "kvpilot.test/slot"
# Each wait includes an engine's start and the filling of its cache, at most two minutes on quiet cores.
HANGS = 1200
# The model has random weights, so its answers mean nothing. These limits let every canary pass.
LENIENT = {"probeSets": ["builtin/general"], "maxExcessKLMillinats": 100000, "minTop1AgreementPercent": 0}
PATIENT = {
    "warmUpSeconds": 5,
    "minRequests": 20,
    "maxTTFTP95RegressionPercent": 1000,
    "maxITLP95RegressionPercent": 1000,
    "maxThroughputRegressionPercent": 95,
    "maxErrorIncreasePercent": 20,
    "progressDeadlineSeconds": 600,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(whole_world):
    """Return the cluster with a node that has room for three engines."""
    capacity = {"capacity": {SLOT: "3"}, "allocatable": {SLOT: "3"}}
    await asyncio.to_thread(whole_world.rest.merge, "/api/v1/nodes/local/status", {"status": capacity})
    return whole_world


def service(world, name, kv_memory="2M", **spec):
    made = copy.deepcopy(world.example)
    made["metadata"] = {"name": name, "namespace": NAMESPACE}
    made["spec"]["model"] = {"source": "file:///models/tiny-llama", "maxModelLen": 512}
    arguments = ["--enforce-eager", "--max-num-seqs=16", f"--kv-cache-memory-bytes={kv_memory}"]
    slots = {"requests": {"cpu": "50m", "memory": "1Gi"}, "limits": {SLOT: "1"}}
    made["spec"]["engine"] |= {"extraArgs": arguments, "resources": slots}
    made["spec"]["accuracy"] = LENIENT
    for section, value in spec.items():
        known = made["spec"].get(section)
        made["spec"][section] = {**known, **value} if isinstance(known, dict) and section != "kvCache" else value
    return made


def at(status, *path):
    here = status
    for name in path:
        here = here.get(name) if isinstance(here, dict) else None
    return here


def condition(status, kind):
    found = next((c for c in status.get("conditions", []) if c["type"] == kind), {})
    return found.get("status"), found.get("reason"), found.get("message", "")


async def until(world, name, seen):
    status = {}
    try:
        async with asyncio.timeout(HANGS):
            while True:
                found = await world.cluster.find(Ref(API_VERSION, KIND, NAMESPACE, name))
                status = (found or {}).get("status") or {}
                if seen(status):
                    return status
                await asyncio.sleep(0.5)
    except TimeoutError:
        lines = [f"{d['action']} {d.get('reason')}: {d.get('message')}" for d in status.get("decisions", [])]
        pytest.fail(f"not seen in {HANGS} s; {status.get('conditions')}; {lines}")


async def patch(world, name, **spec):
    await world.cluster.merge(Ref(API_VERSION, KIND, NAMESPACE, name), {"spec": spec})


async def url_of(world, name):
    found = await world.cluster.get(Ref("v1", "Service", NAMESPACE, name))
    return f"http://{found['spec']['clusterIP']}:{service_port(80)}"


@asynccontextmanager
async def users(world, name, count, *, url=None, prompt_tokens=300, output_tokens=48):
    load = Load(
        url or await url_of(world, name), name, users=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    await load.start()
    try:
        yield load
    finally:
        await load.stop()


async def gone(world, name):
    await world.cluster.delete(Ref(API_VERSION, KIND, NAMESPACE, name))
    async with asyncio.timeout(HANGS):
        while await world.cluster.list("v1", "Pod", NAMESPACE, f"kvpilot.io/service={name}"):
            await asyncio.sleep(0.5)


async def test_pressure_at_the_end_of_the_ladder_adds_a_replica_and_calm_takes_it_away(world):
    await world.cluster.create(
        service(
            world,
            "scaled",
            kvCache={
                "mode": "Fixed",
                "dtype": "auto",
                "pressure": {"highPercent": 50, "lowPercent": 20, "sustainedSeconds": 10},
            },
            scaling={"minReplicas": 1, "maxReplicas": 2, "scaleDownStabilizationSeconds": 3600},
        )
    )
    await until(world, "scaled", lambda s: condition(s, "Ready")[0] == "True")
    async with users(world, "scaled", 12) as load:
        await until(world, "scaled", lambda s: at(s, "scaling", "desiredReplicas") == 2)
    assert load.stats.failed == 0, list(load.stats.failures)
    # The trial ends only after the second engine has started, however long that takes.
    status = await until(world, "scaled", lambda s: at(s, "readyReplicas") == 2)
    added = next(d for d in status["decisions"] if d["action"] == "ScaleOut")
    assert added["options"][0]["outcome"] == "Chosen"
    assert any(o["outcome"] != "Chosen" for o in added["options"])
    await patch(world, "scaled", scaling={"scaleDownStabilizationSeconds": 20})
    status = await until(world, "scaled", lambda s: at(s, "replicas") == 1)
    assert any(d["action"] == "ScaleIn" for d in status["decisions"])
    await gone(world, "scaled")


async def test_recommend_mode_names_the_step_and_changes_nothing(world):
    await world.cluster.create(
        service(
            world,
            "advised",
            kvCache={
                "mode": "Recommend",
                "ladder": ["k4v4"],
                "pressure": {"highPercent": 50, "lowPercent": 20, "sustainedSeconds": 10},
            },
        )
    )
    await until(world, "advised", lambda s: condition(s, "Ready")[0] == "True")
    async with users(world, "advised", 12) as load:
        status = await until(world, "advised", lambda s: at(s, "kvCache", "recommendedDtype") == "k4v4")
    assert load.stats.failed == 0
    assert status["kvCache"]["activeDtype"] == "auto"
    assert "canary" not in status
    await gone(world, "advised")


@pytest.mark.long
async def test_a_slower_canary_is_caught_under_live_load_and_a_good_one_goes_through_its_steps(world):
    """On a CPU plain torch reads our pages at half the speed of vLLM's own kernels, which is a real regression."""
    await world.cluster.create(
        service(
            world,
            "stepped",
            kv_memory="16M",
            replicas=2,
            kvCache={"mode": "Fixed", "dtype": "auto"},
            scaling={"mode": "External", "minReplicas": 2, "maxReplicas": 2},
            canary={
                **PATIENT,
                "steps": [{"weightPercent": 50, "holdSeconds": 25}],
                "maxITLP95RegressionPercent": 1,
                "capacityPolicy": "SurgeOrReplaceOne",
            },
        )
    )
    await until(world, "stepped", lambda s: at(s, "readyReplicas") == 2)
    # Users come only after the canary answers: earlier load would slow down its start.
    await patch(world, "stepped", kvCache={"dtype": "k4v4"})
    await until(world, "stepped", lambda s: at(s, "canary", "stage") in ("Probing", "Shifting"))
    async with users(world, "stepped", 4, prompt_tokens=50, output_tokens=8) as load:
        ended = await until(world, "stepped", lambda s: "canary" not in s and "history" in s)
    assert load.stats.failed == 0, list(load.stats.failures)
    assert (ended["history"][0]["verdict"], ended["history"][0]["reason"]) == ("Failed", "PerformanceRegressed")
    assert ended["history"][0]["itlP95ChangePercent"] > 1
    assert ended["kvCache"]["activeDtype"] == "auto"
    assert [d["dtype"] for d in ended["kvCache"]["denied"]] == ["k4v4"]
    await patch(world, "stepped", canary={"maxITLP95RegressionPercent": 1000}, rollout={"denySeconds": 0})
    await until(world, "stepped", lambda s: at(s, "canary", "stage") in ("Probing", "Shifting"))
    async with users(world, "stepped", 4, prompt_tokens=50, output_tokens=8) as load:
        await until(world, "stepped", lambda s: at(s, "canary", "stage") == "Promoting")
    assert load.stats.failed == 0, list(load.stats.failures)
    async with users(world, "stepped", 1) as load:
        passed = await until(world, "stepped", lambda s: at(s, "kvCache", "activeDtype") == "k4v4")
    assert load.stats.failed == 0, list(load.stats.failures)
    assert passed["history"][0]["trafficMode"] == "ReplicaRatio"
    assert passed["history"][0]["verdict"] == "Passed"
    selector = (await world.cluster.get(Ref("v1", "Service", NAMESPACE, "stepped")))["spec"]["selector"]
    assert selector[REVISION_LABEL] == passed["stable"]["revision"]
    await gone(world, "stepped")


@pytest.mark.long
async def test_damage_that_shows_after_promotion_brings_the_last_good_dtype_back(world):
    one = {"mode": "External", "minReplicas": 1, "maxReplicas": 1}
    fixed = {"mode": "Fixed", "dtype": "auto"}
    await world.cluster.create(service(world, "drifting", kv_memory="16M", replicas=1, kvCache=fixed, scaling=one))
    await until(world, "drifting", lambda s: at(s, "readyReplicas") == 1)
    await patch(world, "drifting", kvCache={"dtype": "k4v4"})
    await until(world, "drifting", lambda s: at(s, "kvCache", "activeDtype") == "k4v4")
    # No quantized dtype meets these limits.
    strict = {"maxExcessKLMillinats": 0, "minTop1AgreementPercent": 100, "periodSeconds": 60}
    await patch(world, "drifting", accuracy=strict)
    status = await until(world, "drifting", lambda s: at(s, "kvCache", "activeDtype") == "auto")
    assert [(d["dtype"], d["reason"]) for d in status["kvCache"]["denied"]] == [("k4v4", "AccuracyDrifted")]
    assert any(d["action"] == "RollBack" and d["reason"] == "AccuracyDrifted" for d in status["decisions"])
    await gone(world, "drifting")


@pytest.mark.long
async def test_without_a_spare_gpu_the_canary_takes_the_place_of_one_replica_and_no_request_fails(world):
    await world.cluster.create(
        service(
            world,
            "packed",
            kv_memory="16M",
            replicas=3,
            kvCache={"mode": "Fixed", "dtype": "auto"},
            scaling={"mode": "External", "minReplicas": 3, "maxReplicas": 3},
            canary={**PATIENT, "capacityPolicy": "SurgeOrReplaceOne"},
        )
    )
    await until(world, "packed", lambda s: at(s, "readyReplicas") == 3)
    async with users(world, "packed", 1) as load:
        await patch(world, "packed", kvCache={"dtype": "int8"})
        fewest = 3
        async with asyncio.timeout(3 * HANGS):
            while True:
                found = await world.cluster.get(Ref(API_VERSION, KIND, NAMESPACE, "packed"))
                status = found.get("status") or {}
                pods = await world.cluster.list("v1", "Pod", NAMESPACE, "kvpilot.io/service=packed")
                fewest = min(fewest, sum(answers(pod) for pod in pods))
                if at(status, "kvCache", "activeDtype") == "int8" and at(status, "readyReplicas") == 3:
                    break
                await asyncio.sleep(0.5)
    assert load.stats.failed == 0, list(load.stats.failures)
    assert "ReplaceOne" in {one["action"] for one in status["decisions"]}
    assert fewest >= 2
    await gone(world, "packed")


def answers(pod):
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or ()}
    return conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp")


@pytest.mark.long
async def test_a_route_carries_the_canarys_weight_and_is_left_as_the_user_wrote_it(world):
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await asyncio.to_thread(world.rest.create, path, ROUTE_CRD)
    async with asyncio.timeout(HANGS):
        while not await world.cluster.serves(API):
            await asyncio.sleep(0.2)
    world.kill_operator()
    world.start_operator()  # the operator reads the served APIs at its start
    rules = [{"backendRefs": [{"name": "routed", "port": 80}]}]
    route = {
        "apiVersion": API,
        "kind": "HTTPRoute",
        "metadata": {"name": "chat", "namespace": NAMESPACE},
        "spec": {"parentRefs": [{"name": "gateway"}], "rules": rules},
    }
    async with asyncio.timeout(HANGS):
        while True:
            try:
                # Use the defaults of the CRD.
                written = (await world.cluster.create(route))["spec"]["rules"]
                break
            except ClusterError:
                await asyncio.sleep(0.5)
    await world.cluster.create(
        service(
            world,
            "routed",
            kv_memory="16M",
            kvCache={"mode": "Fixed", "dtype": "auto"},
            scaling={"minReplicas": 1, "maxReplicas": 1},
            canary={**PATIENT, "routeRef": {"name": "chat"}, "steps": [{"weightPercent": 40, "holdSeconds": 25}]},
        )
    )
    await until(world, "routed", lambda s: condition(s, "Ready")[0] == "True")
    gateway = Gateway(world.cluster, NAMESPACE, "chat", service_port(80))
    await patch(world, "routed", kvCache={"dtype": "int8"})
    await until(world, "routed", lambda s: at(s, "canary", "stage") in ("Probing", "Shifting"))
    async with (
        gateway.serving(),
        users(world, "routed", 4, url=gateway.url, prompt_tokens=50, output_tokens=8) as load,
    ):
        await until(world, "routed", lambda s: at(s, "canary", "stage") == "Shifting")
        async with asyncio.timeout(HANGS):
            while await gateway.weights() != {"routed": 60, "routed-canary": 40}:
                await asyncio.sleep(0.2)
        status = await until(world, "routed", lambda s: at(s, "kvCache", "activeDtype") == "int8")
    assert load.stats.failed == 0, list(load.stats.failures)
    assert status["history"][0]["trafficMode"] == "HTTPRoute"
    assert gateway.sent["routed-canary"] >= 20
    kept = await world.cluster.get(Ref(API, "HTTPRoute", NAMESPACE, "chat"))
    assert kept["spec"]["rules"] == written
    async with asyncio.timeout(HANGS):
        while await world.cluster.find(Ref("v1", "Service", NAMESPACE, "routed-canary")) is not None:
            await asyncio.sleep(0.5)
    await gone(world, "routed")
