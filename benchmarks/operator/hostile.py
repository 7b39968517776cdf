"""Run fifty hostile services of every kind next to fifty good ones, with a real API server and an operator in 512 MiB.

    python -m benchmarks.operator.hostile [--services 50] [--seconds 20] [--background CORES] [--out FILE.json]

The program measures the good services alone. Then it creates the hostile services, and measures again while these are
edited, scraped and probed. It counts the scrapes of each good service, the edits that changed a status, and the
completed probes. It also reports times, which vary more than counts.

All processes share the machine, so hostile services take processor time from the good ones. As a control,
`--background` measures the good services alone while another process (`background`) burns that many cores. Delays in
that run are due to the machine, not to the operator.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.operator.background import taking
from benchmarks.operator.fleet import connected, plane_of
from benchmarks.operator.fleet_gauges import DEADLINE, Cores, Process, Watched, shares
from benchmarks.operator.fleet_kubelets import KINDS
from benchmarks.operator.hostile_services import (
    GOOD,
    GOOD_REPLICAS,
    HOSTILE,
    HOSTILE_REPLICAS,
    HostileServices,
    service,
)
from benchmarks.operator.memory_group import MemoryGroup
from kvpilot_localcluster.addresses import free_port
from kvpilot_operator.api.names import API_VERSION, KIND, SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref

MEBIBYTES = 512
SCRAPE_SECONDS = 1.0
PROBES = 5
# Smallest number of scrape cycles in a phase.
CYCLES = 6


class HostileFleet:
    """Client of the benchmark's cluster, with the good and hostile services that the benchmark creates and measures."""

    def __init__(self, cluster: Cluster, operator: Process, group: MemoryGroup, port: int) -> None:
        self.cluster, self.operator, self.group = cluster, operator, group
        self.watched = Watched(cluster)
        self.good: list[tuple[str, str]] = []
        self.hostile = HostileServices(cluster)
        self._port = port
        self._probed = 0
        self._health: list[float] = []
        self._cycles: set[str] = set()

    async def make_good(self, number: int) -> None:
        """Create good services, and wait for their replicas."""
        self.good = [(GOOD[i % len(GOOD)], f"good-{i:03d}") for i in range(number)]
        for key in self.good:
            await self.cluster.create(service(*key, GOOD_REPLICAS))
        await self._until_ready(self.good, GOOD_REPLICAS)

    async def make_hostile(self, number: int) -> None:
        """Create hostile services of each kind in turn, and wait for their replicas."""
        made = await self.hostile.create(number)
        await self._until_ready(made, HOSTILE_REPLICAS)

    async def _until_ready(self, keys: list[tuple[str, str]], replicas: int) -> None:
        began = time.monotonic()
        while left := [key for key in keys if self.watched.ready.get(key, 0) < replicas]:
            self._alive()
            if time.monotonic() - began > DEADLINE:
                raise TimeoutError(f"not ready in {DEADLINE:g} s: {left}; {self.operator.log.read_text()[-3000:]}")
            await asyncio.sleep(0.2)

    def _alive(self) -> None:
        if not self.operator.lives():
            raise RuntimeError(f"the operator has ended: {self.operator.log.read_text()[-3000:]}")

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Edit and probe good services for at least this many seconds, while hostile services, if any, do harm."""
        own = {key: await self._addresses(key) for key in self.good}
        before, began, cores = await self.asked(), time.monotonic(), Cores()
        failed = self._failed_scrapes()
        hostile = asyncio.create_task(self.hostile.provoke())
        health = asyncio.create_task(self._ask_health())
        cycles = asyncio.create_task(self._count_cycles())
        probes = [asyncio.create_task(self._probe(key)) for key in self._to_probe()]
        edits: list[asyncio.Task[float]] = []
        quiet = self.good[-10:]
        # On a busy machine a scrape cycle takes longer. So also wait until there are enough cycles.
        while (passed := time.monotonic() - began) < seconds or (len(self._cycles) <= CYCLES and passed < DEADLINE):
            self._alive()
            edits.append(asyncio.create_task(self._edit(quiet[len(edits) % len(quiet)], len(edits))))
            await asyncio.sleep(0.5)
        after, wall, cycled = await self.asked(), time.monotonic() - began, len(self._cycles) - 1
        taken = cores.taken()
        found = await asyncio.gather(*edits)
        probed = await asyncio.gather(*probes)
        for task in (hostile, health, cycles):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        scrapes = [sum(after[a] - before[a] for a in own[key]) / GOOD_REPLICAS for key in self.good[3 * PROBES :]]
        return {
            "seconds": round(wall, 1),
            "scrapes_of_a_good_pod": {"least": min(scrapes), "median": statistics.median(scrapes)},
            "cycles": cycled,
            "failed_scrapes_of_good_pods": self._failed_scrapes() - failed,
            "scrapes_a_second": round(statistics.median(scrapes) / wall, 3),
            "least_scrapes_a_second": round(min(scrapes) / wall, 3),
            "edit_to_status": shares(found),
            "probe": shares(probed),
            "healthz": shares(self._health),
            "cores": taken,
            "rss_mib": round(self.operator.rss(), 1),
            "most_mib": self.group.most_mib(),
        }

    def _failed_scrapes(self) -> int:
        lines = self.operator.log.read_text(errors="replace").splitlines()
        return sum("scrape failed" in line and '"team-good-' in line for line in lines)

    def _to_probe(self) -> list[tuple[str, str]]:
        chosen = self.good[self._probed : self._probed + PROBES]
        self._probed += PROBES
        return chosen

    async def _edit(self, key: tuple[str, str], value: int) -> float:
        since = time.monotonic()
        patch = {"spec": {"rollout": {"denySeconds": 1000 + value + 10_000 * self._probed}}}
        made = await self.cluster.merge(Ref(API_VERSION, KIND, *key), patch)
        answered, generation = time.monotonic(), made["metadata"]["generation"]
        done = await self.watched.until(
            key, lambda one: ((one.get("status") or {}).get("observedGeneration") or 0) >= generation, since
        )
        return max(0.0, done - answered)

    async def _probe(self, key: tuple[str, str]) -> float:
        """Request another dtype. Return the seconds until its canary has passed its probes and the dtype is active."""
        since = time.monotonic()
        fixed = {"spec": {"kvCache": {"mode": "Fixed", "dtype": "k8v4"}}}
        await self.cluster.merge(Ref(API_VERSION, KIND, *key), fixed)
        done = await self.watched.until(
            key,
            lambda one: ((one.get("status") or {}).get("kvCache") or {}).get("activeDtype") == "k8v4",
            since,
        )
        return done - since

    async def _ask_health(self) -> None:
        self._health = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as http:
            while True:
                began = time.monotonic()
                async with http.get(f"http://127.0.0.1:{self._port}/healthz") as answer:
                    await answer.read()
                self._health.append(time.monotonic() - began)
                await asyncio.sleep(0.25)

    async def _count_cycles(self) -> None:
        """Record the timestamps of the operator's scrape cycles from its own metrics, forever."""
        self._cycles = set()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as http:
            while True:
                async with http.get(f"http://127.0.0.1:{self._port}/metrics") as answer:
                    page = await answer.text()
                self._cycles.update(re.findall(r"^kvpilot_scrape_cycle_timestamp_seconds (\S+)$", page, re.MULTILINE))
                await asyncio.sleep(SCRAPE_SECONDS / 2)

    async def _addresses(self, key: tuple[str, str]) -> list[str]:
        found = await self.cluster.list("v1", "Pod", key[0], f"{SERVICE_LABEL}={key[1]}")
        return [pod["status"]["podIP"] for pod in found]

    async def asked(self, address: str = "127.100.0.1") -> Counter[str]:
        """Return how often each engine was scraped, from the process that answers for all engines at `address`."""
        async with aiohttp.ClientSession() as http, http.get(f"http://{address}:8000/stats") as answer:
            return Counter(json.loads(await answer.text()))


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[HostileFleet]:
    """Start the cluster, the operator under its memory limit, and the engines. End them when the block ends."""
    namespaces = [*GOOD, *(f"team-{kind}" for kind in HOSTILE)]
    async with contextlib.AsyncExitStack() as stack:
        plane = stack.enter_context(plane_of(folder, namespaces))
        cluster = await connected(plane)
        stack.push_async_callback(cluster.close)
        port, group = free_port(), MemoryGroup(MEBIBYTES)
        stack.callback(group.close)
        for program, *side in (
            ["benchmarks.operator.hostile_engines", "good"],
            ["benchmarks.operator.hostile_engines", "hostile"],
            ["benchmarks.operator.fleet_kubelets", str(plane.kubeconfig)],
        ):
            command = [sys.executable, "-m", program, *side]
            stack.callback(Process(command, folder, plane.kubeconfig).end)
        operator = str(Path(sys.executable).parent / "kvpilot-operator")
        flags = ["--http-host=127.0.0.1", f"--http-port={port}", f"--scrape-seconds={SCRAPE_SECONDS}"]
        process = Process([operator, *flags], folder, plane.kubeconfig, start=group.joins)
        stack.callback(process.end)
        fleet = HostileFleet(cluster, process, group, port)
        follow = asyncio.create_task(fleet.watched.run())
        stack.callback(follow.cancel)
        yield fleet


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the good services alone, and then together with the hostile ones."""
    result: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": os.cpu_count()}
    result["background_cores"] = options.background
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        async with world(Path(name)) as fleet:
            try:
                await fleet.make_good(options.services)
                result["quiet"] = await fleet.measure(options.seconds)
                print(json.dumps(result["quiet"]), flush=True)
                if options.background:
                    with taking(options.background):
                        result["background"] = await fleet.measure(options.seconds)
                    print(json.dumps(result["background"]), flush=True)
                began = time.monotonic()
                await fleet.make_hostile(options.services)
                result["hostile_up_seconds"] = round(time.monotonic() - began, 1)
                result["hostile"] = await fleet.measure(options.seconds)
                result["limit"] = fleet.group.how
                result["limit_mib"] = MEBIBYTES
                result["killed"] = fleet.group.kills()
                result["refused"] = dict(fleet.hostile.refused)
                asked = await fleet.asked("127.101.0.1")
                result["engines"] = dict(Counter(KINDS[int(address.split(".")[1]) - 100] for address in asked))
                print(json.dumps(result), flush=True)
            finally:
                if options.keep_log:
                    options.keep_log.write_bytes(fleet.operator.log.read_bytes())
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=50, help="number of good services, and of hostile ones (50)")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement in seconds (20)")
    parser.add_argument(
        "--background", type=float, default=0.0, help="number of cores to occupy in an additional measurement (0)"
    )
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--keep-log", type=Path, help="file for the operator's log")
    # On SIGTERM, exit in the normal way, because otherwise all child processes would remain.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
