"""A real HorizontalPodAutoscaler and the operator share an example's service, and each writes only its own fields.

Cheap engines (`kvpilot_localcluster.engines.faulty`) suffice, because the test checks only who writes.
"""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_adapter import Adapter, page, serving

from kvpilot_localcluster import audit
from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.engines import faulty
from kvpilot_localcluster.rest import until
from kvpilot_operator.api.names import API_VERSION, REVISION_LABEL, SERVICE_LABEL

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENGINE = Path(faulty.__file__)
SERVICES = f"/apis/{API_VERSION}/namespaces/default/quantizedllmservices"
AUTOSCALERS = "/apis/autoscaling/v2beta2/namespaces/default/horizontalpodautoscalers"
OPERATOR = "kvpilot-operator"
HANGS = {"name": "FAULTY_ENGINE", "value": json.dumps({"completions": "hang", "only_dtype": "fp8"})}
QUICK = {
    "cache": {},
    "drain": {"preStopSeconds": 0, "timeoutSeconds": 5},
    "kvCache": {"mode": "Fixed", "dtype": "auto", "pressure": {"sustainedSeconds": 10}},
    "accuracy": {"probeSets": ["builtin/general"], "periodSeconds": 86400},
}

Json = dict[str, Any]


class World:
    """Cluster whose operator has its own user name in the audit log, and the load of the engines."""

    def __init__(self, cluster: LocalCluster, operator: str) -> None:
        self.cluster, self.rest, self.operator = cluster, cluster.rest, operator
        self.adapter = Adapter(cluster.rest, lambda: operator)
        self.load: dict[str, Json] = {}
        """Total metrics of each service. `_spread` divides them among the service's engines."""
        self._rounds = 0

    def status(self, name: str) -> Json:
        found: Json = self.rest.get(f"{SERVICES}/{name}").get("status") or {}
        return found

    def scale(self, name: str) -> Json:
        found: Json = self.rest.get(f"{SERVICES}/{name}/scale")
        return found

    def deployments(self, name: str) -> dict[str, int]:
        """Return the replicas by revision."""
        path = f"/apis/apps/v1/namespaces/default/deployments?labelSelector={SERVICE_LABEL}%3D{name}"
        items = self.rest.get(path)["items"]
        return {d["metadata"]["labels"][REVISION_LABEL]: d["spec"]["replicas"] for d in items}

    def pods(self, name: str, **labels: str) -> list[Json]:
        selector = ",".join([f"{SERVICE_LABEL}={name}", *(f"{k}={v}" for k, v in labels.items())])
        items: list[Json] = self.rest.get(f"/api/v1/namespaces/default/pods?labelSelector={selector}")["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def apply_example(self, file: str, **changes: Any) -> str:
        """Apply both objects of an example, and return their name.

        The autoscaler is created as v2beta2, which this server supports.
        """
        service, autoscaler = yaml.safe_load_all((EXAMPLES / file).read_text())
        service["spec"] |= changes
        self.rest.create(SERVICES, service)
        name: str = service["metadata"]["name"]
        self.until(lambda: self.status(name).get("readyReplicas") == 1, f"{name} answers")
        autoscaler["apiVersion"] = "autoscaling/v2beta2"
        self.rest.create(AUTOSCALERS, autoscaler)
        return name

    def until(self, question: Callable[[], Any], what: str) -> Any:
        """Wait, and keep the load on the engines meanwhile."""

        def asked() -> Any:
            self._spread()
            return question()

        try:
            return until(asked, what, pause=0.25)
        except TimeoutError as error:
            told = {name: self.status(name).get("conditions") for name in self.load}
            raise TimeoutError(f"{error}; {told}") from None

    def _spread(self) -> None:
        # The operator would reject a usage that stays constant while requests come and go.
        self._rounds += 1
        wobble = 0.01 * (self._rounds % 2)
        for name, figures in self.load.items():
            service = self.rest.get(f"/api/v1/namespaces/default/services/{name}")
            pods = [p for p in self.pods(name, **_without(service["spec"]["selector"], SERVICE_LABEL)) if _ready(p)]
            for i, pod in enumerate(pods):
                shares = {k: (v + len(pods) - 1 - i) // len(pods) for k, v in figures.items() if isinstance(v, int)}
                _post(pod, {**figures, **shares, "usage": figures["usage"] + wobble})

    def writes(self, path: str) -> set[tuple[str, str]]:
        """Return (user, verb, rest of the path) of every write below a path."""
        found = audit.writes(self.cluster.plane.audit_log)
        return {
            (w.user, w.what.replace(path, ""))
            for w in found
            if w.what.partition(" ")[2].startswith(path) and w.status < 300
        }


def _without(labels: dict[str, str], name: str) -> dict[str, str]:
    return {k: v for k, v in labels.items() if k != name}


def _ready(pod: Json) -> bool:
    return {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}.get("Ready") == "True"


def _post(pod: Json, faults: Json) -> None:
    url = f"http://{pod['status']['podIP']}:8000/faults"
    request = urllib.request.Request(url, json.dumps(faults).encode(), {"Content-Type": "application/json"})
    with contextlib.suppress(OSError):  # the pod may just be terminating
        urllib.request.urlopen(request, timeout=5).close()  # noqa: S310 (loopback)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("autoscaling")
    serve = folder / "bin" / "kvpilot-serve"
    serve.parent.mkdir()
    serve.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    serve.chmod(0o755)
    table = folder / "images.yaml"
    image = {"match": ["ghcr.io/kvpilot/runtime:*"], "entrypoint": ["kvpilot-serve"], "path": [str(serve.parent)]}
    table.write_text(yaml.safe_dump({"images": [image | {"env": {"KVPILOT_SERVE_HOST": "$(POD_IP)"}}]}))
    room = {"nvidia.com/gpu": "16", "cpu": "200", "memory": "1000Gi"}
    with LocalCluster(folder / "cluster", table=table, resources=room, backoff=1.0, audit=True) as cluster:
        crds = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]
        define(cluster.rest, crds)
        port = free_port()
        world = World(cluster, f"http://127.0.0.1:{port}")
        command = [str(Path(sys.executable).parent / "kvpilot-operator"), "--scrape-seconds=1"]
        command += ["--http-host=127.0.0.1", f"--http-port={port}"]
        environment = {**os.environ, "KUBECONFIG": str(cluster.plane.user(OPERATOR))}
        with (folder / "operator.log").open("wb") as log:
            operator = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            with serving(world.adapter, cluster.rest, cluster.plane.folder):
                yield world
        finally:
            operator.terminate()
            operator.wait(300)


def test_an_hpa_on_running_and_waiting_requests_scales_a_service_during_a_canary(world: World) -> None:
    engine = yaml.safe_load((EXAMPLES / "hpa-custom.yaml").read_text().split("\n---\n")[0])["spec"]["engine"]
    name = world.apply_example("hpa-custom.yaml", **QUICK, engine={**engine, "env": [HANGS]})
    (stable,) = world.deployments(name)

    world.load[name] = {"usage": 0.3, "running": 100, "waiting": 30}
    world.until(lambda: world.deployments(name) == {stable: 3}, "130 requests of 48 a replica need 3 replicas")
    world.until(lambda: world.status(name).get("readyReplicas") == 3, "the Deployment has followed")
    scale = world.scale(name)
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)

    # The test stops the canary in the middle of its probes. No request waits now, so the probes do not yield to users.
    world.load[name] = {"usage": 0.3, "running": 130, "waiting": 0}
    world.rest.merge(f"{SERVICES}/{name}", {"spec": {"kvCache": {"dtype": "fp8"}}})
    world.until(lambda: world.status(name).get("canary", {}).get("stage") == "Probing", "the canary is probed")
    canary = world.status(name)["canary"]["revision"]
    (probed,) = world.pods(name, **{REVISION_LABEL: canary})
    assert world.scale(name)["status"]["replicas"] == 3
    world.adapter.asked.clear()
    world.load[name] = {"usage": 0.3, "running": 190, "waiting": 0}
    world.until(lambda: world.deployments(name) == {stable: 4, canary: 1}, "the stable side grows during the trial")
    assert world.scale(name)["spec"]["replicas"] == 4
    (selector,) = set(world.adapter.asked["vllm_requests_in_flight"])
    assert f"{REVISION_LABEL}={stable}" in selector

    # Let the canary replace the four replicas while the autoscaler polls. For a moment the autoscaler also counts the
    # requests of replicas that leave, and may scale out. A window of 0 s lets it scale in again at once (default 300).
    world.rest.merge(f"{AUTOSCALERS}/{name}", {"spec": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}})
    _post(probed, {"completions": ""})
    world.until(lambda: world.deployments(name) == {canary: 4}, "the canary has been promoted")
    world.until(lambda: world.status(name)["kvCache"]["activeDtype"] == "fp8", "the status says so")

    world.load[name] = {"usage": 0.3, "running": 130, "waiting": 0}
    world.until(lambda: world.deployments(name) == {canary: 3}, "fewer requests need fewer replicas")
    _operator_wrote_no_number(world, name)


