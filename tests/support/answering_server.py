"""Server on loopback whose answers a test defines, and a client for it."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_operator.cluster.client import Cluster

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """HTTP server for one test. The test's function `answer` answers every request.

    Attributes:
        url: the server's address.
        cluster: a client for this server.
        asked: requests that the server received.
        told: (method, kind, HTTP status) of each request, as the client passes it to its callback `on_request`.
        wrote: (kind, namespace, name, object) of each write, as the client passes it to its callback `on_write`.
    """

    def __init__(self) -> None:
        self.answer: Answer = _nothing
        self.asked: list[web.Request] = []
        self.told: list[tuple[str, str, int]] = []
        self.wrote: list[tuple[str, str, str, Any]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def up(cls) -> AsyncIterator[Self]:
        """Run the server until the block ends."""
        server = cls()
        await server._start()
        try:
            yield server
        finally:
            await server.cluster.close()
            await server._runner.cleanup()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        configuration = Configuration()
        self.url = configuration.host = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        self.cluster = Cluster(
            ApiClient(configuration),
            on_request=lambda method, kind, status, seconds: self.told.append((method, kind, status)),
        )
        self.cluster.on_write = lambda *wrote: self.wrote.append(wrote)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        return await self.answer(request)


async def _nothing(_: web.Request) -> web.StreamResponse:
    return web.json_response({})


def status(code: int, message: str = "said so", **headers: str) -> Answer:
    """Return a function that answers every request like an API server: with this status, message and headers."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "message": message}, status=code, headers=headers)

    return answer


def pod(name: str, version: int = 1) -> dict[str, Any]:
    """Return a pod with only the fields that a client reads."""
    return {"metadata": {"namespace": "a", "name": name, "resourceVersion": str(version)}}
