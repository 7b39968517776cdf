"""Local cluster of the demo: a control plane, one node and the operator, all on this machine."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient

from kvpilot_demo.observation import work_lines
from kvpilot_demo.service import ROOT, DemoService
from kvpilot_localcluster.addresses import free_port, service_port
from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.images import DEFAULT_TABLE
from kvpilot_localcluster.rest import Rest
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from kvpilot_smallmodels.models import smollm2_135m

CRD = ROOT / "crds" / "kvpilot.io_quantizedllmservices.yaml"
NAMESPACE = "default"

Report = Callable[[str, float], None]


class World(DemoService):
    """Local cluster with the operator and the demo's service. Use `async with World.up(...)`."""

    def __init__(self, folder: Path, local: LocalCluster, cluster: Cluster, example: Object | None = None) -> None:
        super().__init__(folder, cluster, NAMESPACE, example)
        self._local = local
        self._operator: subprocess.Popen[bytes] | None = None

    @property
    def rest(self) -> Rest:
        """Return a blocking client, for requests that the operator's client does not offer."""
        return self._local.rest

    @property
    def kubeconfig(self) -> Path:
        """Return the path of the administrator's kubeconfig."""
        return self._local.kubeconfig

    @property
    def logs(self) -> str:
        """Return a text that names the operator's log and the newest engine's."""
        engines = sorted(self._engine_logs(), key=lambda log: log.stat().st_mtime)
        return " and ".join(str(log) for log in [self.folder / "operator.log", *engines[-1:]])

    @classmethod
    @contextlib.asynccontextmanager
    async def up(
        cls,
        folder: Path,
        report: Report,
        table: Path = DEFAULT_TABLE,
        *,
        newer: bool = True,
        example: Object | None = None,
        resources: Mapping[str, str] | None = None,
        gpu_devices: int = 0,
    ) -> "AsyncIterator[World]":
        """Build missing programs and start everything. Stop it at the end.

        Args:
            folder: folder for the files of this run.
            report: callback that gets the steps of the build and their progress.
            table: the image table.
            newer: True to start the server that enforces CEL rules, too. Its build takes as long as all others
                together.
            example: the service's manifest; by default that of examples/smollm2.yaml.
            resources: additional resources of the node, such as GPUs. They need not exist.
            gpu_devices: number of GPU devices that the node offers, if this is more than the machine has.
        """
        local = await asyncio.to_thread(
            LocalCluster, folder, table=table, resources=resources, gpu_devices=gpu_devices, report=report, newer=newer
        )
        await asyncio.to_thread(smollm2_135m, report)
        try:
            report("control plane and node", 0.0)
            await asyncio.to_thread(local.start)
            report("control plane and node", 1.0)
            await config.load_kube_config(config_file=str(local.kubeconfig))
            world = cls(folder, local, Cluster(ApiClient()), example)
            try:
                await world._install_crd()
                world.start_operator()
                yield world
            finally:
                await world._down()
        finally:
            await asyncio.to_thread(local.stop)

    def start_operator(self) -> None:
        """Start the operator as a process, as it runs outside a cluster after `pip install`."""
        command = [str(Path(sys.executable).parent / "kvpilot-operator"), "--scrape-seconds=2"]
        command += ["--http-host=127.0.0.1", f"--http-port={free_port()}"]
        with (self.folder / "operator.log").open("ab") as log:
            self._operator = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
                # In a session of its own the operator does not get Ctrl-C from the terminal. The demo ends the operator
                # itself.
                start_new_session=True,
            )

    def kill_operator(self) -> None:
        """Kill the operator with SIGKILL."""
        if self._operator is not None:
            self._operator.kill()
            self._operator.wait()

    async def url(self) -> str:
        """Return the Service's address, which is on loopback."""
        return f"http://{await self.cluster_ip()}:{service_port(80)}"

    def work(self) -> int:
        """Return the number of lines in the engines' logs, without those about health and metrics."""
        return sum(work_lines(log.read_text(errors="replace")) for log in self._engine_logs())

    def _engine_logs(self) -> list[Path]:
        return list((self.folder / "node" / "logs").glob("*/*/*.log"))

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
    """Create a folder for the files of this run, beside the cache."""
    folder = cache_folder() / "runs" / str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
