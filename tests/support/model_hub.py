"""Model hub on loopback for the Hugging Face client: a model's list of files, and their content, also by range."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1024


class Hub:
    """Files of one model by name. Files of at least LARGE bytes are stored separately (LFS) under their SHA-256.

    Attributes:
        asked: method and path of each request.
        sent: bytes sent of each file.
        before: callback with the name of a file before it is sent. It may wait, or raise to break the connection.
        refuses: X-Error-Code of all answers; an empty string refuses nothing.
    """

    def __init__(self, model: str, files: Mapping[str, bytes], host: str = "127.0.0.1") -> None:
        self.model = model
        self.files = dict(files)
        self.asked: list[tuple[str, str]] = []
        self.sent: dict[str, int] = {}
        self.before: Callable[[str], None] = lambda _: None
        self.refuses = ""
        hub = self

        class Answer(_Answer):
            pass

        Answer.hub = hub
        self._server = ThreadingHTTPServer((host, 0), Answer)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"

    def start(self) -> None:
        Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def info(self) -> dict[str, Any]:
        """Return the hub's description of the model."""
        return {"id": self.model, "sha": COMMIT, "siblings": [_sibling(*one) for one in self.files.items()]}


@contextmanager
def hub_of(model: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    one = Hub(model, files)
    one.start()
    try:
        yield one
    finally:
        one.stop()


def content_name(content: bytes) -> str:
    """Return the name under which hub and client's cache store a content."""
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    about: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}  # noqa: S324
    if len(content) >= LARGE:
        about["lfs"] = {"sha256": content_name(content), "size": len(content), "pointerSize": 134}
    else:
        about["blobId"] = content_name(content)
    return about


class _Answer(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        if hub.refuses:
            self._send(401, b"", {"X-Error-Code": hub.refuses}, body=body)
        elif path.startswith(f"/api/models/{hub.model}/tree/"):
            tree = [_leaf(*one) for one in hub.files.items()]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body=body)
        elif path == f"/api/models/{hub.model}" or path.startswith(f"/api/models/{hub.model}/revision/"):
            self._send(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, body=body)
        elif path.startswith(f"/{hub.model}/resolve/") and path.split("/", 5)[5] in hub.files:
            self._file(path.split("/", 5)[5], body=body)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)

    def _file(self, name: str, *, body: bool) -> None:
        content = self.hub.files[name]
        about = {"ETag": f'"{content_name(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if first:
            about["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if body:
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(content) - first
            self.hub.before(name)
        self._send(206 if first else 200, content[first:], about, body=body)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            # The client may have been killed meanwhile.
            with suppress(ConnectionError):
                self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _leaf(name: str, content: bytes) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": content_name(content)}
    if len(content) >= LARGE:
        leaf["lfs"] = {"oid": content_name(content), "size": len(content), "pointerSize": 134}
    return leaf
