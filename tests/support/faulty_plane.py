"""Faults of control-plane processes and of nodes: killed, restarted, or paused."""

import base64
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kvpilot_localcluster import procs
from kvpilot_localcluster.errors import StartFailed
from kvpilot_localcluster.rest import Rest, until


class Component:
    """Process of a running control plane, identified by its record `<name>.pid` in the run folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._record = folder / f"{name}.pid"
        self._command = self._running_command()

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until its ports are free."""
        self._process().signal(signal.SIGKILL)
        procs.end(self._record)

    def start(self, *more: str) -> None:
        """Restart the process with its old flags and with additional flags (`more`), which take precedence."""
        procs.end(self._record)
        procs.spawn(self._record, [*self._command, *more], log=self._folder / f"{self._name}.log", cwd=self._folder)

    def pause(self) -> None:
        """Pause the process (SIGSTOP). Its connections stay open."""
        self._process().signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the paused process continue."""
        self._process().signal(signal.SIGCONT)

    def flag(self, name: str) -> str:
        """Return the value of one of the process's flags, written as NAME=VALUE."""
        return next(part.partition("=")[2] for part in self._command if part.startswith(f"{name}="))

    def _process(self) -> procs.ProcessId:
        found = procs.read_record(self._record)
        if found is None:
            raise StartFailed(f"{self._name} does not run: {procs.tail(self._folder / f'{self._name}.log')}")
        return found

    def _running_command(self) -> Sequence[str]:
        raw = Path(f"/proc/{self._process().pid}/cmdline").read_bytes()
        return [part.decode() for part in raw.split(b"\0")[:-1]]


def compact(store: Component) -> int:
    """Make etcd forget every revision except the newest, and return the newest."""
    url = store.flag("--listen-client-urls")
    key = base64.b64encode(b"/").decode()
    revision = int(_etcd(url, "range", {"key": key})["header"]["revision"])
    _etcd(url, "compaction", {"revision": str(revision), "physical": True})
    return revision


def _etcd(url: str, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v3/kv/{verb}", json=body, timeout=30, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


class SecondNode:
    """Agent of a second node. It proxies no traffic of Services, because the cluster's own agent does that."""

    def __init__(self, folder: Path, kubeconfig: Path, table: Path, name: str = "second") -> None:
        self.name = name
        self._folder, self._kubeconfig, self._table = folder, kubeconfig, table
        self._record = folder / "agent.pid"

    def start(self, rest: Rest) -> None:
        """Start the agent, and wait until its Node accepts pods."""
        command = [sys.executable, "-m", "kvpilot_localcluster", "node", f"--kubeconfig={self._kubeconfig}"]
        command += [f"--folder={self._folder / 'node'}", f"--name={self.name}", f"--images={self._table}"]
        command += ["--no-services", "--backoff=1"]
        procs.spawn(self._record, command, log=self._folder / "agent.log")
        until(lambda: self._takes_pods(rest), f"node {self.name} is ready")

    def pause(self) -> None:
        """Pause the node agent (SIGSTOP). Its containers continue."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the paused node agent continue."""
        self._signal(signal.SIGCONT)

    def vanish(self) -> None:
        """Kill the node agent and all its containers at once, so that the API server gets no message."""
        self._signal(signal.SIGKILL)
        self.kill_engines()

    def kill_engines(self) -> None:
        """Kill every process of every pod of this node."""
        for state in (self._folder / "node" / "pods").glob("*/*/[0-9]*/state.json"):
            # Kill the shim first, because it would report the engine's end.
            for record in (state.with_name("shim.json"), state):
                if (found := procs.read_record(record)) is not None:
                    found.signal(signal.SIGKILL, group=True)

    def stop(self) -> None:
        """Stop all processes of this node that still run."""
        self._signal(signal.SIGCONT)
        procs.end(self._record, grace=10)
        self.kill_engines()

    def _signal(self, number: int) -> None:
        if (found := procs.read_record(self._record)) is not None:
            found.signal(number)

    def _takes_pods(self, rest: Rest) -> bool:
        found = rest.get(f"/api/v1/nodes/{self.name}")
        return not found["spec"].get("taints") and bool(found["status"].get("conditions"))


def engine_process(agent_folder: Path, uid: str) -> procs.ProcessId:
    """Return the engine process of the pod with this UID, from the folder of its node agent."""
    for state in sorted((agent_folder / "pods" / uid).glob("engine/[0-9]*/state.json"), reverse=True):
        if (found := procs.read_record(state)) is not None:
            return found
    raise StartFailed(f"pod {uid} runs no engine below {agent_folder}")
