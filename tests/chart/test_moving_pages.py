"""The commands of docs/migrate.md, undo.md, day-2.md and leave.md run in this order, with Helm's operator and load.

The operator is the real one, in its own pods. A cheap engine without a model replaces the pages' images.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_demo.load import Load
from kvpilot_localcluster.addresses import service_port
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import until
from support.pages_shell import Shell, blocks, section

pytestmark = pytest.mark.timeout(1800)

RUNTIME = "registry.example.com/kvpilot/runtime:0.1.0"
NAMESPACE, OPERATOR = "moving", "kvpilot-system"
SERVICES = f"/apis/kvpilot.io/v1alpha1/namespaces/{NAMESPACE}/quantizedllmservices"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
QUICK = {"preStopSeconds": 1, "timeoutSeconds": 20}


class World:
    """Cluster with Helm's operator, and a user's shell."""

    def __init__(self, cluster: LocalCluster, shell: Shell) -> None:
        self.rest, self.shell = cluster.rest, shell

    def service(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.rest.get(f"{SERVICES}/{name}")
        return found

    def until_status(self, name: str, seen: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        until(lambda: seen(self.service(name).get("status") or {}), what)
        status: dict[str, Any] = self.service(name)["status"]
        return status

    def create(self, name: str, dtype: str, **spec: Any) -> None:
        """Create a service of cheap engines with this dtype, and wait until it is ready."""
        base = {
            "model": {"source": "file:///models/tiny-1m", "servedName": name, "maxModelLen": 4096},
            "engine": {"image": RUNTIME},
            "kvCache": {"mode": "Fixed", "dtype": dtype},
            "drain": QUICK,
        }
        self.rest.create(SERVICES, {"metadata": {"name": name}, "spec": {**base, **spec},
                                    "apiVersion": "kvpilot.io/v1alpha1", "kind": "QuantizedLLMService"})  # fmt: skip
        self.until_status(name, lambda s: s.get("kvCache", {}).get("activeDtype") == dtype, f"{name} serves {dtype}")
        self.shell(f"kubectl -n $NAMESPACE wait qllm/{name} --for=condition=Ready --timeout=10m")

    def answering(self, service: str) -> set[str]:
        """Return the owners' names of the pods behind a Service."""
        path = f"/apis/discovery.k8s.io/v1beta1/namespaces/{NAMESPACE}/endpointslices"
        slices = self.rest.get(f"{path}?labelSelector=kubernetes.io/service-name={service}")["items"]
        ready = [one for each in slices for one in each.get("endpoints") or () if one["conditions"].get("ready")]
        return {one["targetRef"]["name"].rsplit("-", 2)[0] for one in ready}

    def url(self, service: str) -> str:
        address = self.rest.get(f"/api/v1/namespaces/{NAMESPACE}/services/{service}")["spec"]["clusterIP"]
        return f"http://{address}:{service_port(80)}"

    async def under_load(self, service: str, model: str, act: Callable[[], None]) -> Load:
        """Run `act` while two users send requests, and return their load."""
        load = Load(self.url(service), model, users=2, prompt_tokens=64, output_tokens=32)
        await load.start()
        try:
            await asyncio.to_thread(act)
        finally:
            await load.stop()
        return load


