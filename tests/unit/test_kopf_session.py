"""kopf's watch of services through our session, with a server on loopback.

No answer of the server ends the watch. If a service is deleted while the watch is interrupted, it disappears.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_operator.api.names import API_VERSION, GROUP, KIND, PLURAL, VERSION
from kvpilot_operator.cluster import kopf_session as module
from kvpilot_operator.cluster.cache import Store
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.cluster.objects import path_of
from kvpilot_operator.cluster.transport import give_up_early
from kvpilot_operator.errors import NotLeader
from kvpilot_operator.main import configure_kopf
from kvpilot_operator.observe.informers import ServiceFeed
from kvpilot_operator.state.snapshot import ServiceKey

SERVICES = path_of(API_VERSION, KIND)
HANG_SECONDS = 60.0
"""Limit against hanging. Each wait takes less than six seconds, pauses included."""


def service(name: str, version: int) -> dict[str, Any]:
    metadata = {"namespace": "a", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}


def event(kind: str, obj: object) -> bytes:
    return json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n"


class Server:
    """Server with one collection of services. `lists` and `watches` replace its next answers."""

    def __init__(self) -> None:
        self.services: dict[str, int] = {}
        self.page = 500
        self.version = 1
        self.lists: list[web.Response] = []
        self.watches: list[web.Response | bytes] = []
        self.asked: list[str] = []
        self.streams: set[web.StreamResponse] = set()

    def put(self, name: str) -> None:
        """Create or change a service without an event, as if the watch were disconnected."""
        self.version += 1
        self.services[name] = self.version

    async def tell(self, kind: str, name: str) -> None:
        """Create, change or delete a service, and send the event to the open watches."""
        self.version += 1
        if kind == "DELETED":
            del self.services[name]
        else:
            self.services[name] = self.version
        for stream in self.streams:
            await stream.write(event(kind, service(name, self.version)))

    async def watched(self) -> None:
        """Wait until a watch is connected."""
        while not self.streams:
            await asyncio.sleep(0.01)

    async def break_watches(self, last_words: bytes = b"") -> None:
        for stream in set(self.streams):
            await stream.write(last_words) if last_words else None
            self.streams.discard(stream)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != SERVICES:
            return web.json_response(self._discovery(request.path))
        if "watch" in request.query:
            return await self._watch(request)
        self.asked.append("list")
        if self.lists:
            return self.lists.pop(0)
        items = [service(name, version) for name, version in self.services.items()]
        first = int(request.query.get("continue", 0))
        metadata = {"resourceVersion": str(self.version)}
        if len(items) > first + self.page:
            metadata["continue"] = str(first + self.page)
        return web.json_response({"metadata": metadata, "items": items[first : first + self.page]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.asked.append("watch")
        said = self.watches.pop(0) if self.watches else None
        if isinstance(said, web.Response):
            return said
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        if said is not None:
            await stream.write(said)
            return stream
        self.streams.add(stream)
        while stream in self.streams:
            await asyncio.sleep(0.01)
        return stream

    @staticmethod
    def _discovery(path: str) -> dict[str, Any]:
        """Answer the requests that kopf makes before its first watch."""
        groups = {GROUP: (VERSION, PLURAL, KIND), "apiextensions.k8s.io": ("v1", "customresourcedefinitions", "C")}
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/api/v1":
            return {"resources": [_resource("namespaces", "Namespace")]}
        if path == "/apis":
            versions = {name: {"version": version} for name, (version, *_) in groups.items()}
            return {"groups": [{"name": n, "versions": [one], "preferredVersion": one} for n, one in versions.items()]}
        _, plural, kind = groups[path.split("/")[2]]
        return {"resources": [_resource(plural, kind)]}


def _resource(plural: str, kind: str) -> dict[str, Any]:
    verbs = ["list", "watch", "patch"]
    return {"name": plural, "singularName": "", "kind": kind, "namespaced": kind == KIND, "verbs": verbs}


class Watched:
    """Store of the operator that kopf fills."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.told: set[ServiceKey] = set()
        self.store: Store[ServiceKey, str] = Store(
            lambda obj: obj["metadata"]["resourceVersion"],
            lambda obj: ServiceKey(obj["metadata"]["namespace"], obj["metadata"]["name"]),
            self.told.add,
        )
        self.feed = ServiceFeed(self.store, [""])

    def names(self) -> set[str]:
        return {service.name for service in self.told if self.store.of(service)}

    async def like_the_server(self) -> None:
        """Wait until the store equals the server's content."""
        while self.names() != set(self.server.services):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(server: Server) -> AsyncIterator[Watched]:
    """Run kopf with the operator's own settings until the block ends. Fail if kopf ends by itself."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api = ApiClient(Configuration(host=f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"))  # type: ignore[union-attr]
    give_up_early(api)
    cluster = Cluster(api)
    known = Watched(server)
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def begin(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return cluster.session_for_kopf(API_VERSION, KIND, [""], known.feed.listed)

    @kopf.on.event(API_VERSION, PLURAL, registry=registry)
    async def take(event: kopf.RawEvent, **_: Any) -> None:
        known.feed.take(event["type"], event["object"])

    stop = asyncio.Event()
    at_work = asyncio.create_task(
        kopf.operator(registry=registry, standalone=True, clusterwide=True, stop_flag=stop, memo=kopf.Memo())
    )
    try:
        async with asyncio.timeout(HANG_SECONDS):
            yield known
            await server.watched()  # kopf would wait five seconds for a watch that begins while kopf ends
            assert not at_work.done(), "kopf has ended"
    finally:
        # kopf waits five seconds for every task that started after it, so also for the server's open connections.
        server.streams.clear()
        await cluster.close()
        stop.set()
        await asyncio.gather(at_work, return_exceptions=True)
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(module, "_SHORTEST_WATCH_SECONDS", 0.2)


async def test_services_count_as_listed_once_all_pages_were_read() -> None:
    server = Server()
    for number in range(20):
        server.put(f"s{number}")
    async with watching(server) as known:
        await known.feed.filled.wait()
        assert known.names() == set(server.services)


async def test_a_list_of_several_pages_is_read_completely() -> None:
    server = Server()
    server.page = 3
    for number in range(7):
        server.put(f"s{number}")
    async with watching(server) as known:
        await known.feed.filled.wait()
        assert known.names() == set(server.services)
    assert server.asked[:3] == ["list"] * 3


async def test_an_empty_list_counts_as_listed_too() -> None:
    async with watching(Server()) as known:
        await known.feed.filled.wait()
        assert known.names() == set()


async def test_created_changed_and_deleted_services_are_followed() -> None:
    server = Server()
    async with watching(server) as known:
        await server.watched()
        await server.tell("ADDED", "x")
        await known.like_the_server()
        await server.tell("DELETED", "x")
        await known.like_the_server()


GONE = event("ERROR", {"kind": "Status", "code": 410, "message": "too old"})


@pytest.mark.parametrize("left", [{"y"}, set()], ids=["one is left", "none is left"])
async def test_a_service_deleted_while_the_watch_was_lost_is_dropped_after_410(left: set[str]) -> None:
    server = Server()
    for name in ("x", "y"):
        server.put(name)
    async with watching(server) as known:
        await known.feed.filled.wait()
        await server.watched()
        server.version += 10
        server.services = {name: server.services[name] for name in left}
        server.watches = [GONE]
        await server.break_watches()
        await known.like_the_server()
        assert known.names() == left


ODD_EVENTS = [
    event("ERROR", {"code": 500, "message": "etcd: leader changed"}),
    b"<html>bad gateway</html>\n",
    b"[1, 2]\n",
    event("ADDED", {"metadata": {}}),
    event("MODIFIED", {"metadata": {"name": "x", "namespace": "a", "resourceVersion": 7}}),
]


def refused(code: int) -> web.Response:
    return web.json_response({"kind": "Status", "message": "no"}, status=code)


@pytest.mark.parametrize("code", [401, 403, 404, 410, 429, 500, 503])
@pytest.mark.parametrize("what", ["list", "watch"])
async def test_a_temporary_refusal_does_not_end_the_watch(what: str, code: int) -> None:
    server = Server()
    server.put("x")
    if what == "list":
        server.lists = [refused(code)]
    else:
        server.watches = [refused(code)]
    async with watching(server) as known:
        await known.feed.filled.wait()
        await server.watched()
        await server.tell("ADDED", "y")
        await known.like_the_server()


@pytest.mark.parametrize("said", ODD_EVENTS)
async def test_an_invalid_event_breaks_only_the_watch(said: bytes) -> None:
    server = Server()
    server.put("x")
    server.watches = [said]
    async with watching(server) as known:
        await server.watched()
        await server.tell("ADDED", "y")
        await known.like_the_server()


@pytest.mark.parametrize("body", ["<html>bad gateway</html>", "[]", '{"items": 3}', '{"items": [{"metadata": {}}]}'])
async def test_an_invalid_list_is_requested_again(body: str) -> None:
    server = Server()
    server.put("x")
    server.lists = [web.Response(text=body, content_type="application/json")]
    async with watching(server) as known:
        await known.like_the_server()


async def test_after_a_watch_that_ends_at_once_the_next_one_starts_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pause = 0.5
    monkeypatch.setattr(module, "_SHORTEST_WATCH_SECONDS", pause)
    server = Server()
    server.watches = [b""] * 4
    began = time.monotonic()
    async with watching(server):
        await server.watched()
    # Each of the five watches begins at least one pause after the previous one.
    assert time.monotonic() - began >= 4 * pause


async def test_kopf_writes_nothing_while_the_fence_is_closed() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api = ApiClient(Configuration(host=f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"))  # type: ignore[union-attr]
    give_up_early(api)
    fence = WriteFence()
    cluster = Cluster(api, fence)
    login = cluster.session_for_kopf(API_VERSION, KIND, [""], lambda *_: None)
    session = login.aiohttp_session
    with pytest.raises(NotLeader):
        await session.patch(f"{login.server}{SERVICES}/x", json={})
    assert asked == []
    fence.open(float("inf"), float("inf"))
    async with session.patch(f"{login.server}{SERVICES}/x", json={}) as patched:
        assert patched.status == 200
    assert asked == ["PATCH"]
    await session.close()
    await cluster.close()
    await runner.cleanup()
