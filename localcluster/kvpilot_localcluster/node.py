"""Node agent: register one Node, and run the containers of its Pods as local processes.

Like a kubelet, it handles:

- the Node's Lease and conditions;
- command, arguments, environment variables and working folder;
- init containers, and restart policies with back-off;
- startup, readiness and liveness probes;
- preStop, SIGTERM and the grace period;
- exit codes, termination messages, statuses and conditions;
- GPUs: each has one owner, which sees no other (gpus.py);
- `kubectl logs`.

After a kill -9 of the agent, its processes continue. The next agent with the same folder adopts them, and no container
ever runs twice.

The agent isolates nothing: processes share this machine's files, users, process table and network. Only paths in
commands and variables are rewritten (see paths.py). Every pod has its own loopback address, to which its programs must
bind. Resource requests count for scheduling but limit nothing. The agent pulls no images, because a table names local
programs. It writes ConfigMap and Secret volumes only once, at the pod's start.

The agent has no exec, attach or port-forward, no postStart hooks, no sidecar or ephemeral containers, no gRPC probes,
and no service account tokens in the usual place. It is only for tests and the demo, never for production.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiException

from kvpilot_localcluster import controlplane, gpus, images, procs
from kvpilot_localcluster.addresses import Addresses
from kvpilot_localcluster.backoff import Backoff
from kvpilot_localcluster.container import Process, exited
from kvpilot_localcluster.errors import LocalClusterError
from kvpilot_localcluster.kube import MERGE, STRATEGIC, Json, Kube
from kvpilot_localcluster.kubelet_api import LogServer
from kvpilot_localcluster.pod import PodWorker
from kvpilot_localcluster.pod_command import Node
from kvpilot_localcluster.podstatus import timestamp
from kvpilot_localcluster.services import Forwarder
from kvpilot_localcluster.tasks import cancelled

log = logging.getLogger("kvpilot_localcluster.node")
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
# Renew the Lease often, so that a slow agent on a busy machine does not look like a lost node.
_HEARTBEAT = 2.0
_STATUS = 30.0


@dataclass(frozen=True)
class Options:
    """Settings of a node agent.

    Attributes:
        kubeconfig: path of an administrator's kubeconfig.
        folder: folder for records, volumes and logs. An agent with the folder of an earlier one adopts its running
            pods.
        name: the Node's name.
        table: the image table.
        resources: allocatable resources to add or change, e.g. {"nvidia.com/gpu": "4"}. They need not exist. Without an
            entry for GPUs, the node has the machine's GPUs.
        gpu_devices: number of GPU devices that the node offers, if this is more than the machine has.
            Pods then share GPUs, as with time slicing.
        labels: additional labels of the Node.
        backoff: back-off of container restarts.
        services: True if the agent also forwards Services.
        stop_grace: seconds that processes get to end when the agent is stopped.
        starter: process that started the cluster. When it has ended for any reason, the agent ends the cluster.
        control_plane: the control plane's run folder, which the agent needs to end the cluster.
    """

    kubeconfig: Path
    folder: Path
    name: str = "local"
    table: Path = images.DEFAULT_TABLE
    resources: Mapping[str, str] = field(default_factory=dict)
    gpu_devices: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)
    services: bool = True
    stop_grace: float = 5.0
    starter: int | None = None
    control_plane: Path | None = None


def machine_resources() -> dict[str, str]:
    """Return a Node's resources: the machine's CPUs and memory, and fixed amounts of storage and pods."""
    kib = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    return {"cpu": str(os.cpu_count() or 1), "memory": f"{kib}Ki", "ephemeral-storage": "50Gi", "pods": "110"}


def _gpus() -> list[gpus.Gpu]:
    try:
        return gpus.find()
    except LocalClusterError as error:
        # A machine with a broken driver can still run pods that need no GPU.
        log.warning("the node has no GPUs: %s", error)
        return []


class Agent:
    """Agent of one Node. `run` continues until it is cancelled."""

    def __init__(self, kube: Kube, options: Options) -> None:
        self._kube = kube
        self._options = options
        options.folder.mkdir(parents=True, exist_ok=True)
        found = [] if gpus.RESOURCE in options.resources else _gpus()
        count = max(len(found), options.gpu_devices)
        own = {gpus.RESOURCE: str(count)} if found else {}
        self._labels = {**gpus.labels(found, gpus.cuda_version() if found else "", count), **options.labels}
        self._resources = {**machine_resources(), **own, **options.resources}
        devices = gpus.Devices(int(self._resources.get(gpus.RESOURCE, 0)), len(found), options.folder / "pods")
        table = images.load(options.table)
        self._node = Node(kube, options.name, options.folder, table, options.backoff, self._resources, devices)
        self._addresses = Addresses(options.folder)
        self._pods: dict[str, PodWorker] = {}
        # Pods that this agent has ended. Ignore stale events about them until the watch reports their deletion.
        self._ended: set[str] = set()
        self._port = 0
        self._forwarder = Forwarder(kube, self._node.services)

    async def run(self) -> None:
        """Register the Node and run its pods. When cancelled, end their processes."""
        await self._serve_logs()
        await self._register()
        log.info("node %s is registered; logs lie in %s", self._options.name, self._options.folder / "logs")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._watch())
                if self._options.services:
                    group.create_task(self._forwarder.run())
        finally:
            await asyncio.gather(*(pod.abandon(self._options.stop_grace) for pod in list(self._pods.values())))

    async def _serve_logs(self) -> None:
        """Serve `kubectl logs`. Use the API server's certificate if this package created the cluster."""
        certificates = self._options.kubeconfig.resolve().parent
        certificate, key = certificates / "server.crt", certificates / "server.key"
        if certificate.exists() and key.exists():
            self._port = await LogServer(self._logs, certificate, key).start(self._node.host)

    def _logs(self, namespace: str, name: str) -> Path | None:
        found = [pod.logs for pod in self._pods.values() if pod.key == (namespace, name)]
        return found[-1] if found else None

    async def _register(self) -> None:
        name = self._options.name
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self._labels,
        }
        node = {"metadata": {"name": name, "labels": labels}}
        try:
            await self._kube.call("POST", "/api/v1/nodes", node)
        except ApiException as error:
            if error.status != 409:
                raise
            await self._kube.call("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}}, content=MERGE)
        await self._report()

    async def _report(self) -> None:
        now = timestamp(time.time())
        fine = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True"}
        texts = {True: ("AgentReady", "the node agent runs"), False: ("Fine", "not watched by this agent")}
        conditions = []
        for kind, status in fine.items():
            reason, message = texts[kind == "Ready"]
            entry = {"type": kind, "status": status, "reason": reason, "message": message}
            conditions.append({**entry, "lastHeartbeatTime": now, "lastTransitionTime": now})
        addresses = {"InternalIP": self._node.host, "Hostname": self._options.name}
        report: Json = {
            "capacity": self._resources,
            "allocatable": self._resources,
            "conditions": conditions,
            "addresses": [{"type": kind, "address": value} for kind, value in addresses.items()],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "nodeInfo": {"kubeletVersion": "kvpilot-localcluster", "operatingSystem": "linux", "architecture": "amd64"},
        }
        await self._kube.call(
            "PATCH", f"/api/v1/nodes/{self._options.name}/status", {"status": report}, content=STRATEGIC
        )

    async def _beat(self) -> None:
        reported = time.monotonic()
        while True:
            try:
                await self._renew()
                if time.monotonic() - reported > _STATUS:
                    await self._report()
                    reported = time.monotonic()
            except (ApiException, aiohttp.ClientError, TimeoutError) as error:
                log.warning("heartbeat: %s", error)
            await asyncio.sleep(_HEARTBEAT)

    async def _renew(self) -> None:
        name, now = self._options.name, time.time()
        stamp = timestamp(now).replace("Z", ".000000Z")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": stamp}
        try:
            await self._kube.call("PATCH", f"{_LEASES}/{name}", {"spec": spec}, content=MERGE)
        except ApiException as error:
            if error.status != 404:
                raise
            await self._kube.call("POST", _LEASES, {"metadata": {"name": name}, "spec": spec})

    async def _watch(self) -> None:
        listed: dict[str, Json] = {}
        synced = False
        async for kind, pod in self._kube.watch("/api/v1/pods", fieldSelector=f"spec.nodeName={self._options.name}"):
            if kind == "LISTED":
                listed[pod["metadata"]["uid"]] = pod
            elif kind == "SYNCED":
                for uid in set(self._pods) - set(listed):
                    self._pods[uid].vanished()
                self._ended &= set(listed)
                if not synced:
                    await self._clean(listed)
                    synced = True
                # Handle pods that already have an address first. Otherwise a new pod could get the same address.
                for one in sorted(listed.values(), key=lambda pod: not pod.get("status", {}).get("podIP")):
                    self._observe(one)
                listed = {}
            elif kind == "DELETED":
                self._ended.discard(pod["metadata"]["uid"])
                if (worker := self._pods.get(pod["metadata"]["uid"])) is not None:
                    worker.vanished()
            else:
                self._observe(pod)

    def _observe(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        if (worker := self._pods.get(uid)) is not None:
            worker.observe(pod)
            return
        if uid in self._ended:
            return
        phase = pod.get("status", {}).get("phase")
        if (
            phase in ("Succeeded", "Failed")
            and self._recorded(uid) is None
            and "deletionTimestamp" not in pod["metadata"]
        ):
            return  # another agent has already ended this pod, and a pod must not run twice
        address = self._addresses.take(pod.get("status", {}).get("podIP") or self._recorded(uid))

        def forget() -> None:
            self._pods.pop(uid, None)
            self._ended.add(uid)
            self._addresses.release(address)

        self._pods[uid] = PodWorker(self._node, pod, address, forget)

    def _recorded(self, uid: str) -> str | None:
        """Return the address that an earlier agent recorded for a pod but may not have reported, or None."""
        try:
            return str(json.loads((self._options.folder / "pods" / uid / "pod.json").read_text())["address"])
        except (OSError, ValueError, KeyError):
            return None

    async def _clean(self, known: Iterable[str]) -> None:
        """End processes and remove folders of pods that the API server no longer has."""
        gone = set((self._options.folder / "pods").glob("*")) - {self._options.folder / "pods" / uid for uid in known}
        await asyncio.gather(*(end_folder(folder, self._options.stop_grace) for folder in gone))


async def end_folder(folder: Path, grace: float) -> None:
    """End every process that a pod's folder records, and remove the folder.

    A process gets SIGTERM, and SIGKILL after `grace` seconds.
    """
    runs = [Process(run, run / "unknown.log") for run in folder.glob("[!.]*/[0-9]*")]  # noqa: ASYNC240 (a local folder of a few entries)
    await asyncio.gather(*(run.end(grace) for run in runs if run.shim is not None))
    procs.kill_all_of(folder, *folder.parents[1].glob(f"logs/*_{folder.name}"))
    shutil.rmtree(folder, ignore_errors=True)


async def sweep(folder: Path, grace: float = 5.0) -> None:
    """End the processes that a killed agent left behind in its folder, whether recorded or not."""
    await asyncio.gather(*(end_folder(pod, grace) for pod in (folder / "pods").glob("*")))
    procs.kill_all_of(folder)


async def serve(options: Options) -> None:
    """Run an agent until SIGTERM or SIGINT, or until the process that started the cluster has ended."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with Kube(options.kubeconfig) as kube:
        work = asyncio.create_task(Agent(kube, options).run())
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(stopped.wait())]
        if options.starter is not None:
            ends.append(asyncio.create_task(exited(options.starter)))
        await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
        left_behind = ends[-1].done() and not stopped.is_set()
        if work.done():
            await cancelled(*ends)
            work.result()
        await cancelled(work, *ends)
    if left_behind and options.control_plane is not None:
        log.warning("the process that started this cluster has ended: the cluster ends, too")
        controlplane.sweep(options.control_plane)
