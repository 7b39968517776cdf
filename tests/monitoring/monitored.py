"""A real operator in a pod, a real vLLM that it manages, and a real Prometheus that discovers and scrapes them."""

import asyncio
import copy
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from panels import RULES

from kvpilot_localcluster import procs
from kvpilot_localcluster.addresses import free_port, service_port
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.engines.real import HANGS
from kvpilot_localcluster.rest import until
from kvpilot_localcluster.toolbox.promtool import prometheus
from kvpilot_smallmodels.models import tiny_llama

ROOT = Path(__file__).parents[2]
OPERATOR, NAMESPACE, NAME = "kvpilot-system", "models", "chat"
SERVICES = f"/apis/kvpilot.io/v1alpha1/namespaces/{NAMESPACE}/quantizedllmservices"
SCRAPES = "5s"
"""Interval and timeout of scrapes. After a timeout no series has a value until the next scrape.

A scrape takes up to 0.02 s on idle cores, and up to 1.4 s if eleven processes share two cores.
"""
_LABELS = {"app.kubernetes.io/name": "kvpilot", "app.kubernetes.io/component": "operator"}


def _operator(kubeconfig: Path) -> dict[str, Any]:
    container = {
        "name": "operator",
        "image": "kvpilot/operator:test",
        "command": ["kvpilot-operator"],
        "args": ["--http-host=$(POD_IP)", "--scrape-seconds=2"],
        "env": [
            {"name": "KUBECONFIG", "value": str(kubeconfig)},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 1},
    }
    return {
        "metadata": {"name": "kvpilot-operator", "labels": _LABELS},
        "spec": {
            "selector": {"matchLabels": _LABELS},
            "template": {"metadata": {"labels": _LABELS}, "spec": {"containers": [container]}},
        },
    }


def _service() -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text()))
    made["metadata"] = {"name": NAME, "namespace": NAMESPACE}
    made["spec"]["model"] = {"source": "file:///models/tiny-llama", "maxModelLen": 512}
    made["spec"]["engine"]["extraArgs"] = ["--enforce-eager", "--max-num-seqs=16", "--kv-cache-memory-bytes=2M"]
    made["spec"]["engine"]["resources"] = {"requests": {"cpu": "50m", "memory": "1Gi"}}
    made["spec"]["kvCache"] = {"mode": "Fixed", "dtype": "auto"}
    # The model has random weights, so its answers mean nothing. These limits let every canary pass.
    made["spec"]["accuracy"] = {
        "probeSets": ["builtin/general"],
        "maxExcessKLMillinats": 100000,
        "minTop1AgreementPercent": 0,
    }
    return made