@pytest.fixture(scope="module")
def world(cluster: LocalCluster, installable: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("pages")
    shell = Shell(folder, cluster.kubeconfig, installable, NAMESPACE=NAMESPACE, OPERATOR=OPERATOR)
    shell.remove_kvpilot()
    shell(blocks(section("install.md", "With Helm"))[0].replace("helm test kvpilot --namespace kvpilot-system", ""))
    shell("kubectl create namespace $NAMESPACE")
    yield World(cluster, shell)
    shell("helm uninstall kvpilot --namespace $OPERATOR --ignore-not-found")
    shell("kubectl delete crd quantizedllmservices.kvpilot.io --ignore-not-found")
    shell("kubectl delete namespace $NAMESPACE $OPERATOR")


def of_the_page(title: str) -> Any:
    """Return the YAML documents of a section of migrate.md, for engines of this cluster."""
    (text,) = blocks(section("migrate.md", title), "yaml")
    return list(yaml.safe_load_all(text))


def test_a_deployment_is_replaced_and_its_clients_keep_their_address(world: World) -> None:
    deployment, service = of_the_page("Start from your Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["image"] = RUNTIME
    (asked,) = of_the_page("Write the service")
    asked["spec"]["drain"] = QUICK
    (world.shell.folder / "deployment.yaml").write_text(yaml.safe_dump_all([deployment, service]))
    (world.shell.folder / "service.yaml").write_text(yaml.safe_dump(asked))
    world.shell("kubectl -n $NAMESPACE apply -f deployment.yaml")
    until(lambda: world.answering("chat-vllm") == {"chat-vllm"}, "the Deployment answers")
    for title in ("Start kvpilot's engines beside the Deployment", "Move the clients"):
        world.shell(blocks(section("migrate.md", title))[0])
    revision = world.service("chat")["status"]["stable"]["revision"]
    until(lambda: world.answering("chat-vllm") == {f"chat-{revision}"}, "clients reach the new engine")
    world.shell(blocks(section("migrate.md", "Go back"))[0])
    until(lambda: world.answering("chat-vllm") == {"chat-vllm"}, "clients are back at the Deployment")
    world.shell(blocks(section("migrate.md", "Move the clients"))[0])
    until(lambda: world.answering("chat-vllm") == {f"chat-{revision}"}, "clients reach the new engine again")
    world.shell(blocks(section("migrate.md", "Delete the Deployment"))[0])
    assert world.answering("chat-vllm") == {f"chat-{revision}"}


def test_a_dtype_is_undone_and_a_canary_is_ended_without_a_denial(world: World) -> None:
    steps = {"steps": [{"weightPercent": 50, "holdSeconds": 600}]}
    limits = {"probeSets": ["builtin/general"], "maxExcessKLMillinats": 100000, "minTop1AgreementPercent": 0}
    world.create("undo", "k4v4", canary={**steps, "capacityPolicy": "Surge"}, accuracy=limits, replicas=1)
    for block in blocks((Path(__file__).parents[2] / "docs" / "undo.md").read_text())[:2]:
        world.shell(block, NAME="undo")
    assert world.service("undo")["spec"]["rollout"]["paused"] is True
    world.rest.merge(f"{SERVICES}/undo", {"spec": {"rollout": {"paused": False}, "kvCache": {"dtype": "k8v4"}}})
    world.until_status("undo", lambda s: bool(s.get("canary")), "a canary runs")
    (end,) = blocks(section("undo.md", "End a canary"))
    world.shell(end, NAME="undo")
    status = world.until_status("undo", lambda s: not s.get("canary"), "the canary has ended")
    assert (status["kvCache"]["activeDtype"], status["kvCache"].get("denied", [])) == ("k4v4", [])
    world.shell("kubectl kvpilot retry undo -n $NAMESPACE")
    world.until_status("undo", lambda s: bool(s.get("canary")), "the same revision is tried again at once")
    world.shell(end, NAME="undo")
    world.until_status("undo", lambda s: not s.get("canary"), "the second canary has ended")
    world.rest.merge(f"{SERVICES}/undo", {"spec": {"canary": {"steps": []}}})
    (back,) = blocks(section("undo.md", "Return to another dtype"))
    world.shell(back, NAME="undo")
    world.until_status("undo", lambda s: s["kvCache"]["activeDtype"] == "auto", "16 bits serve again")
    (replicas,) = blocks(section("undo.md", "Set the replicas"))
    world.shell(replicas, NAME="undo")
    assert world.service("undo")["spec"]["replicas"] == 2
    world.shell("kubectl -n $NAMESPACE delete qllm undo --cascade=foreground")


def test_a_service_restored_from_a_backup_has_its_dtype(world: World) -> None:
    world.create("kept", "k4v4")
    backup, restore = blocks(section("day-2.md", "Back up, and restore elsewhere"))
    world.shell(backup, NAME="kept")
    assert set(yaml.safe_load((world.shell.folder / "kept.yaml").read_text())) == {
        "apiVersion", "kind", "metadata", "spec"
    }  # fmt: skip
    world.shell("kubectl -n $NAMESPACE delete qllm kept --cascade=foreground")
    world.shell(restore, NAME="kept")
    world.shell("kubectl -n $NAMESPACE wait qllm/kept --for=condition=Ready --timeout=10m")
    assert world.service("kept")["status"]["kvCache"]["activeDtype"] == "k4v4"
    world.shell("kubectl -n $NAMESPACE delete qllm kept --cascade=foreground")


async def test_engines_continue_as_plain_deployments_after_kvpilot_is_removed(world: World) -> None:
    world.rest.merge(f"{SERVICES}/chat", {"spec": {"replicas": 2}})
    world.until_status("chat", lambda s: s.get("readyReplicas") == 2, "two engines answer")
    name = f"chat-{world.service('chat')['status']['stable']['revision']}"

    def leave() -> None:
        for title in ("Stop the operator", "Release the engines", "Remove kvpilot"):
            for block in blocks(section("leave.md", title)):
                world.shell(block, NAME="chat")

    load = await world.under_load("chat", "chat", leave)
    assert (load.stats.ok > 0, list(load.stats.failures)) == (True, [])
    deployment = world.rest.get(f"{DEPLOYMENTS}/{name}")
    assert "ownerReferences" not in deployment["metadata"]
    assert "readinessGates" not in json.dumps(deployment["spec"])
    assert world.answering("chat") == world.answering("chat-vllm") == {name}
