"""A service is recreated during a trial, a namespace terminates, or the operator cannot write files.

In each case the requested objects exist afterwards, and no other service is delayed.
"""

import asyncio
import errno
import time
from pathlib import Path

import pytest

from kvpilot_localcluster.rest import ApiError
from kvpilot_operator.api.names import SERVICE_LABEL
from kvpilot_operator.cluster.objects import Ref
from support.faulty_api import is_write
from support.faulty_record import record
from support.faulty_world import API_VERSION, IMAGE, KIND, NAMESPACE, FaultyWorld, insist, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRIAL = {
    "canary": {"steps": [], "progressDeadlineSeconds": 300},
    "accuracy": {"probeSets": ["builtin/general"]},
}


async def stage(world: FaultyWorld, name: str) -> str:
    return ((await world.status(name)).get("canary") or {}).get("stage", "")


async def uid(world: FaultyWorld, name: str) -> str:
    found = await world.cluster.get(Ref(API_VERSION, KIND, NAMESPACE, name))
    return found["metadata"]["uid"]


async def owners(world: FaultyWorld, name: str) -> set[str]:
    """Return the uids of the owners of all objects with the service's label."""
    found = []
    for api_version, kind in (("apps/v1", "Deployment"), ("v1", "Service"), ("v1", "ConfigMap")):
        found += await world.cluster.list(api_version, kind, NAMESPACE, f"{SERVICE_LABEL}={name}")
    return {owner["uid"] for one in found for owner in one["metadata"].get("ownerReferences", ())}


@pytest.mark.parametrize("where", ["Promoting", "RollingBack"])
async def test_a_service_that_is_recreated_during_a_trial_starts_from_scratch(world, where):
    name = f"again-{where.lower()}"
    await world.serving(name, 3, **TRIAL)
    before = await uid(world, name)
    await world.patch(name, {"kvCache": {"dtype": "k4v4"}})

    async def promoting() -> bool:
        return await stage(world, name) == "Promoting"

    await until(promoting, "the canary is promoted", pause=0.02)
    if where == "RollingBack":
        await world.patch(name, {"kvCache": {"dtype": "auto"}})

        async def rolling_back() -> bool:
            return await stage(world, name) == "RollingBack"

        await until(rolling_back, "the canary is rolled back", pause=0.02)
    async with world.load("steady") as load:
        await world.cluster.delete(Ref(API_VERSION, KIND, NAMESPACE, name))
        began = time.monotonic()
        await insist(lambda: world.create(name, 3, **TRIAL))
        await world.until_ready(name, 3)

        async def settled() -> bool:
            wanted = await world.wanted(name) == 3 and len(await world.pods(name)) == 3
            alone = wanted and await owners(world, name) == {await uid(world, name)}
            # The first answers may have come from the old service, before its end.
            return alone and await world.condition(name, "Ready") == ("True", "Serving")

        await until(settled, "only the new service owns anything, and it serves")
        taken = time.monotonic() - began
    status = await world.status(name)
    assert await uid(world, name) != before
    assert (status["kvCache"]["activeDtype"], "canary" in status, "history" in status) == ("auto", False, False)
    assert await world.condition(name, "Ready") == ("True", "Serving")
    assert load.stats.failed == 0, load.stats.failures
    record(
        f"service deleted and created again while its canary is {where}",
        taken,
        what="its three engines answer, and no object of the old service is left",
    )
    await world.delete(name)


