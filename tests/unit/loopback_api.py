"""API server on loopback for answers that a real server rarely gives, and for objects of any shape.

It keeps one collection of services and merges patches into them. `answers`, by method and path, take precedence.
"""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import yaml

Json = Any
_SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/models/quantizedllmservices"


class LoopbackApi:
    """Server that runs until the end of the block.

    Attributes:
        services: services by name.
        answers: status and body by path; these take precedence over `services`.
        dropped: fields of spec.rollout that the server does not know and so drops.
        asked: method and path (with the query) of every request.
    """

    def __init__(self, folder: Path) -> None:
        self.services: dict[str, Json] = {}
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.dropped: frozenset[str] = frozenset()
        self.asked: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(client_configuration(self.url)))

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: Json) -> tuple[int, Json]:
        """Return the server's answer."""
        if path == _SERVICES:
            return 200, {"items": list(self.services.values())}
        name = path.removeprefix(f"{_SERVICES}/")
        if name in self.services:
            if method == "PATCH":
                merge(self.services[name], body)
                for field in self.dropped:
                    self.services[name]["spec"]["rollout"].pop(field, None)
            return 200, self.services[name]
        if path.startswith(_SERVICES):
            return 404, {"kind": "Status", "message": f'"{name}" not found', "details": {"name": name}}
        return 200, {"items": []}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.asked.append((self.command, self.path))
                path = urlsplit(self.path).path
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
                status, answer = api.answers.get(path) or _encoded(api.answer(self.command, path, body))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_PATCH = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def client_configuration(server: str, namespace: str = "models") -> Json:
    """Return a client configuration with two contexts: "here" in that namespace, and "bare" without one."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "one", "user": "me", "namespace": namespace}},
            {"name": "bare", "context": {"cluster": "one", "user": "me"}},
        ],
        "current-context": "here",
    }


def merge(target: dict[str, Json], patch: Mapping[str, Json]) -> None:
    """Apply a JSON merge patch of objects and values."""
    for key, value in patch.items():
        if isinstance(value, Mapping):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _encoded(answer: tuple[int, Json]) -> tuple[int, bytes]:
    return answer[0], json.dumps(answer[1]).encode()
