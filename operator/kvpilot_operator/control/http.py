"""/healthz, /readyz and /metrics of the operator itself."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvpilot_operator.control.access import MetricsAccess

_REFUSED = {401: {"WWW-Authenticate": "Bearer"}}


async def serve_http(
    host: str, port: int, registry: CollectorRegistry, ready: asyncio.Event, access: MetricsAccess | None = None
) -> web.AppRunner:
    """Serve until the returned runner is cleaned up.

    `ready` turns /readyz to 200; `access` judges who may read /metrics, everybody without it. The kubelet, which has no
    token, reads the other two.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if ready.is_set() else web.Response(status=503, text="starting\n")

    async def metrics(request: web.Request) -> web.Response:
        if access is not None:
            verdict = await access.verdict(request.headers.get("Authorization", ""))
            if verdict.status != 200:
                return web.Response(status=verdict.status, text=verdict.text, headers=_REFUSED.get(verdict.status))
        # A large fleet's page takes a second to write: reconciles go on meanwhile.
        page = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
