"""Measurements for fleet.py and hostile.py: CPU and memory of processes, statuses from a watch, and percentiles."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvpilot_operator.api.names import API_VERSION, KIND
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from kvpilot_operator.errors import ClusterError

OPERATOR = "kvpilot-operator"
# Time limit of every wait, in seconds. It only ends runs that hang, so it is long enough for a busy machine.
DEADLINE = 600.0
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Process:
    """Child process of the benchmark, whose memory is measured, and its log file."""

    def __init__(
        self, command: list[str], folder: Path, kubeconfig: Path, start: Callable[[], None] | None = None
    ) -> None:
        program = command[2].rpartition(".")[2] if command[0] == sys.executable else Path(command[0]).name
        self.log = Path(tempfile.mkstemp(".log", f"{program}-", folder)[1])
        env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, preexec_fn=start)

    def rss(self) -> float:
        """Return the process's resident memory in MiB."""
        pages = Path(f"/proc/{self._child.pid}/statm").read_text().split()[1]
        return int(pages) * _PAGE_BYTES / 2**20

    def lives(self) -> bool:
        """Return True while the process runs."""
        return self._child.poll() is None

    def end(self) -> None:
        """Send SIGTERM to the process, and wait until it has ended."""
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()


class Cores:
    """Measurement of the CPU time that processes use, from the creation of this object on.

    The benchmark's programs are listed by name. All other processes of the machine are one entry, `others`.
    """

    def __init__(self) -> None:
        self._before, self._since = self._now(), time.monotonic()

    def taken(self) -> dict[str, float]:
        """Return the mean number of cores that each program used. A program that has ended counts as `others`."""
        wall, now = time.monotonic() - self._since, self._now()
        spent = {name: (seconds - self._before.get(name, 0.0)) / wall for name, seconds in now.items()}
        spent["others"] = spent.pop("machine") - sum(spent.values())
        return {name: round(max(0.0, cores), 2) for name, cores in spent.items()}

    def _now(self) -> dict[str, float]:
        """Return the CPU seconds so far of the machine, and of each descendant of this process by program."""
        words = Path("/proc/stat").read_text().split(maxsplit=9)
        found = {"machine": sum(map(int, (*words[1:4], *words[6:9]))) / _TICK}
        family = {os.getpid()}
        # Collect all descendants. Repeat until no process is added, because processes are not listed parents first.
        lines = _processes()
        while new := {pid for pid, (parent, _) in lines.items() if parent in family} - family:
            family |= new
        for pid in family & lines.keys():
            name = "benchmark" if pid == os.getpid() else _program(pid)
            found[name] = found.get(name, 0.0) + lines[pid][1]
        return found


def _processes() -> dict[int, tuple[int, float]]:
    """Return the parent and the CPU seconds of each process."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            found[int(file.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICK)
    return found


def _program(pid: int) -> str:
    """Return the name of a process's program. For a Python program add its first argument: "hostile_engines good"."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return "ended"
    if not Path(words[0]).name.startswith("python"):
        return Path(words[0]).name
    as_module = words[1] == "-m"
    script, *more = words[2:] if as_module else words[1:]
    name = script.rpartition(".")[2] if as_module else Path(script).stem
    return " ".join([name, *(word for word in more[:1] if word.isalpha())])


class Watched:
    """Watch of all QuantizedLLMServices, by which a caller can wait for a status."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.ready: dict[tuple[str, str], int] = {}
        self._latest: dict[tuple[str, str], tuple[float, Object]] = {}
        self._waiting: dict[tuple[str, str], list[tuple[Any, asyncio.Future[float]]]] = defaultdict(list)

    async def run(self) -> None:
        """Follow the API server's watch forever, and store each status."""
        version = ""
        while True:
            try:
                if not version:
                    async for items, listed in self._cluster.pages(API_VERSION, KIND, "", ""):
                        version = listed
                        for one in items:
                            self._see(one)
                async for _, one in self._cluster.watch(API_VERSION, KIND, "", "", version):
                    version = one["metadata"]["resourceVersion"]
                    if "name" in one["metadata"]:
                        self._see(one)
            except ClusterError as error:
                version = "" if error.status else version
                await asyncio.sleep(0.2)

    async def until(self, key: tuple[str, str], right: Any, since: float) -> float:
        """Return the arrival time of the first status after `since` for which `right(object)` is true.

        Return infinity if there is none within DEADLINE.
        """
        seen, latest = self._latest.get(key, (0.0, {}))
        if seen >= since and right(latest):
            return seen
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[key].append((right, future))
        try:
            return await asyncio.wait_for(future, DEADLINE)
        except TimeoutError:
            return float("inf")

    def _see(self, one: Object) -> None:
        key, now = (one["metadata"]["namespace"], one["metadata"]["name"]), time.monotonic()
        status = one.get("status") or {}
        self.ready[key] = status.get("readyReplicas") or 0
        self._latest[key] = (now, {"status": {k: status.get(k) for k in ("observedGeneration", "readyReplicas")}})
        for right, future in list(self._waiting.get(key, ())):
            if right(one):
                self._waiting[key].remove((right, future))
                if not future.done():
                    future.set_result(now)


def total(metrics: dict[str, float], name: str, part: str = "") -> float:
    """Return the sum of a metric over the series whose labels contain `part`."""
    return sum(value for series, value in metrics.items() if series.partition("{")[0] == name and part in series)


def rate(before: dict[str, float], after: dict[str, float], name: str, seconds: float) -> float:
    """Return how much a counter grew per second between two metrics pages."""
    return round((total(after, name) - total(before, name)) / seconds, 1)


def shares(values: Iterable[float]) -> dict[str, float]:
    """Return count, percentiles and maximum of the finite values, and the number of infinite ones (`missed`)."""
    every = list(values)
    rising = sorted(value for value in every if value != float("inf"))
    if not rising:
        return {"count": 0, "missed": len(every)}
    at = {f"p{q}": round(rising[min(len(rising) - 1, int(q / 100 * len(rising)))], 3) for q in (50, 95, 99)}
    return {"count": len(rising), "missed": len(every) - len(rising), **at, "max": round(rising[-1], 3)}