def documented() -> dict[str, Any]:
    """Return the scrape configuration that docs/metrics.md recommends."""
    found = re.search(r"```yaml\n(scrape_configs:.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    assert found is not None
    config: dict[str, Any] = yaml.safe_load(found[1])
    return config


def without_discovery(config: dict[str, Any], targets: Path) -> dict[str, Any]:
    """Return `config` with pods from the file `targets`: Debian's Prometheus lacks Kubernetes service discovery."""
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["file_sd_configs"] = [{"files": [str(targets)]}]
    return config


def discovered(pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets that Prometheus' pod discovery makes of these pods: one for each port, with its labels."""
    found = []
    for pod in pods:
        about, address = pod["metadata"], (pod.get("status") or {}).get("podIP")
        labels = {"__meta_kubernetes_namespace": about["namespace"], "__meta_kubernetes_pod_name": about["name"]}
        for name, value in (about.get("labels") or {}).items():
            plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            labels[f"__meta_kubernetes_pod_label_{plain}"] = value
            labels[f"__meta_kubernetes_pod_labelpresent_{plain}"] = "true"
        for port in (port for one in pod["spec"]["containers"] for port in one.get("ports", ())):
            number = str(port["containerPort"])
            of_port = {
                "__meta_kubernetes_pod_container_port_name": port.get("name", ""),
                "__meta_kubernetes_pod_container_port_number": number,
            }
            if address:
                found.append({"targets": [f"{address}:{number}"], "labels": {**labels, **of_port}})
    return found


class Prometheus:
    """Running Prometheus; use `async with Prometheus.up(folder)`."""

    def __init__(self, url: str) -> None:
        self._url = url

    @classmethod
    @asynccontextmanager
    async def up(cls, folder: Path) -> "AsyncIterator[Prometheus]":
        """Run Prometheus with the documented scrape configuration for the targets in `folder`/targets.json."""
        config, address = folder / "prometheus.yml", f"127.0.0.1:{free_port()}"
        times = {"scrape_interval": SCRAPES, "scrape_timeout": SCRAPES, "evaluation_interval": "1s"}
        whole = {"global": times, "rule_files": [str(RULES)]}
        config.write_text(yaml.safe_dump(whole | without_discovery(documented(), folder / "targets.json")))
        command = [str(prometheus()), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command += [f"--web.listen-address={address}", "--log.level=warn"]
        log = folder / "prometheus.log"
        process = procs.spawn(folder / "prometheus.pid", command, log=log, env=dict(os.environ))
        try:
            # Prometheus listens before its database is open. Until then it answers in plain text.
            async with asyncio.timeout(HANGS):
                while not await _ready(f"http://{address}/-/ready"):
                    assert process.poll() is None, procs.tail(log)
                    await asyncio.sleep(0.1)
            yield cls(f"http://{address}/api/v1")
        finally:
            procs.end(folder / "prometheus.pid")

    async def ask(self, path: str, **parameters: str | float) -> Any:
        """Return the `data` field of one answer of Prometheus' HTTP API."""
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            found = (await client.get(f"{self._url}/{path}", params=parameters)).json()
        assert found["status"] == "success", found
        return found["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current series of an expression."""
        found: list[dict[str, Any]] = (await self.ask("query", query=expression))["result"]
        return found


async def _ready(url: str) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


class Monitored:
    """Cluster with its Prometheus; use `async with Monitored.up(folder)`."""

    def __init__(self, cluster: LocalCluster, prometheus: Prometheus) -> None:
        self.rest = cluster.rest
        self.kubeconfig = cluster.kubeconfig
        self.ask = prometheus.ask
        self.query = prometheus.query

    @classmethod
    @asynccontextmanager
    async def up(cls, folder: Path) -> "AsyncIterator[Monitored]":
        """Start everything, and wait until the service is Ready."""
        tiny_llama()
        cluster = LocalCluster(folder / "cluster")
        try:
            await asyncio.to_thread(cluster.start)
            async with Prometheus.up(folder) as prometheus:
                monitored = cls(cluster, prometheus)
                await asyncio.to_thread(monitored._install)
                discovering = asyncio.create_task(monitored._discover(folder / "targets.json"))
                await monitored.until(lambda s: condition(s, "Ready") == "True")
                yield monitored
                discovering.cancel()
        finally:
            await asyncio.to_thread(cluster.stop)

    def _install(self) -> None:
        define(self.rest, [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))])
        for name in (OPERATOR, NAMESPACE):
            self.rest.create("/api/v1/namespaces", {"metadata": {"name": name}})
            account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            until(lambda path=account: self.rest.get(path).get("secrets"), "the default service account")
        self.rest.create(f"/apis/apps/v1/namespaces/{OPERATOR}/deployments", _operator(self.kubeconfig))
        self.rest.create(SERVICES, _service())

    async def _discover(self, targets: Path) -> None:
        while True:
            pods = (await asyncio.to_thread(self.rest.get, "/api/v1/pods"))["items"]
            procs.write_atomically(targets, json.dumps(discovered(pods)))
            await asyncio.sleep(1)

    async def until(self, seen: Callable[[dict[str, Any]], bool], *, seconds: float = HANGS) -> dict[str, Any]:
        """Wait until the service's status fulfils a condition, and return it."""
        status: dict[str, Any] = {}
        try:
            async with asyncio.timeout(seconds):
                while True:
                    found = await asyncio.to_thread(self.rest.get, f"{SERVICES}/{NAME}")
                    status = found.get("status") or {}
                    if seen(status):
                        return status
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise AssertionError(f"not seen in {seconds:g} s; status: {status}") from None

    async def patch(self, spec: dict[str, Any]) -> None:
        await asyncio.to_thread(self.rest.merge, f"{SERVICES}/{NAME}", {"spec": spec})

    async def engine_url(self) -> str:
        found = await asyncio.to_thread(self.rest.get, f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}")
        return f"http://{found['spec']['clusterIP']}:{service_port(80)}"


def condition(status: dict[str, Any], kind: str) -> str | None:
    return next((one["status"] for one in status.get("conditions", ()) if one["type"] == kind), None)
