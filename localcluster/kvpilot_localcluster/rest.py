"""Small blocking client of one Kubernetes API server, for the start of a cluster and for tests."""

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import urllib3
import yaml

HANGS = 300.0
"""Default limit of a wait in seconds: ten times the 30 s that suffice on idle cores."""


class ApiError(Exception):
    """Error for a request that the server refused.

    Attributes:
        status: the HTTP status code.
        body: the answer, as text.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Rest:
    """Client with the rights of one user of one server. Every call returns the decoded JSON answer."""

    server: str
    context: ssl.SSLContext

    @classmethod
    def of_files(cls, server: str, authority: Path, certificate: Path, key: Path) -> "Rest":
        """Return a client that trusts one certificate authority and uses one client certificate."""
        context = ssl.create_default_context(cafile=str(authority))
        # In strict mode, newer Python versions require key identifiers, and the certificates that openssl made here
        # have none.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_cert_chain(str(certificate), str(key))
        return cls(server, context)

    @classmethod
    def of_kubeconfig(cls, path: Path) -> "Rest":
        """Return a client for the current context of a kubeconfig that this package wrote."""
        config = yaml.safe_load(path.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        files = (cluster["certificate-authority"], user["client-certificate"], user["client-key"])
        return cls.of_files(cluster["server"], *(Path(file) for file in files))

    @cached_property
    def _connections(self) -> urllib3.PoolManager:
        # Tests ask many times a second, and a TLS handshake costs several times as much as a request.
        return urllib3.PoolManager(ssl_context=self.context, retries=False, maxsize=10)

    def call(
        self, method: str, path: str, body: Any = None, *, content: str = "application/json", timeout: float = 30
    ) -> Any:
        """Send one request.

        Args:
            method: GET, POST, PUT, PATCH or DELETE.
            path: path and query below the server's address.
            body: JSON body, or None.
            content: content type of the body.
            timeout: seconds after which a silent server counts as unreachable.

        Raises:
            ApiError: the server answered with an error status.
            OSError: the server cannot be reached.
        """
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content}
        with _reaching():
            answer = self._connections.request(method, self.server + path, body=data, headers=headers, timeout=timeout)
        text = answer.data.decode(errors="replace")
        if answer.status >= 300:
            raise ApiError(answer.status, text)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def get(self, path: str) -> Any:
        """Read the object or the list at `path`."""
        return self.call("GET", path)

    def create(self, path: str, body: Any) -> Any:
        """Create an object in the collection at `path`."""
        return self.call("POST", path, body)

    def merge(self, path: str, body: Any) -> Any:
        """Apply a JSON merge patch (`body`) to the object at `path`."""
        return self.call("PATCH", path, body, content="application/merge-patch+json")

    def delete(self, path: str, *, grace: int | None = None) -> None:
        """Delete an object. Do nothing if it does not exist."""
        query = "" if grace is None else f"?gracePeriodSeconds={grace}"
        try:
            self.call("DELETE", path + query)
        except ApiError as error:
            if error.status != 404:
                raise

    def watch(self, path: str, version: str) -> Iterator[Any]:
        """Yield the events of a collection since a version, until the server ends the watch.

        Raises:
            ApiError: the server no longer has this version.
            OSError: the connection broke, or nothing arrived for 90 s.
        """
        url = f"{self.server}{path}?watch=1&resourceVersion={version}&timeoutSeconds=60"
        with _reaching(), self._connections.request("GET", url, preload_content=False, timeout=90) as answer:
            if answer.status != 200:
                raise ApiError(answer.status, answer.data.decode(errors="replace"))
            for line in answer:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(event["object"].get("code", 500), str(event["object"].get("message")))
                yield event

    def ready(self) -> bool:
        """Return True if the server answers its readiness check."""
        try:
            return bool(self.call("GET", "/readyz", timeout=2) == "ok")
        except (ApiError, OSError):
            return False


@contextmanager
def _reaching() -> Iterator[None]:
    """Raise OSError for a server that cannot be reached."""
    try:
        yield
    except urllib3.exceptions.HTTPError as error:
        raise OSError(str(error)) from error


def until(question: Callable[[], Any], what: str, *, seconds: float = HANGS, pause: float = 0.05) -> Any:
    """Call `question` until its answer is true, and return that answer.

    A 404 or an unreachable server counts as false. Pauses begin with `pause`, and grow to 0.25 s within 5 s.

    Raises:
        TimeoutError: the answer was never true. The message has `what` and the last answer.
    """
    began = time.monotonic()
    last: object = None
    while (waited := time.monotonic() - began) < seconds:
        try:
            last = question()
        except ApiError as error:
            if error.status not in (404, 503):
                raise
            last = error
        except OSError as error:
            last = error
        else:
            if last:
                return last
        time.sleep(max(pause, min(0.25, waited / 20)))
    raise TimeoutError(f"not within {seconds:g} s: {what}; last answer: {last!r}")
