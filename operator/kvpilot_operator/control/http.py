"""Serve /healthz, /readyz and /metrics of the operator itself."""

import asyncio
import logging

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvpilot_operator.budget import TOKEN_REVIEW, Permits
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import ClusterError

log = logging.getLogger(__name__)

PATH = "/metrics"
_NOBODY = "send the token of a ServiceAccount or user: Authorization: Bearer TOKEN\n"


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text, headers={"WWW-Authenticate": "Bearer"} if status == 401 else None)


class MetricsAccess:
    """A check of bearer tokens by TokenReview and SubjectAccessReview, like controller-runtime's metrics server.

    It needs a client without a write fence, because standby replicas also answer /metrics.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._reviews = Permits(TOKEN_REVIEW)

    async def refusal(self, authorization: str, peer: str) -> web.Response | None:
        """Return the answer to a request that may not read /metrics, or None if it may.

        `authorization` is the Authorization header, which may be empty. `peer` is the client's address.
        """
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return _refusal(401, _NOBODY)
        try:
            async with self._reviews.of(peer):
                return await self._ask(token)
        except ClusterError as error:
            log.warning("a token for %s could not be reviewed: %s", PATH, error)
            return _refusal(503, "the API server could not be asked about the token: try again\n")

    async def _ask(self, token: str) -> web.Response | None:
        known = await self._cluster.review("authentication.k8s.io/v1", "TokenReview", {"token": token})
        user = known.get("user") or {}
        if known.get("authenticated") is not True or not user.get("username"):
            return _refusal(401, _NOBODY)
        spec = {
            "user": user["username"],
            "groups": user.get("groups") or [],
            "uid": user.get("uid") or "",
            "extra": user.get("extra") or {},
            "nonResourceAttributes": {"path": PATH, "verb": "get"},
        }
        allowed = await self._cluster.review("authorization.k8s.io/v1", "SubjectAccessReview", spec)
        if allowed.get("allowed") is True:
            return None
        words = f"{user['username']} may not get {PATH}: bind it to a ClusterRole with nonResourceURLs [{PATH}]\n"
        return _refusal(403, words)


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
            refused = await access.refusal(request.headers.get("Authorization", ""), request.remote or "")
            if refused is not None:
                return refused
        # Use a thread, because a large fleet's metrics take a second, and reconciles must continue meanwhile.
        page = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
