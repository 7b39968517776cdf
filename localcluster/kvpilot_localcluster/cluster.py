"""Whole cluster as one object: a control plane, one node agent, and a forwarder for Services."""

import asyncio
import atexit
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpilot_localcluster import build, controlplane, images, node, procs
from kvpilot_localcluster.errors import StartFailed
from kvpilot_localcluster.rest import Rest, until


def down(folder: Path) -> list[str]:
    """End every process that a run folder records, also from an earlier start. Return those that were running."""
    ended = ["node"] if procs.end(folder / "node.pid", grace=15) else []
    asyncio.run(node.sweep(folder / "node"))
    return ended + controlplane.sweep(folder / "controlplane")


class LocalCluster:
    """Local cluster, as a context manager that starts and stops it.

    Attributes:
        folder: the run folder: controlplane/, node/ (logs in node/logs/) and node.log.
        kubeconfig: path of the administrator's kubeconfig.
    """

    def __init__(
        self,
        folder: Path,
        *,
        table: Path = images.DEFAULT_TABLE,
        resources: Mapping[str, str] | None = None,
        gpu_devices: int = 0,
        backoff: float = 10.0,
        audit: bool = False,
        newer: bool = True,
        report: build.Report | None = None,
    ) -> None:
        """Take arguments of `ControlPlane` (audit), of `build` (newer, report), and of `Options` (all others)."""
        self.folder = folder.absolute()
        self._table = table
        self._resources = dict(resources or {})
        self._gpu_devices = gpu_devices
        self._backoff = backoff
        binaries = build.build(report, newer=newer)
        self.plane = controlplane.ControlPlane(self.folder / "controlplane", binaries, audit=audit)
        self.kubeconfig = self.plane.kubeconfig
        self._agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def rest(self) -> Rest:
        """Blocking client of the API server, with an administrator's rights."""
        return self.plane.rest

    @property
    def agent(self) -> subprocess.Popen[bytes]:
        """The running process of the node agent."""
        if self._agent is None:
            raise StartFailed("the node agent is not started: call start()")
        return self._agent

    def start(self) -> None:
        """Start everything, and wait until pods can be created and scheduled.

        Raises:
            StartFailed: a process ended or did not become ready.
        """
        down(self.folder)
        atexit.register(self.stop)
        try:
            self.plane.start()
            self.start_agent()
            path = "/api/v1/namespaces/default/serviceaccounts/default"
            until(lambda: self.rest.get(path).get("secrets"), "the default service account")
            until(self._schedulable, "the node is schedulable")
        except BaseException:
            self.stop()
            raise

    def start_agent(self) -> None:
        """Start the node agent, also again after it has ended."""
        command = [sys.executable, "-m", "kvpilot_localcluster", "node", f"--kubeconfig={self.kubeconfig}"]
        command += [f"--folder={self.folder / 'node'}", f"--images={self._table}", f"--backoff={self._backoff}"]
        command += [f"--starter={os.getpid()}", f"--control-plane={self.folder / 'controlplane'}"]
        command += [f"--resource={name}={value}" for name, value in self._resources.items()]
        command += [f"--gpu-devices={self._gpu_devices}"]
        self._agent = procs.spawn(self.folder / "node.pid", command, log=self.folder / "node.log")

    def _schedulable(self) -> bool:
        self.check()
        found = self.rest.get("/api/v1/nodes/local")
        return not found["spec"].get("taints") and bool(found["status"].get("conditions"))

    def check(self) -> None:
        """Check that all processes run.

        Raises:
            StartFailed: a process has ended.
        """
        self.plane.check()
        if self.agent.poll() is not None:
            raise StartFailed(f"the node agent has died; the end of its log:\n{procs.tail(self.folder / 'node.log')}")

    def stop(self) -> None:
        """End all processes. Logs remain."""
        atexit.unregister(self.stop)
        procs.end(self.folder / "node.pid", grace=15)
        asyncio.run(node.sweep(self.folder / "node"))
        self.plane.stop()