def test_an_hpa_scales_to_the_number_of_replicas_that_kvpilot_recommends(world: World) -> None:
    quick = {**QUICK, "scaling": {"mode": "External", "maxReplicas": 6, "scaleDownStabilizationSeconds": 10}}
    name = world.apply_example("hpa-external.yaml", **quick)
    world.load[name] = {"usage": 0.97, "running": 30, "waiting": 20}
    world.until(lambda: world.scale(name)["spec"]["replicas"] > 1, "memory pressure makes kvpilot recommend replicas")
    assert world.status(name)["scaling"].get("desiredReplicas") is None
    world.until(lambda: sum(world.deployments(name).values()) > 1, "the Deployment follows")
    recommended = next(
        value
        for n, about, value in page(world.operator)
        if n == "kvpilot_recommended_replicas" and about["name"] == name
    )
    assert recommended > 1
    world.load[name] = {"usage": 0.02, "running": 1, "waiting": 0}
    most = world.scale(name)["spec"]["replicas"]
    world.until(lambda: world.scale(name)["spec"]["replicas"] < most, "without load, kvpilot recommends fewer replicas")
    assert set(world.adapter.asked["kvpilot_recommended_replicas"]) == {f"name={name}"}
    _operator_wrote_no_number(world, name)


def _operator_wrote_no_number(world: World, name: str) -> None:
    """Check in the API server's audit log, and by the managers of fields, that the operator never wrote replicas."""
    writes = world.writes(f"{SERVICES}/{name}")
    assert (OPERATOR, "patch /status") in writes
    assert {what for user, what in writes if user == OPERATOR} == {"patch /status"}
    assert ("system:serviceaccount:kube-system:horizontal-pod-autoscaler", "update /scale") in writes
    managers = world.rest.get(f"{SERVICES}/{name}")["metadata"]["managedFields"]
    ours = [set(entry["fieldsV1"]) for entry in managers if entry["manager"] == "kvpilot"]
    assert ours == [{"f:status"}]
