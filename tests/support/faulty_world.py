"""A cluster of cheap engines with the real operator, in which tests can make every part fail."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_demo.load import Load
from kvpilot_localcluster.addresses import free_port, service_port
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.engines import faulty
from kvpilot_localcluster.procs import tail
from kvpilot_localcluster.rest import HANGS, Rest
from kvpilot_operator.api.names import API_VERSION, ENGINE_PORT, KIND, SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.errors import ClusterError, Conflict
from support.faulty_api import FaultyApi
from support.faulty_record import record_machine

CRD = Path(__file__).parents[2] / "crds" / "kvpilot.io_quantizedllmservices.yaml"
PROGRAM = Path(faulty.__file__)
HUNGRY = Path(__file__).with_name("hungry_engine.py")
IMAGE, HUNGRY_IMAGE = "kvpilot/faulty-engine:dev", "kvpilot/hungry-engine:dev"
NAMESPACE = "default"
SCRAPE_SECONDS = 1.0
# Context for servers without TLS. By default each client loads all certificate authorities, for 20 ms of a core.
_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class FaultyWorld:
    """Cluster, operator and proxy. Use `async with FaultyWorld.up(folder)`.

    Attributes:
        api: the proxy between the operator and the API server.
        cluster: the tests' own client, which does not use the proxy.
    """

    def __init__(self, folder: Path, local: LocalCluster, table: Path, api: FaultyApi, cluster: Cluster) -> None:
        self.folder, self.local, self.table = folder, local, table
        self.api, self.cluster = api, cluster
        self._operator: subprocess.Popen[bytes] | None = None
        self.operator_url = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def up(cls, folder: Path) -> "AsyncIterator[FaultyWorld]":
        """Start cluster, proxy and operator, and stop them when the block ends."""
        table = folder / "images.yaml"
        images = [cheap_image(folder, IMAGE), cheap_image(folder / "hungry", HUNGRY_IMAGE, HUNGRY, PROGRAM)]
        table.write_text(yaml.safe_dump({"images": images}))
        local = LocalCluster(folder / "cluster", table=table, backoff=1.0)
        await asyncio.to_thread(local.start)
        try:
            await asyncio.to_thread(define, local.rest, [yaml.safe_load(CRD.read_text())])
            rest, configuration = local.rest, Configuration()
            await config.load_kube_config(config_file=str(local.kubeconfig), client_configuration=configuration)
            cluster = Cluster(ApiClient(configuration))
            async with FaultyApi.between(rest.server, rest.context) as api:
                world = cls(folder, local, table, api, cluster)
                try:
                    record_machine(rest.get("/version")["gitVersion"].removeprefix("v"))
                    await world.start_operator()
                    yield world
                finally:
                    await world.stop_operator()
                    await cluster.close()
        finally:
            await asyncio.to_thread(local.stop)

    @property
    def rest(self) -> Rest:
        """Blocking client of the API server, for requests that the operator never makes."""
        return self.local.rest

    @property
    def operator_runs(self) -> bool:
        """True if the operator's process exists."""
        return self._operator is not None and self._operator.poll() is None

    async def start_operator(self, env: Mapping[str, str] | None = None, *, wrap: Sequence[str] = ()) -> None:
        """Start the operator's process behind the proxy, and wait until it is ready; `wrap` precedes its command."""
        self.launch_operator(env, wrap=wrap)

        async def ready() -> bool:
            return (await self._ask(f"{self.operator_url}/readyz"))[0] == 200

        await until(ready, "the operator is ready")

    def launch_operator(self, env: Mapping[str, str] | None = None, *, wrap: Sequence[str] = ()) -> None:
        """Start the operator's process behind the proxy, without waiting until it is ready."""
        kubeconfig, port = self.folder / "operator.kubeconfig", free_port()
        kubeconfig.write_text(_kubeconfig(self.api.url))
        self.operator_url = f"http://127.0.0.1:{port}"
        self._spawn_operator(kubeconfig, port, env or {}, wrap)

    def _spawn_operator(self, kubeconfig: Path, port: int, env: Mapping[str, str], wrap: Sequence[str]) -> None:
        command = [*wrap, str(Path(sys.executable).parent / "kvpilot-operator"), f"--scrape-seconds={SCRAPE_SECONDS}"]
        command += ["--http-host=127.0.0.1", f"--http-port={port}"]
        with (self.folder / "operator.log").open("ab") as log:
            self._operator = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KUBECONFIG": str(kubeconfig), **env},
                start_new_session=True,
            )

    async def stop_operator(self) -> None:
        """Stop the operator: send SIGTERM, and SIGKILL after 30 s."""
        if self._operator is None or self._operator.poll() is not None:
            return
        self._operator.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._operator.wait, 30)
        except subprocess.TimeoutExpired:
            self._operator.kill()

    def kill_operator(self) -> None:
        """Send SIGKILL and wait for the process's end: until then it counts as running."""
        if self._operator is not None:
            self._operator.kill()
            self._operator.wait()

    def check(self) -> None:
        """Fail the test if the operator's process has ended, because no fault may end it."""
        if self._operator is None or self._operator.poll() is not None:
            raise AssertionError(f"the operator has ended: {tail(self.folder / 'operator.log', 4000)}")

    @property
    def operator_pid(self) -> int:
        """Process id of the operator."""
        if self._operator is None:
            raise AssertionError("the operator is not started")
        return self._operator.pid

    def operator_memory_mib(self) -> float:
        """Return the operator's current resident memory in MiB."""
        status = Path(f"/proc/{self.operator_pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    async def operator_knows(self, name: str) -> bool:
        """Return True if the operator's own metrics include a service of this name."""
        _, text = await self._ask(f"{self.operator_url}/metrics")
        return f'name="{name}"' in text

    async def figure(self, name: str, metric: str) -> float:
        """Return a service's value of one of the operator's own metrics; 0 before the first value.

        The operator's status can be half a minute old if only figures change, so tests read metrics.
        """
        _, text = await self._ask(f"{self.operator_url}/metrics")
        found = [line for line in text.splitlines() if line.startswith(f"{metric}{{") and f'name="{name}"' in line]
        return next((float(line.rpartition(" ")[2]) for line in found), 0.0)

    async def newest_scrape(self, name: str) -> float:
        """Return the Unix time of the last scrape of a service, by the operator's clock; 0 before the first scrape."""
        return await self.figure(name, "kvpilot_engine_metrics_timestamp_seconds")

    async def create(self, name: str, replicas: int, **spec: Any) -> None:
        """Create a service with a fixed number of cheap engines. `spec` replaces sections of its spec."""
        base: dict[str, Any] = {
            "replicas": replicas,
            "model": {"source": "file:///models/tiny-1m", "servedName": name, "maxModelLen": 4096},
            "engine": {"image": IMAGE},
            "kvCache": {"mode": "Fixed", "dtype": "auto"},
            "scaling": {"mode": "External", "minReplicas": 0, "maxReplicas": 8},
            "drain": {"preStopSeconds": 1, "timeoutSeconds": 20},
            # The four default packs decode about five times as many tokens, which takes cheap engines minutes.
            "accuracy": {"probeSets": ["builtin/general"]},
        }
        metadata = {"name": name, "namespace": NAMESPACE}
        await self.cluster.create(
            {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {**base, **spec}}
        )

    async def serving(self, name: str, replicas: int, **spec: Any) -> None:
        """Create the service, and wait until all its engines answer."""
        await self.create(name, replicas, **spec)
        await self.until_ready(name, replicas)

    async def until_ready(self, name: str, replicas: int) -> None:
        """Wait until the status reports this number of ready engines and requests no other number."""

        async def ready() -> bool:
            status = await self.status(name)
            return (status.get("replicas"), status.get("readyReplicas")) == (replicas, replicas)

        await until(ready, f"{name} has {replicas} engines that answer")

    async def define(self, *definitions: Object) -> None:
        """Install these CRDs in the cluster, unless an earlier test has installed them."""
        groups = (await asyncio.to_thread(self.rest.get, "/apis"))["groups"]
        served = {group["name"] for group in groups}
        await asyncio.to_thread(define, self.rest, [one for one in definitions if one["spec"]["group"] not in served])

    async def delete(self, name: str) -> None:
        """Delete a service and wait until its pods are gone."""
        await self.cluster.delete(Ref(API_VERSION, KIND, NAMESPACE, name))

        async def gone() -> bool:
            return not await self.pods(name)

        await until(gone, f"the pods of {name} are gone")

    def operator_log(self) -> str:
        """Return the log of all operator processes that this world has started so far."""
        return (self.folder / "operator.log").read_text(errors="replace")

    async def scale(self, name: str, replicas: int) -> None:
        """Scale the service like `kubectl scale qllm`."""
        await self.patch(name, {"replicas": replicas})

    async def patch(self, name: str, spec: Object) -> None:
        """Patch the service like `kubectl patch qllm --type=merge`."""
        await self.cluster.merge(Ref(API_VERSION, KIND, NAMESPACE, name), {"spec": spec})

    async def status(self, name: str) -> Object:
        """Return the status of a service, or an empty one if there is none."""
        found = await self.cluster.find(Ref(API_VERSION, KIND, NAMESPACE, name))
        status: Object = (found or {}).get("status") or {}
        return status

    async def condition(self, name: str, kind: str) -> tuple[str, str]:
        """Return status and reason of one of the service's conditions."""
        conditions = (await self.status(name)).get("conditions", [])
        return next(((c["status"], c["reason"]) for c in conditions if c["type"] == kind), ("", ""))

    async def wanted(self, name: str) -> int | None:
        """Return the replicas that the operator requests in all Deployments of a service; None without Deployments."""
        found = await self.cluster.list("apps/v1", "Deployment", NAMESPACE, f"{SERVICE_LABEL}={name}")
        return sum(one["spec"]["replicas"] for one in found) if found else None

    async def pods(self, name: str) -> list[Object]:
        """Return a service's engine pods, including terminating ones."""
        return await self.cluster.list("v1", "Pod", NAMESPACE, f"{SERVICE_LABEL}={name}")

    async def make_ill(self, pod: Object, **faults: Any) -> None:
        """Make one engine faulty from now on: set these fields of its `Faults`."""
        async with httpx.AsyncClient(timeout=HANGS, trust_env=False, verify=_NO_AUTHORITIES) as http:
            url = f"http://{pod['status']['podIP']}:{ENGINE_PORT}/faults"
            (await http.post(url, json=faults)).raise_for_status()

    async def service_url(self, name: str) -> str:
        """Return the URL of the service's Kubernetes Service."""
        found = await self.cluster.get(Ref("v1", "Service", NAMESPACE, name))
        address: str = found["spec"]["clusterIP"]
        return f"http://{address}:{service_port(80)}"

    @contextlib.asynccontextmanager
    async def load(self, name: str, users: int = 2) -> AsyncIterator[Load]:
        """Send a closed-loop load to a service until the block ends."""
        load = Load(await self.service_url(name), name, users=users, prompt_tokens=64, output_tokens=32)
        await load.start()
        try:
            yield load
        finally:
            await load.stop()

    async def acted(self, name: str, replicas: int) -> float:
        """Wait until the operator requests this number of replicas for a service. Return the seconds waited."""

        async def done() -> bool:
            return await self.wanted(name) == replicas

        return await until(done, f"{replicas} replicas are written for {name}")

    async def dial(self) -> float:
        """Change the replicas of the service named `dial`. Return the seconds until the operator acted on it."""
        replicas = 1 - (await self.wanted("dial") or 0)
        await self.scale("dial", replicas)
        return await self.acted("dial", replicas)

    async def _ask(self, url: str) -> tuple[int, str]:
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=_NO_AUTHORITIES) as http:
            answer = await http.get(url)
        return answer.status_code, answer.text


