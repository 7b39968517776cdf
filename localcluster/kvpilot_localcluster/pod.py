"""Run one pod on this node: prepare its volumes, run its containers in order, and report its status."""

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiException

from kvpilot_localcluster import procs, volumes
from kvpilot_localcluster.container import Command
from kvpilot_localcluster.errors import InvalidPod
from kvpilot_localcluster.kube import MERGE, STRATEGIC, Json
from kvpilot_localcluster.pod_command import Node, command
from kvpilot_localcluster.podstatus import pod_status, timestamp
from kvpilot_localcluster.tasks import cancelled
from kvpilot_localcluster.worker import ContainerWorker

log = logging.getLogger("kvpilot_localcluster.node")
LOGS_ANNOTATION = "localcluster.kvpilot.io/logs"


def pod_folder(node: Node, uid: str) -> Path:
    """Return the folder for a pod's records and volumes."""
    return node.folder / "pods" / uid


class PodWorker:
    """Runner of one pod, from its binding to the node until its deletion in the API server.

    Attributes:
        key: namespace and name.
        logs: the pod's log folder. It has a folder for each container, with a file for each run.

    Args:
        node: facts about the node.
        pod: the Pod from the API server.
        address: the pod's IP address.
        forget: callback when the pod has ended and the API server has deleted it.
    """

    def __init__(self, node: Node, pod: Json, address: str, forget: Callable[[], None]) -> None:
        self._node = node
        self._pod = pod
        self._address = address
        self._forget = forget
        metadata = pod["metadata"]
        self._path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self._folder = pod_folder(node, metadata["uid"])
        self.key = (metadata["namespace"], metadata["name"])
        self.logs = node.folder / "logs" / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
        self._volumes: dict[str, Path] = {}
        self._told: set[str] = set()
        self._deadline: float | None = None
        self._published: Json = {}
        self._dirty = asyncio.Event()
        self._started = self._record()
        policy = pod["spec"].get("restartPolicy", "Always")
        # A successful init container does not restart, whatever the pod's policy is.
        once = "Never" if policy == "Never" else "OnFailure"
        self._inits = [self._worker(one, once, init=True) for one in pod["spec"].get("initContainers") or []]
        self._mains = [self._worker(one, policy) for one in pod["spec"]["containers"]]
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._complain)
        self._publishing = asyncio.create_task(self._publish())
        self._ending: asyncio.Task[None] | None = None
        self.observe(pod)

    def _record(self) -> float:
        """Write a record of the pod for a later agent. Return the time when the node took the pod."""
        file = self._folder / "pod.json"
        if file.exists():
            return float(json.loads(file.read_text())["started"])
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / ".home").mkdir(exist_ok=True)
        now = time.time()
        metadata = self._pod["metadata"]
        names = {"namespace": metadata["namespace"], "name": metadata["name"]}
        procs.write_atomically(file, json.dumps({"started": now, "address": self._address, **names}))
        return now

    def _worker(self, spec: Mapping[str, Any], policy: str, *, init: bool = False) -> ContainerWorker:
        status = self._pod.get("status", {})
        reported = status.get("initContainerStatuses" if init else "containerStatuses") or []
        worker = ContainerWorker(
            spec,
            init=init,
            policy=policy,
            address=self._address,
            folder=self._folder / spec["name"],
            logs=self.logs / spec["name"],
            backoff=self._node.backoff,
            command=self._command,
            changed=self._dirty.set,
            before=next((one for one in reported if one["name"] == spec["name"]), {}),
        )
        worker.grace = float(self._pod["spec"].get("terminationGracePeriodSeconds", 30))
        return worker

    def observe(self, pod: Json) -> None:
        """Store the pod's newest version, as the API server sent it. If the pod is being deleted, begin to end it."""
        if int(pod["metadata"]["resourceVersion"]) >= int(self._pod["metadata"]["resourceVersion"]):
            self._pod = pod
            if pod["spec"].get("readinessGates"):
                self._dirty.set()  # the new version may open or close a readiness gate, on which Ready depends
        if "deletionTimestamp" not in pod["metadata"]:
            return
        deadline = time.monotonic() + float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    def vanished(self) -> None:
        """End the processes of a pod that the API server no longer has. They get two seconds."""
        self._deadline = min(self._deadline or time.monotonic() + 2, time.monotonic() + 2)
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def _run(self) -> None:
        await self._annotate()
        while True:
            try:
                self._volumes = await volumes.prepare(self._pod, self._folder / ".volumes", self._node.fetch)
                break
            except InvalidPod as error:
                await self._tell("FailedMount", f"MountVolume.SetUp failed: {error}")
                await asyncio.sleep(1)
            except (ApiException, aiohttp.ClientError, OSError) as error:
                log.warning("%s: volumes: %s", self._path, error)
                await asyncio.sleep(1)
        for worker in self._inits:
            await worker.work()
            if not worker.view.succeeded:
                return
        async with asyncio.TaskGroup() as group:
            for worker in self._mains:
                group.create_task(worker.work())
        # All containers have ended, and none will start again.
        self._node.devices.release(self._pod["metadata"]["uid"])

    def _complain(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            log.error("%s: an error has ended the work on this pod", self._path, exc_info=error)

    async def _tell(self, reason: str, message: str) -> None:
        """Create an Event about the pod, as a kubelet would. Each message is sent only once."""
        if message in self._told:
            return
        self._told.add(message)
        namespace, name = self.key
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name}
        now = timestamp(time.time())
        body = {
            "metadata": {"generateName": f"{name}."},
            "involvedObject": {**about, "uid": self._pod["metadata"]["uid"]},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self._node.name},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with contextlib.suppress(ApiException, aiohttp.ClientError, TimeoutError):
            await self._node.kube.call("POST", f"/api/v1/namespaces/{namespace}/events", body)

    async def _annotate(self) -> None:
        self._dirty.set()
        note = {"metadata": {"annotations": {LOGS_ANNOTATION: str(self.logs)}}}
        with contextlib.suppress(ApiException, aiohttp.ClientError, TimeoutError):
            await self._node.kube.call("PATCH", self._path, note, content=MERGE)

    async def _command(self, spec: Mapping[str, Any], message_file: Path) -> Command:
        pod = {**self._pod, "status": {"podIP": self._address, "hostIP": self._node.host}}
        return await command(self._node, pod, self._folder / ".home", self._volumes, spec, message_file)

    def _status(self) -> Json:
        return pod_status(
            self._pod,
            [worker.view for worker in self._inits],
            [worker.view for worker in self._mains],
            address=self._address,
            host=self._node.host,
            started=self._started,
            now=time.time(),
            going=self._deadline is not None,
        )

    async def _publish(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._publish_now()
            except (ApiException, aiohttp.ClientError, TimeoutError) as error:
                if isinstance(error, ApiException) and error.status == 404:
                    return
                log.warning("%s: status: %s", self._path, error)
                await asyncio.sleep(0.5)
                self._dirty.set()

    async def _publish_now(self) -> None:
        status = self._status()
        if status == self._published:
            return
        # With the uid, the write cannot reach a new pod of the same name.
        patch = {"metadata": {"uid": self._pod["metadata"]["uid"]}, "status": status}
        self.observe(await self._node.kube.call("PATCH", f"{self._path}/status", patch, content=STRATEGIC))
        self._published = status

    def _left(self) -> float:
        return max(0.0, (self._deadline or 0.0) - time.monotonic())

    async def _end(self) -> None:
        # Report the pod as not ready first, because traffic must stop before the processes end.
        self._dirty.set()
        await cancelled(self._running)
        await asyncio.gather(*(worker.end(self._left) for worker in self._mains + self._inits))
        await cancelled(self._publishing)
        uid = self._pod["metadata"]["uid"]
        while True:
            try:
                await self._publish_now()
                options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                await self._node.kube.call("DELETE", self._path, options)
                break
            except ApiException as error:
                if error.status in (404, 409, 422):
                    break  # the pod is already gone, or a new pod has its name
                await asyncio.sleep(0.5)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.5)
        procs.kill_all_of(self._folder, self.logs)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._forget()

    async def abandon(self, grace: float) -> None:
        """End the pod's processes because the node shuts down. Report nothing to the API server."""
        await cancelled(self._running, self._publishing, *filter(None, [self._ending]))
        await asyncio.gather(*(worker.kill(grace) for worker in self._mains + self._inits))
