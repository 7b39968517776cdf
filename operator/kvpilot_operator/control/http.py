"""/healthz, /readyz and /metrics of the operator itself."""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest


async def serve_http(host: str, port: int, registry: CollectorRegistry, ready: asyncio.Event) -> web.AppRunner:
    """Serve until the returned runner is cleaned up. `ready` turns /readyz to 200."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if ready.is_set() else web.Response(status=503, text="starting\n")

    async def metrics(_: web.Request) -> web.Response:
        # A large fleet's page takes a second to write: passes go on meanwhile.
        page = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