async def until(
    question: Callable[[], Awaitable[bool]], what: str, seconds: float = HANGS, pause: float | None = None
) -> float:
    """Poll `question` until its answer is true, and return the seconds that this took.

    An error of the API server or of HTTP counts as false. After `seconds`, raise TimeoutError with `what`. Without a
    `pause`, a pause takes a tenth of the time so far, between 0.1 s and 0.5 s.
    """
    began = time.monotonic()
    last = ""
    while (waited := time.monotonic() - began) < seconds:
        try:
            if await question():
                return time.monotonic() - began
        except (ClusterError, httpx.HTTPError) as error:
            last = f"; last: {error}"
        await asyncio.sleep(pause or max(0.1, min(0.5, waited / 10)))
    raise TimeoutError(f"not within {seconds:g} s: {what}{last}")


async def insist(write: Callable[[], Awaitable[object]]) -> None:
    """Retry a write until the API server, which fails at times, accepts it. A failed attempt may have taken effect."""

    async def taken() -> bool:
        with contextlib.suppress(Conflict):
            await write()
        return True

    await until(taken, "the API server takes a change")


def cheap_image(folder: Path, name: str, *program: Path) -> dict[str, Any]:
    """Write an engine to `folder` under the real program's name, and return its entry for the image table.

    `program` is the file and the first arguments of the engine. The default is the cheap engine.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    serve = programs / "kvpilot-serve"
    serve.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {shlex.join(map(str, program or [PROGRAM]))} "$@"\n')
    serve.chmod(0o755)
    return {
        "match": [name],
        "entrypoint": ["kvpilot-serve"],
        "path": [str(programs)],
        "env": {"KVPILOT_SERVE_HOST": "$(POD_IP)"},
    }


def _kubeconfig(server: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "faulty",
            "clusters": [{"name": "faulty", "cluster": {"server": server}}],
            "users": [{"name": "faulty", "user": {}}],
            "contexts": [{"name": "faulty", "context": {"cluster": "faulty", "user": "faulty"}}],
        }
    )
