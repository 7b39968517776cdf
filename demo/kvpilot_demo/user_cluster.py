"""Demo on the cluster of kubectl's current context. kvpilot must already be installed there."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient

from kvpilot_demo.service import DemoError, DemoService
from kvpilot_localcluster.addresses import free_port
from kvpilot_operator.api.names import SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object

NAMESPACE = "kvpilot-demo"
MODEL = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
_OPERATORS = '{range .items[*]}{.spec.template.spec.containers[0].image} in {.metadata.namespace}{"\\n"}{end}'


class UserCluster(DemoService):
    """The demo's service in its own namespace of the user's cluster. Use `async with UserCluster.up(...)`."""

    def __init__(self, folder: Path, cluster: Cluster, image: str, model: str) -> None:
        super().__init__(folder, cluster, NAMESPACE)
        self._image, self._source = image, model
        self._proxy: subprocess.Popen[bytes] | None = None
        self._url = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def up(cls, folder: Path, image: str, model: str) -> "AsyncIterator[UserCluster]":
        """Create the namespace. At the end, delete it with everything in it."""
        await asyncio.to_thread(kubectl, "create", "namespace", NAMESPACE)
        try:
            await config.load_kube_config(config_file=os.environ["KUBECONFIG"])
            world = cls(folder, Cluster(ApiClient()), image, model)
            try:
                yield world
            finally:
                if world._proxy is not None:
                    world._proxy.terminate()
                    world._proxy.wait()
                await world.cluster.close()
        finally:
            await asyncio.to_thread(kubectl, "delete", "namespace", NAMESPACE, "--wait=false")

    @property
    def logs(self) -> str:
        """Return a text with the commands that show the logs."""
        return f"kubectl -n {NAMESPACE} logs -l {SERVICE_LABEL}={self.name} --tail=50, and the operator's log"

    def manifest(self) -> Object:
        """Return the example with the user's image and model."""
        made = super().manifest()
        made["spec"]["engine"]["image"] = self._image
        made["spec"]["model"] |= {"source": self._source, "servedName": self.model}
        return made

    async def url(self) -> str:
        """Return the Service's own address if this machine can reach it, else one through the API server."""
        if not self._url:
            address = await self.cluster_ip()
            self._url = f"http://{address}" if await _listens(address, 80) else await self._through_the_api_server()
        return self._url

    async def _through_the_api_server(self) -> str:
        port, log = free_port(), self.folder / "proxy.log"
        self._proxy = proxy = _start_proxy(port, log)
        while not await _listens("127.0.0.1", port):
            if proxy.poll() is not None:
                raise DemoError(f"kubectl proxy has ended: {log.read_text().strip()[-300:]}")
            await asyncio.sleep(0.1)
        return f"http://127.0.0.1:{port}/api/v1/namespaces/{NAMESPACE}/services/{self.name}:80/proxy"


@contextlib.contextmanager
def current_context(folder: Path) -> Iterator[None]:
    """Pin kubectl's current context until the block ends, even if the user switches to another one meanwhile.

    Raises:
        DemoError: kubectl is missing or has no context.
    """
    pinned, context = folder / "kubeconfig", kubectl("config", "view", "--minify", "--flatten", "--raw")
    pinned.touch(mode=0o600)
    pinned.write_text(context)
    os.environ["KUBECONFIG"] = str(pinned)
    try:
        yield
    finally:
        # Remove the copy of the kubeconfig, because it holds credentials.
        pinned.unlink(missing_ok=True)


def plan(image: str, model: str) -> str:
    """Return a text that says what the demo will do, shown before the user agrees to run it.

    Raises:
        DemoError: there is no usable cluster, or kvpilot is not installed there.
    """
    context = kubectl("config", "current-context")
    server = kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
    try:
        kubectl("get", "crd", "quantizedllmservices.kvpilot.io", "-o", "name")
    except DemoError as error:
        raise DemoError(f"kvpilot is not installed in context {context} (docs/install.md): {error}") from None
    found = kubectl("get", "deployments", "-A", "-l", "app.kubernetes.io/name=kvpilot", "-o", f"jsonpath={_OPERATORS}")
    operators = ", ".join(found.splitlines()) or "none runs as a Deployment here; start one yourself"
    return (
        f"The demo runs on your cluster:\n  context    {context} ({server})\n"
        f"  namespace  {NAMESPACE}, made now and deleted at the end\n"
        f"  engine     {image}, at most two pods, each with 500m CPU and 3Gi\n  model      {model}\n"
        f"  operator   {operators}"
    )


def kubectl(*arguments: str) -> str:
    """Return the output of a kubectl command.

    Raises:
        DemoError: kubectl is missing, or the command failed.
    """
    try:
        done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DemoError("kubectl is not on PATH: install it, or run the demo without WHERE=cluster") from None
    if done.returncode:
        raise DemoError(f"kubectl {' '.join(arguments[:3])}: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout.strip()


def _start_proxy(port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        # In a session of its own the proxy does not get Ctrl-C from the terminal. The demo ends the proxy itself.
        command = ["kubectl", "proxy", f"--port={port}"]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


async def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(2):
            _, writer = await asyncio.open_connection(address, port)
        writer.close()
        return True
    return False
