"""Serve /healthz, /readyz and /metrics of the operator itself."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvpilot_operator.budget import TOKEN_REVIEW, Permits
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import ClusterError

log = logging.getLogger(__name__)

PATH = "/metrics"
# Time to cache a granted right. A scrape every 15 s then costs two requests to the API server a minute.
KEPT_SECONDS = 60.0
# A client without access may have any number of tokens, so refusals are not cached.
MAX_KEPT = 256
# Most requests of one address whose token is under review or waits for it (budget.TOKEN_REVIEW).
MAX_OF_A_PEER = 8


@dataclass(frozen=True)
class Verdict:
    """HTTP status (200 if the request may pass) and the message for the client otherwise."""

    status: int
    text: str = ""


_NOBODY = Verdict(401, "send the token of a ServiceAccount or user: Authorization: Bearer TOKEN\n")
_BUSY = Verdict(503, "too many tokens of your address are being reviewed: try again\n")


class MetricsAccess:
    """Reviews tokens by TokenReview and SubjectAccessReview, as the metrics server of controller-runtime does."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a client without a fence, because a standby replica is asked, too."""
        self._cluster = cluster
        self._clock = clock
        self._kept: dict[bytes, tuple[float, Verdict]] = {}
        self._reviews = Permits(TOKEN_REVIEW)
        self._of_peer: Counter[str] = Counter()

    async def verdict(self, authorization: str, peer: str) -> Verdict:
        """Judge a request of this address by its Authorization header, empty if there is none."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return _NOBODY
        # A token is never kept or logged.
        key = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        until, verdict = self._kept.get(key, (-math.inf, _BUSY))
        if self._clock() < until:
            return verdict
        try:
            verdict = await (self._ask(token) if key in self._kept else self._ask_in_turn(token, peer))
        except ClusterError as error:
            log.warning("a token for %s could not be reviewed: %s", PATH, error)
            return Verdict(503, "the API server could not be asked about the token: try again\n")
        self._kept.pop(key, None)
        if verdict.status == 200:
            self._kept[key] = (self._clock() + KEPT_SECONDS, verdict)
            if len(self._kept) > MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
        return verdict

    async def _ask_in_turn(self, token: str, peer: str) -> Verdict:
        if self._of_peer[peer] >= MAX_OF_A_PEER:
            return _BUSY
        self._of_peer[peer] += 1
        try:
            async with self._reviews.of(peer):
                return await self._ask(token)
        finally:
            self._of_peer[peer] -= 1
            if not self._of_peer[peer]:
                del self._of_peer[peer]

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
            return Verdict(200)
        words = f"{user['username']} may not get {PATH}: bind it to a ClusterRole with nonResourceURLs [{PATH}]\n"
        return Verdict(403, words)


_REFUSED = {401: {"WWW-Authenticate": "Bearer"}}


async def serve_http(
    host: str | None,
    port: int,
    registry: CollectorRegistry,
    ready: asyncio.Event,
    access: MetricsAccess | None = None,
) -> web.AppRunner:
    """Serve until the returned runner is cleaned up; without a host on all addresses of IPv4 and IPv6.

    `ready` turns /readyz to 200. `access` judges readers of /metrics; without it everybody may read.
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
        # Use a thread: the page of a large fleet takes a second, and reconciles must continue meanwhile.
        page = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
