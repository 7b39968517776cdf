"""The demo's cluster: control plane, one node and the operator, with the calls that kubectl would make."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient

from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.images import DEFAULT_TABLE
from kvpilot_localcluster.pod import LOGS_ANNOTATION
from kvpilot_localcluster.rest import Rest
from kvpilot_operator.api.names import API_VERSION, DTYPE_LABEL, ENGINE_CONTAINER, KIND, REVISION_LABEL, SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_smallmodels.models import smollm2_135m

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2.yaml"
CRD = ROOT / "crds" / "kvpilot.io_quantizedllmservices.yaml"
NAMESPACE = "default"

Report = Callable[[str, float], None]


class World:
    """A local cluster with the operator. Use `async with World.up(...)`."""

    def __init__(self, folder: Path, local: LocalCluster, cluster: Cluster) -> None:
        self._folder = folder
        self._local = local
        self.cluster = cluster
        self._operator: subprocess.Popen[bytes] | None = None
        self.example: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
        self.name: str = self.example["metadata"]["name"]
        self.model: str = self.example["spec"]["model"].get("servedName", self.name)

    @property
    def logs(self) -> Path:
        """Return the folder that every process writes its log to."""
        return self._folder

    @property
    def rest(self) -> Rest:
        """Return a blocking client for calls that the operator never makes."""
        return self._local.rest

    @property
    def kubeconfig(self) -> Path:
        """Return the kubeconfig for kubectl."""
        return self._local.kubeconfig

    @classmethod
    @contextlib.asynccontextmanager
    async def up(cls, folder: Path, report: Report, table: Path = DEFAULT_TABLE) -> AsyncIterator[World]:
        """Build missing parts, start everything, and stop it at the end. `table` lists the images."""
        local = await asyncio.to_thread(LocalCluster, folder, table=table, report=report)
        await asyncio.to_thread(smollm2_135m, report)
        try:
            report("control plane and node", 0.0)
            await asyncio.to_thread(local.start)
            report("control plane and node", 1.0)
            await config.load_kube_config(config_file=str(local.kubeconfig))
            world = cls(folder, local, Cluster(ApiClient()))
            try:
                await world._install_crd()
                world.start_operator()
                yield world
            finally:
                await world._down()
        finally:
            await asyncio.to_thread(local.stop)

    def start_operator(self) -> None:
        """Start the operator as a process, as after `pip install` outside a cluster."""
        command = [str(Path(sys.executable).parent / "kvpilot-operator"), "--scrape-seconds=2"]
        command += ["--http-host=127.0.0.1", f"--http-port={free_port()}"]
        with (self._folder / "operator.log").open("ab") as log:
            self._operator = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
                # Ctrl-C reaches only the demo, which then ends the operator.
                start_new_session=True,
            )

    def kill_operator(self) -> None:
        """Kill the operator with SIGKILL."""
        if self._operator is not None:
            self._operator.kill()
            self._operator.wait()

    async def apply_example(self) -> None:
        """Apply examples/smollm2.yaml."""
        manifest = {**self.example, "metadata": {**self.example["metadata"], "namespace": NAMESPACE}}
        await self.cluster.create(manifest)

    async def patch(self, patch: Object) -> None:
        """Merge a patch into the service."""
        await self.cluster.merge(Ref(API_VERSION, KIND, NAMESPACE, self.name), patch)

    async def service(self) -> Object | None:
        """Return the service, or None."""
        return await self.cluster.find(Ref(API_VERSION, KIND, NAMESPACE, self.name))

    async def events(self) -> list[Object]:
        """Return the Events about the service."""
        found = await self.cluster.list("v1", "Event", NAMESPACE, "")
        return [e for e in found if e["involvedObject"].get("kind") == KIND]

    async def service_url(self) -> str:
        """Return the address of the Service."""
        found = await self.cluster.get(Ref("v1", "Service", NAMESPACE, self.name))
        address: str = found["spec"]["clusterIP"]
        # Only root may listen on port 80: for others the local cluster adds 20000 (docs/localcluster.md).
        return f"http://{address}" if os.geteuid() == 0 else f"http://{address}:20080"

    async def pods(self) -> list[Object]:
        """Return the service's engine pods."""
        return await self.cluster.list("v1", "Pod", NAMESPACE, f"{SERVICE_LABEL}={self.name}")

    async def until_pods(self, count: int, seconds: float) -> None:
        """Wait until exactly `count` pods are left."""
        async with asyncio.timeout(seconds):
            while len(await self.pods()) != count:
                await asyncio.sleep(0.5)

    async def canary_has_traffic(self) -> bool:
        """Return True if the Service selects the canary's revision, alone or with others."""
        service = await self.service()
        found = await self.cluster.get(Ref("v1", "Service", NAMESPACE, self.name))
        canary = ((service or {}).get("status") or {}).get("canary") or {}
        return found["spec"]["selector"].get(REVISION_LABEL) in (None, canary.get("revision"))

    async def preflight_warning(self, dtype: str) -> str:
        """Return the preflight's warning in the log of the pod that runs `dtype`, or the empty string."""
        for pod in await self.pods():
            if pod["metadata"]["labels"].get(DTYPE_LABEL) != dtype:
                continue
            folder = Path(pod["metadata"]["annotations"][LOGS_ANNOTATION]) / ENGINE_CONTAINER
            for log in sorted(folder.glob("*.log")):
                for line in log.read_text(errors="replace").splitlines():
                    if line.startswith('{"kvpilot"') and json.loads(line).get("kvpilot") == "warning":
                        return str(json.loads(line)["message"])
        return ""

    async def _install_crd(self) -> None:
        await asyncio.to_thread(define, self.rest, [yaml.safe_load(CRD.read_text())])

    async def _down(self) -> None:
        if self._operator is not None and self._operator.poll() is None:
            self._operator.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._operator.wait, 30)
            except subprocess.TimeoutExpired:
                self._operator.kill()
        await self.cluster.close()


def run_folder() -> Path:
    """Make a folder for the files of this run, next to the cache."""
    folder = cache_folder() / "runs" / str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
