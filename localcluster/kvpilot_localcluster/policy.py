"""Server of the API policy/v1, for a core that has only policy/v1beta1. It translates PodDisruptionBudgets.

The core's aggregator sends it requests. Both versions have the same structure. The server drops
`unhealthyPodEvictionPolicy` (Kubernetes 1.27), because version 1.20 refuses the field, and its disruption controller
does not support it. Evictions are a subresource of pods and do not go through this server.
"""

import http.client
import json
import logging
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kvpilot_localcluster.rest import Rest

_NEW, _OLD = "policy/v1", "policy/v1beta1"
_IMPERSONATE = {"X-Remote-User": "Impersonate-User", "X-Remote-Group": "Impersonate-Group"}
_EXTRA = "X-Remote-Extra-"


log = logging.getLogger("kvpilot_localcluster.policy")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that broke off. The base class would print a traceback on the user's screen."""
        log.debug("a request from %s broke off", client_address, exc_info=True)


class PolicyServer:
    """Server for requests from the aggregator. It sends them to the core as the user that the aggregator names."""

    def __init__(self, core: Rest, folder: Path) -> None:
        """Listen with the certificate in `folder`. Accept only clients whose certificate the CA there has signed."""
        self._server = _Server(("127.0.0.1", 0), _handler(core))
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_cert_chain(str(folder / "server.crt"), str(folder / "server.key"))
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="policy/v1", daemon=True).start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def _handler(core: Rest) -> type[BaseHTTPRequestHandler]:
    host = urlsplit(core.server).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not self.path.startswith(f"/apis/{_NEW}"):
                self._answer(404, "text/plain", b"only policy/v1 is served here\n")
                return
            connection = http.client.HTTPSConnection(host, context=core.context, timeout=30)
            try:
                connection.putrequest(self.command, self.path.replace(_NEW, _OLD, 1))
                for name, value in self._passed():
                    connection.putheader(name, value)
                sent = _older(body) if body else b""
                connection.putheader("Content-Length", str(len(sent)))
                connection.endheaders(sent)
                answer = connection.getresponse()
                found = answer.read().replace(_OLD.encode(), _NEW.encode())
                self._answer(answer.status, answer.headers.get_content_type(), _budgets_alone(found))
            except OSError as error:
                self._answer(503, "text/plain", f"the core server cannot be reached: {error}\n".encode())
            finally:
                connection.close()

        def _passed(self) -> list[tuple[str, str]]:
            found = [("Accept", "application/json")]
            for name, value in self.headers.items():
                if name.title() in _IMPERSONATE:
                    found.append((_IMPERSONATE[name.title()], value))
                elif name.title().startswith(_EXTRA):
                    found.append((f"Impersonate-Extra-{name[len(_EXTRA) :]}", value))
                elif name.title() in ("Content-Type", "User-Agent"):
                    found.append((name, value))
            return found

        def _answer(self, status: int, content: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815 - the base class asks for these names

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because the core logs the same requests."""

    return Handler


def _older(body: bytes) -> bytes:
    """Convert the object of a request from policy/v1 to policy/v1beta1. It may be JSON or YAML."""
    sent = yaml.safe_load(body)
    if isinstance(sent, dict):
        if sent.get("apiVersion") == _NEW:
            sent["apiVersion"] = _OLD
        (sent.get("spec") or {}).pop("unhealthyPodEvictionPolicy", None)
    return json.dumps(sent).encode()


def _budgets_alone(body: bytes) -> bytes:
    """Remove PodSecurityPolicies and the verb `watch` from a list of resources, because this server lacks them."""
    if b'"APIResourceList"' not in body:
        return body
    found = json.loads(body)
    found["resources"] = [
        {**one, "verbs": [verb for verb in one["verbs"] if verb != "watch"]}
        for one in found["resources"]
        if one["name"].startswith("poddisruptionbudgets")
    ]
    return json.dumps(found).encode()
