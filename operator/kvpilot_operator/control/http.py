"""Serve /healthz, /readyz and /metrics of the operator itself."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvpilot_operator.budget import TOKEN_REVIEW, Permits
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import ClusterError

log = logging.getLogger(__name__)

PATH = "/metrics"
# Time for which a grant (a client's right to read /metrics) is cached. A client that scrapes every 15 s then causes two
# requests to the API server a minute.
KEPT_SECONDS = 60.0
# Largest number of cached grants. Refusals are not cached, because a client may try any number of tokens.
MAX_KEPT = 256


@dataclass(frozen=True)
class Verdict:
    """HTTP status for a reader of /metrics: 200 if it may read, else an error with a message."""

    status: int
    text: str = ""


_GRANTED = Verdict(200)
_NOBODY = Verdict(401, "send the token of a ServiceAccount or user: Authorization: Bearer TOKEN\n")


class MetricsAccess:
    """A check of bearer tokens by TokenReview and SubjectAccessReview, like controller-runtime's metrics server."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a client without a write fence, because standby replicas also answer /metrics."""
        self._cluster = cluster
        self._clock = clock
        self._granted: dict[bytes, float] = {}
        """Time at which each cached grant expires, by a hash of the token."""
        self._reviews = Permits(TOKEN_REVIEW)

    async def verdict(self, authorization: str, peer: str) -> Verdict:
        """Judge a request by its Authorization header, which may be empty. `peer` is the client's address."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return _NOBODY
        # Use a hash as the key, because a token must never be kept or logged.
        key = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        until = self._granted.get(key)
        if until is not None and self._clock() < until:
            return _GRANTED
        try:
            # Renewing a grant needs no permit, so a known reader does not wait behind clients that try tokens.
            async with self._reviews.of(peer) if until is None else contextlib.nullcontext():
                verdict = await self._ask(token)
        except ClusterError as error:
            log.warning("a token for %s could not be reviewed: %s", PATH, error)
            return Verdict(503, "the API server could not be asked about the token: try again\n")
        self._granted.pop(key, None)
        if verdict is _GRANTED:
            self._granted[key] = self._clock() + KEPT_SECONDS
            if len(self._granted) > MAX_KEPT:
                self._granted.pop(next(iter(self._granted)))
        return verdict

    async def _ask(self, token: str) -> Verdict:
        known = await self._cluster.review("authentication.k8s.io/v1", "TokenReview", {"token": token})
        user = known.get("user") or {}
        if known.get("authenticated") is not True or not user.get("username"):
            return _NOBODY
        spec = {
            "user": user["username"],
            "groups": user.get("groups") or [],
            "uid": user.get("uid") or "",
            "extra": user.get("extra") or {},
            "nonResourceAttributes": {"path": PATH, "verb": "get"},
        }
        allowed = await self._cluster.review("authorization.k8s.io/v1", "SubjectAccessReview", spec)
        if allowed.get("allowed") is True:
            return _GRANTED
        words = f"{user['username']} may not get {PATH}: bind it to a ClusterRole with nonResourceURLs [{PATH}]\n"
        return Verdict(403, words)


_REFUSED = {401: {"WWW-Authenticate": "Bearer"}}


async def serve_http(
    host: str | None, port: int, registry: CollectorRegistry, ready: asyncio.Event, access: MetricsAccess | None = None
) -> web.AppRunner:
    """Serve until the returned runner is cleaned up. Without a `host`, listen on all addresses of IPv4 and IPv6.

    /readyz answers 200 once `ready` is set. `access` checks the readers of /metrics; without it everybody may read.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if ready.is_set() else web.Response(status=503, text="starting\n")

    async def metrics(request: web.Request) -> web.Response:
        if access is not None:
            verdict = await access.verdict(request.headers.get("Authorization", ""), request.remote or "")
            if verdict.status != 200:
                return web.Response(status=verdict.status, text=verdict.text, headers=_REFUSED.get(verdict.status))
        # Use a thread, because a large fleet's metrics take a second, and reconciles must continue meanwhile.
        page = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
