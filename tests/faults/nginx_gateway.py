"""A real proxy (nginx) that obeys one HTTPRoute: the weights of the route's first rule, and its RequestMirror.

A small controller writes nginx's configuration from the route and the Ready pods of its Services, and reloads it. So
requests are split and copied by a program that knows nothing of kvpilot.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from kvpilot_localcluster.addresses import free_port
from kvpilot_localcluster.toolbox.fetch import cached, debian, link
from kvpilot_operator.api.names import HTTP_ROUTE_API
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object
from support.ready_pods import ReadyPods, follow

SERVED_BY = "X-Served-By"
"""Header of an answer: the address of the pod that answered."""
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def nginx() -> Path:
    """Return nginx on PATH, else Debian's 1.22."""
    found = shutil.which("nginx")
    return Path(found) if found else cached("nginx", "1.22", _fetch)


def _fetch(folder: Path) -> None:
    debian(["nginx"], folder)
    link(folder / "usr/sbin/nginx", folder)


def configuration(rule: Object, endpoints: Mapping[str, Sequence[str]], port: int, folder: Path) -> str:
    """Return nginx's configuration for a rule of an HTTPRoute. `endpoints` has the addresses behind each Service."""
    weights = {ref["name"]: ref.get("weight", 1) for ref in rule.get("backendRefs", ())}
    mirrors = [one["requestMirror"] for one in rule.get("filters", ()) if one["type"] == "RequestMirror"]
    assert len(mirrors) < 2, "this controller knows one mirror"
    copies = {one["backendRef"]["name"]: one.get("percent", 100) for one in mirrors}
    upstreams = [
        f"upstream {name} {{ {' '.join(f'server {one};' for one in endpoints[name])} }}"
        for name in sorted({*weights, *copies})
        if endpoints.get(name)
    ]
    total = sum(weights.values())
    shares = [f"{100 * weight / total:.2f}% {name};" for name, weight in list(weights.items())[:-1] if weight]
    copied = [f"{percent}% {name};" for name, percent in copies.items() if endpoints.get(name)]
    paths = [f"{name}_temp_path {folder / name};" for name in _TEMPORARY]
    lines = [
        *(["user root;"] if os.getuid() == 0 else []),
        f"daemon off; worker_processes 1; pid {folder / 'pid'}; error_log stderr warn;",
        "events { worker_connections 512; }",
        "http {",
        *paths,
        "access_log off; proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 300s;",
        *upstreams,
        f'split_clients "user$request_id" $backend {{ {" ".join(shares)} * {list(weights)[-1]}; }}',
        f'split_clients "copy$request_id" $copied {{ {" ".join(copied)} * ""; }}',
        f"server {{ listen 127.0.0.1:{port};",
        f"location / {{ mirror /copied; proxy_pass http://$backend; add_header {SERVED_BY} $upstream_addr always; }}",
        'location = /copied { internal; if ($copied = "") { return 204; }',
        # nginx closes a mirrored request after the answer's header, unless it stores the answer.
        f"proxy_buffering on; proxy_store {folder / 'copies'}/$request_id; proxy_pass http://$copied$request_uri; }}",
        "} }",
    ]
    return "\n".join(lines) + "\n"


class NginxGateway:
    """nginx, and the controller that configures it."""

    def __init__(self, cluster: Cluster, namespace: str, route: str, names: Sequence[str], folder: Path) -> None:
        self._cluster, self._namespace, self._route = cluster, namespace, route
        self._pods = {name: ReadyPods(cluster, namespace, name, "Service") for name in names}
        self._routes: dict[str, Object] = {}
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.rule: Object = {}
        """The rule in effect."""

    @contextlib.asynccontextmanager
    async def serving(self) -> "AsyncIterator[NginxGateway]":
        """Serve until the block ends."""
        async with contextlib.AsyncExitStack() as stack:
            for pods in self._pods.values():
                await stack.enter_async_context(pods.following())
            following = asyncio.create_task(
                follow(self._cluster, HTTP_ROUTE_API, "HTTPRoute", self._namespace, self._routes)
            )
            stack.callback(following.cancel)
            controlling = asyncio.create_task(self._control())
            try:
                while not self.rule:
                    await asyncio.sleep(0.05)
                    assert not controlling.done(), controlling
                yield self
            finally:
                controlling.cancel()
                await asyncio.gather(controlling, return_exceptions=True)

    async def _control(self) -> None:
        """Write the configuration whenever route or pods change. Start nginx with the first one, then reload it."""
        file, process, written = self._folder / "nginx.conf", None, ""
        try:
            while True:
                found = self._routes.get(self._route)
                pods = {name: one.endpoints() or [] for name, one in self._pods.items()}
                rule = found["spec"]["rules"][0] if found is not None else {}
                if rule and pods.get(rule["backendRefs"][0]["name"]):
                    text = configuration(rule, pods, self._port, self._folder)
                    if text != written:
                        await asyncio.to_thread(file.write_text, text)
                        if process is None:
                            options = ("-p", self._folder, "-e", "stderr", "-c", file)
                            process = await asyncio.create_subprocess_exec(nginx(), *options)
                        else:
                            process.send_signal(signal.SIGHUP)
                        written, self.rule = text, rule
                assert process is None or process.returncode is None, f"nginx has ended: {process}"
                await asyncio.sleep(0.05)
        finally:
            if process is not None:
                process.terminate()
                await process.wait()
