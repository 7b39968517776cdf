"""Measure the operator with a fleet: 2,000 services, 6,000 pods, a real API server, a real operator process.

    python -m benchmarks.operator.fleet [--sizes 100 500 1000 2000] [--seconds 60] [--soak 0] [--out FILE.json]

The program starts etcd and the API server of localcluster/kvpilot_localcluster, and `kvpilot-operator`. One process
creates the Deployments' pods (fleet_kubelets.py), and one process answers /metrics for all pods (fleet_engines.py).

At each size the benchmark waits until every service has its three ready replicas. Then it measures for `--seconds`:
each second it edits two specs and changes one pod, and it reads the operator's metrics as Prometheus would. At the
largest size it continues for `--soak` seconds. `fleet_page.py` makes the page and the plot.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from benchmarks.operator.fleet_gauges import OPERATOR, Cores, Process, Watched, rate, shares, total
from benchmarks.operator.fleet_kubelets import NODES, numbered, set_ready
from kvpilot_localcluster import build
from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.engines import PAGE_EARLY, PAGE_LATER
from kvpilot_operator.api.names import API_VERSION, KIND, SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.control.pilot import PAGES_PER_SECOND

ROOT = Path(__file__).parents[2]
NAMESPACES = 20
REPLICAS = 3
EDITS_PER_SECOND = 2.0
FLIPS_PER_SECOND = 1.0
PROMETHEUS_SECONDS = 30.0


class ApiServer(ControlPlane):
    """Control plane with only etcd and the API server. fleet_kubelets.py takes the place of its other components."""

    def _controllers(self) -> None:
        pass


class Fleet:
    """Client of the benchmark's cluster, with the changes and the measurements that the benchmark makes there."""

    def __init__(self, cluster: Cluster, operator: Process, port: int) -> None:
        self.cluster = cluster
        self.operator = operator
        self._port = port
        self.watched = Watched(cluster)
        self.keys: list[tuple[str, str]] = []
        # Share one generator: with a seed of its own, each measurement would write the same values, and change nothing.
        self._random = random.Random(1)  # noqa: S311

    async def grow(self, size: int) -> float:
        """Create services until there are `size`. Return the seconds until all have three ready replicas."""
        began = time.monotonic()
        new = [(f"team-{i % NAMESPACES}", f"model-{i:04d}") for i in range(len(self.keys), size)]
        places = asyncio.Semaphore(8)

        async def make(key: tuple[str, str]) -> None:
            async with places:
                await self.cluster.create(service(key))

        await asyncio.gather(*map(make, new))
        self.keys += new
        while (left := sum(self.watched.ready.get(key, 0) < REPLICAS for key in self.keys)) > 0:
            if not self.operator.lives():
                raise RuntimeError(f"the operator has ended: {self.operator.log.read_text()[-3000:]}")
            if time.monotonic() - began > 400:
                raise TimeoutError(f"{left} of {size} services have not become ready in 400 s")
            await asyncio.sleep(0.5)
        return time.monotonic() - began

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Edit specs and change pods for this many seconds, and return the figures."""
        await self._stats()
        before, cores, began = await self._metrics(), Cores(), time.monotonic()
        edits: list[asyncio.Task[float]] = []
        flips: list[asyncio.Task[float]] = []
        pages: list[asyncio.Task[tuple[float, int]]] = []
        memory: list[tuple[float, float]] = []
        while (now := time.monotonic() - began) < seconds:
            if len(edits) < now * EDITS_PER_SECOND:
                edits.append(
                    asyncio.create_task(self._edit(self._random.choice(self.keys), self._random.randint(1000, 900_000)))
                )
            if len(flips) < now * FLIPS_PER_SECOND:
                flips.append(
                    asyncio.create_task(self._flip(self._random.choice(self.keys), self._random.randrange(REPLICAS)))
                )
            if len(pages) * PROMETHEUS_SECONDS < now:
                pages.append(asyncio.create_task(self._page()))
            if not memory or now - memory[-1][0] >= 10:
                memory.append((round(now, 1), round(self.operator.rss(), 1)))
            await asyncio.sleep(0.05)
        taken, wall = cores.taken(), time.monotonic() - began
        after, gaps = await self._metrics(), await self._stats()
        requests = total(after, "kvpilot_api_requests_total") - total(before, "kvpilot_api_requests_total")
        return {
            "seconds": round(wall, 1),
            "edit_to_status": shares(await asyncio.gather(*edits)),
            "pod_to_status": shares(await asyncio.gather(*flips)),
            "scrape_gap": shares([t / 10 for t, n in sorted(gaps.items()) for _ in range(n)]),
            "scrape_cycle_seconds": round(total(after, "kvpilot_scrape_cycle_duration_seconds"), 2),
            "scrapes_per_second": rate(before, after, "kvpilot_engine_scrapes_total", wall),
            "scrapes_failed": total(after, "kvpilot_engine_scrapes_total", "error")
            - total(before, "kvpilot_engine_scrapes_total", "error"),
            "passes_per_second": rate(before, after, "kvpilot_reconciles_total", wall),
            "passes_failed": total(after, "kvpilot_reconciles_total", "error")
            - total(before, "kvpilot_reconciles_total", "error"),
            "api_requests_per_second": round(requests / wall, 2),
            "own_page_seconds": shares([took for took, _ in await asyncio.gather(*pages)]),
            "own_page_kib": round(max(size for _, size in await asyncio.gather(*pages)) / 1024, 1),
            "cores": taken[OPERATOR],
            "programs": taken,
            "rss_mib": memory,
        }

    async def _edit(self, key: tuple[str, str], value: int) -> float:
        patch = {"spec": {"rollout": {"denySeconds": value}}}
        since = time.monotonic()
        made = await self.cluster.merge(Ref(API_VERSION, KIND, *key), patch)
        answered, generation = time.monotonic(), made["metadata"]["generation"]
        done = await self.watched.until(
            key, lambda one: ((one.get("status") or {}).get("observedGeneration") or 0) >= generation, since
        )
        return max(0.0, done - answered)

    async def _flip(self, key: tuple[str, str], i: int) -> float:
        """Make a pod unready, wait until the service's status counts it, and make it ready again."""
        found = await self.cluster.list("v1", "Pod", key[0], f"{SERVICE_LABEL}={key[1]}")
        name = sorted(pod["metadata"]["name"] for pod in found)[i]
        since = time.monotonic()
        await set_ready(self.cluster, key[0], name, False)
        answered = time.monotonic()
        done = await self.watched.until(
            key, lambda one: ((one.get("status") or {}).get("readyReplicas") or 0) < REPLICAS, since
        )
        await set_ready(self.cluster, key[0], name, True)
        return max(0.0, done - answered)

    async def _page(self) -> tuple[float, int]:
        """Read the operator's metrics page. Return the duration in seconds and the size in bytes."""
        began = time.monotonic()
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{self._port}/metrics") as answer:
            size = len(await answer.read())
        return time.monotonic() - began, size

    async def _metrics(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{self._port}/metrics") as answer:
            text = await answer.text()
        found = re.findall(r"^(kvpilot_(?:api|reconciles|scrape|engine)\S*?(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def _stats(self) -> dict[float, int]:
        async with aiohttp.ClientSession() as http, http.get(f"http://{numbered(0)}:8000/stats") as answer:
            told = json.loads(await answer.text())
        return {float(tenths): count for tenths, count in told["gaps"].items()}


def service(key: tuple[str, str]) -> Object:
    """Return a service in mode Recommend. Its engines have metrics, but cannot be probed."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"namespace": key[0], "name": key[1]},
        "spec": {
            "model": {"source": "hf://Qwen/Qwen3-8B"},
            "engine": {"image": "ghcr.io/kvpilot/runtime:1"},
            "kvCache": {"mode": "Recommend", "ladder": ["fp8", "k8v4", "k4v4"]},
            "scaling": {"minReplicas": REPLICAS, "maxReplicas": 2 * REPLICAS},
            "canary": {"steps": [{"weightPercent": 5, "holdSeconds": 600}, {"weightPercent": 50, "holdSeconds": 600}]},
        },
    }


@contextlib.contextmanager
def plane_of(folder: Path, namespaces: Sequence[str]) -> Iterator[ControlPlane]:
    """Start an API server with our CRD, these namespaces, and nodes with GPUs."""
    with ApiServer(folder / "plane", build.build()) as plane:
        define(plane.rest, [yaml.safe_load((ROOT / "crds" / "kvpilot.io_quantizedllmservices.yaml").read_text())])
        for name in namespaces:
            plane.rest.create("/api/v1/namespaces", {"metadata": {"name": name}})
            account = {"metadata": {"name": "default"}, "automountServiceAccountToken": False}
            plane.rest.create(f"/api/v1/namespaces/{name}/serviceaccounts", account)
        for i in range(NODES):
            labels = {
                "nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771",
                "nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0",
            }  # fmt: skip
            plane.rest.create("/api/v1/nodes", {"metadata": {"name": f"gpu-{i}", "labels": labels}})
        yield plane


async def connected(plane: ControlPlane) -> Cluster:
    """Return a client of this API server. The caller must close it."""
    await config.load_kube_config(config_file=str(plane.kubeconfig))
    configuration = Configuration.get_default_copy()
    configuration.connection_pool_maxsize = 0
    cluster = Cluster(ApiClient(configuration))
    while not await cluster.serves(API_VERSION):
        await asyncio.sleep(0.1)
    return cluster


@contextlib.asynccontextmanager
async def world(folder: Path, pods: int) -> AsyncIterator[Fleet]:
    """Start the cluster, the operator and engines for this many pods. End them when the `with` block ends."""
    with plane_of(folder, [f"team-{i}" for i in range(NAMESPACES)]) as plane:
        cluster = await connected(plane)
        port = free_port()
        pages = [str(PAGE_EARLY), str(PAGE_LATER)]
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(cluster.close)
            operator = str(Path(sys.executable).parent / "kvpilot-operator")
            commands = [
                [sys.executable, "-m", "benchmarks.operator.fleet_engines", *pages, str(pods)],
                [sys.executable, "-m", "benchmarks.operator.fleet_kubelets", str(plane.kubeconfig)],
                [operator, "--http-host=127.0.0.1", f"--http-port={port}"],
            ]
            children = []
            for command in commands:
                children.append(Process(command, folder, plane.kubeconfig))
                stack.callback(children[-1].end)
            fleet = Fleet(cluster, children[-1], port)
            follow = asyncio.create_task(fleet.watched.run())
            stack.callback(follow.cancel)
            yield fleet


async def sizes(fleet: Fleet, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Grow the fleet to each size, measure, and write the results."""
    for size in options.sizes:
        up = await fleet.grow(size)
        await asyncio.sleep(options.settle)
        row = {"services": size, "pods": REPLICAS * size, "up_seconds": round(up, 1)}
        row |= await fleet.measure(options.seconds)
        result["sizes"].append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.soak:
        result["soak"] = await fleet.measure(options.soak)
        print(json.dumps(result["soak"]), flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure fleets of all sizes, and the largest one for `--soak` seconds more. A size is a number of services."""
    result: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": os.cpu_count(), "sizes": []}
    result["pages_per_second"] = PAGES_PER_SECOND
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        async with world(Path(name), REPLICAS * max(options.sizes)) as fleet:
            try:
                await sizes(fleet, options, result)
            finally:
                if options.keep_log:
                    options.keep_log.write_bytes(fleet.operator.log.read_bytes())
    return result


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 500, 1000, 2000], help="numbers of services")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of a measurement in seconds (60)")
    parser.add_argument("--settle", type=float, default=20.0, help="wait in seconds between growing and measuring (20)")
    parser.add_argument(
        "--soak", type=float, default=0.0, help="duration of a further measurement at the largest size, in seconds (0)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "fleet.json")
    parser.add_argument("--keep-log", type=Path, help="file for the operator's log")
    # On SIGTERM, exit in the normal way, because otherwise all child processes would remain.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