async def test_a_terminating_namespace_ends_its_service_and_delays_no_other(world):
    name, space = "doomed", "doomed-space"
    rest = world.rest
    rest.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    services = f"/apis/{API_VERSION}/namespaces/{space}/quantizedllmservices"
    rest.create(
        services,
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {
                "replicas": 2,
                "model": {"source": "file:///models/tiny-1m", "servedName": name},
                "engine": {"image": IMAGE},
                "kvCache": {"mode": "Fixed", "dtype": "auto"},
                "drain": {"preStopSeconds": 1, "timeoutSeconds": 20},
            },
        },
    )
    # This keeps the namespace in Terminating until the test is done.
    held = {"name": "held", "finalizers": ["example.org/held"]}
    maps = f"/api/v1/namespaces/{space}/configmaps"
    rest.create(maps, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": held})

    async def serves() -> bool:
        found = rest.get(f"{services}/{name}").get("status") or {}
        return found.get("readyReplicas") == 2

    await until(serves, "the service in the namespace answers")
    began = time.monotonic()
    async with world.load("steady") as load:
        rest.call("DELETE", f"/api/v1/namespaces/{space}")

        async def gone() -> bool:
            left = rest.get(f"/apis/apps/v1/namespaces/{space}/deployments")["items"]
            return not left and not rest.get(services)["items"] and not await world.operator_knows(name)

        taken = await until(gone, "the service and its engines are gone, and the operator has forgotten it")
        await world.dial()
        await asyncio.sleep(5)
        assert rest.get(f"/api/v1/namespaces/{space}")["status"]["phase"] == "Terminating"
        assert not rest.get(f"/apis/apps/v1/namespaces/{space}/deployments")["items"], (
            "the deleted service has come back"
        )
    writes = world.api.count(began, lambda one: is_write(one) and f"/namespaces/{space}/" in one.path)
    assert writes <= 20, f"{writes} writes into a namespace that terminates"
    assert load.stats.failed == 0, load.stats.failures
    patch = {"metadata": {"finalizers": None}}
    rest.call("PATCH", f"{maps}/held", patch, content="application/merge-patch+json")

    async def away() -> bool:
        try:
            rest.get(f"/api/v1/namespaces/{space}")
        except ApiError as error:
            return error.status == 404
        return False

    await until(away, "the namespace is gone")
    world.check()
    record(
        "namespace that terminates",
        taken,
        what="the operator forgets its service; another service's replica count takes effect meanwhile",
        answered=load.stats.ok,
    )


# Remount every writable file system read-only, in a mount namespace of its own.
READ_ONLY = """
while read -r _ where kind options _; do
  case "$kind:$options" in
    proc:*|sysfs:*|cgroup*:*|devpts:*|mqueue:*) ;;
    *:rw*) mount -o remount,bind,ro "$where" || exit 97 ;;
  esac
done < /proc/mounts
exec "$@"
"""


def refusal(pid: int, folder: str) -> int | None:
    """Return the errno of a write by this process, or None if it can write."""
    try:
        Path(f"/proc/{pid}/root{folder}/file").write_text("x")
    except OSError as error:
        return error.errno
    return None


async def test_the_operator_works_on_a_read_only_filesystem(world, tmp_path):
    await world.stop_operator()
    logged = len(world.operator_log())
    wrap = ["unshare", "--mount", "--propagation=private", "sh", "-c", READ_ONLY, "sh"]
    try:
        await world.start_operator(wrap=wrap)
        began = time.monotonic()
        for folder in ("/tmp", "/dev/shm", str(Path.home()), str(tmp_path)):  # noqa: S108
            assert refusal(world.operator_pid, folder) == errno.EROFS
        await world.dial()
        await world.serving("unwritten", 1, **TRIAL)
        await world.patch("unwritten", {"kvCache": {"dtype": "k4v4"}})

        async def promoted() -> bool:
            return (await world.status("unwritten")).get("kvCache", {}).get("activeDtype") == "k4v4"

        await until(promoted, "a whole trial is over")
        taken = time.monotonic() - began
    finally:
        await world.stop_operator()
        await world.start_operator()
    said = world.operator_log()[logged:]
    assert "Traceback" not in said
    assert "Read-only" not in said
    record("operator on a read-only filesystem", taken, what="a replica count, a new service and its trial take effect")
    await world.delete("unwritten")
