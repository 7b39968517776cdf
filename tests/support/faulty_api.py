"""Proxy between the operator and the API server that injects network and server faults.

The operator speaks plain HTTP to the proxy. The proxy connects to the API server as the cluster's administrator. Tests
that need the true state ask the API server directly.
"""

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
from aiohttp import web

_HOP = ("host", "connection", "transfer-encoding", "content-length", "content-encoding", "accept-encoding")
_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


class Seen(NamedTuple):
    """One request that the operator sent: its monotonic time, its content, and its HTTP status (0 if unanswered)."""

    time: float
    method: str
    path: str
    watch: bool
    status: int


def is_write(seen: Seen) -> bool:
    """Return True if a request changes objects (POST, PUT, PATCH or DELETE)."""
    return seen.method != "GET"


@dataclass
class Storm:
    """Error answers to a share of the requests. The proxy does not pass these requests on."""

    status: int
    share: float = 1.0
    """Share of the requests that fail, 0 to 1. They are drawn at random."""
    only: str = ""
    """Requests that fail: "writes" or "watches"; empty for all."""
    retry_after: int | None = None
    event: bool = False
    """True answers a watch with 200 and sends the error as an event, as an API server does."""


@dataclass
class FaultyApi:
    """Proxy whose fields tests may change at any time. Use `async with FaultyApi.between(server, tls)`."""

    server: str
    tls: ssl.SSLContext
    port: int = 0
    storm: Storm | None = None
    seen: list[Seen] = field(default_factory=list)
    on_write: Callable[[str, str, bytes], None] = lambda *_: None
    """Callback with method, path and body of an accepted write, before the operator gets the answer."""

    @classmethod
    @asynccontextmanager
    async def between(cls, server: str, tls: ssl.SSLContext) -> "AsyncIterator[FaultyApi]":
        """Listen on a free loopback port until the block ends."""
        proxy = cls(server, tls)
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", proxy._handle)
        proxy._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await proxy._runner.setup()
        proxy._random = random.Random(0)
        proxy._watches, proxy._silent = set(), set()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
            proxy._session = session
            await proxy.back()
            try:
                yield proxy
            finally:
                proxy._hang_up()
                await proxy._runner.cleanup()

    @property
    def url(self) -> str:
        """Address at which the operator finds the API server."""
        return f"http://127.0.0.1:{self.port}"

    async def away(self) -> None:
        """Simulate an API server that is gone: refuse new connections, and reset open ones."""
        await self._site.stop()
        self._hang_up()

    async def back(self) -> None:
        """Accept connections again, at the same port."""
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        self.port = self._runner.addresses[-1][1]

    def drop_watches(self) -> int:
        """Reset the connection of every open watch, and return the number of watches."""
        dropped = list(self._watches)
        for transport in dropped:
            transport.abort()
        return len(dropped)

    def silence_watches(self) -> int:
        """Keep every open watch connected but silent, and return their number."""
        self._silent |= self._watches
        return len(self._watches)

    def count(self, since: float, of: Callable[[Seen], bool] = lambda _: True) -> int:
        """Return how many requests since the monotonic time `since` satisfy the predicate `of`."""
        return sum(one.time >= since and of(one) for one in self.seen)

    def _hang_up(self) -> None:
        for connection in self._runner.server.connections if self._runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch", "") in ("1", "true")
        began, status = time.monotonic(), 0
        try:
            answer = await self._answer(request, watch)
            status = answer.status
            return answer
        finally:
            self.seen.append(Seen(began, request.method, request.path, watch, status))

    async def _answer(self, request: web.Request, watch: bool) -> web.StreamResponse:
        storm = self.storm
        kind = "writes" if request.method != "GET" else "watches" if watch else "reads"
        if storm is not None and storm.only in ("", kind) and self._random.random() < storm.share:
            return _error_event(storm) if storm.event and watch else _refused(storm)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        body = await request.read()
        try:
            async with self._session.request(
                request.method, f"{self.server}{request.rel_url}", data=body or None, headers=headers
            ) as upstream:
                if kind == "writes" and upstream.status < 300:
                    self.on_write(request.method, request.path, body)
                return await self._pass_on(request, upstream, watch)
        except aiohttp.ClientError as error:
            # A load balancer without a live server answers like this.
            if request.transport is not None and not watch:
                return _refused(Storm(503), str(error))
            raise web.HTTPBadGateway from error

    async def _pass_on(self, request: web.Request, upstream: aiohttp.ClientResponse, watch: bool) -> web.StreamResponse:
        kind = upstream.headers.get("Content-Type", "application/json")
        if not watch:
            return web.Response(status=upstream.status, body=await upstream.read(), headers={"Content-Type": kind})
        out = web.StreamResponse(status=upstream.status, headers={"Content-Type": kind})
        await out.prepare(request)
        transport = request.transport
        if transport is None:
            return out
        self._watches.add(transport)
        try:
            async for chunk in upstream.content.iter_any():
                while transport in self._silent:
                    await asyncio.sleep(0.1)
                await out.write(chunk)
        except (aiohttp.ClientError, ConnectionError):
            transport.abort()
        finally:
            self._watches.discard(transport)
            self._silent.discard(transport)
        with suppress(ConnectionError):
            await out.write_eof()
        return out

    _runner: web.AppRunner = field(init=False, repr=False)
    _site: web.TCPSite = field(init=False, repr=False)
    _session: aiohttp.ClientSession = field(init=False, repr=False)
    _random: random.Random = field(init=False, repr=False)
    _watches: set[asyncio.Transport] = field(init=False, repr=False)
    _silent: set[asyncio.Transport] = field(init=False, repr=False)


def _refused(storm: Storm, message: str = "a storm of errors") -> web.Response:
    headers = {} if storm.retry_after is None else {"Retry-After": str(storm.retry_after)}
    return web.json_response(_status(storm, message), status=storm.status, headers=headers)


def _error_event(storm: Storm) -> web.Response:
    return web.Response(text=json.dumps({"type": "ERROR", "object": _status(storm, "a storm of errors")}) + "\n")


def _status(storm: Storm, message: str) -> dict[str, object]:
    """Return a Kubernetes Status, as the API server would answer."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": _REASONS.get(storm.status, ""),
        "code": storm.status,
    }
