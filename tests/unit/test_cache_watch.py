"""Watches and their reflectors, with a loopback server that gives the good and bad answers of API servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kvpilot_operator.backoff import Backoff
from kvpilot_operator.cluster import transport as module
from kvpilot_operator.cluster import watch
from kvpilot_operator.cluster.cache import Store
from kvpilot_operator.cluster.watch import Reflector
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.state.snapshot import ServiceKey
from support.answering_server import Answer, Server, pod, status

CHAT = ServiceKey("a", "chat")


def lines(*events: Any, end: bool = True) -> Answer:
    """Return a watch's answer with these events, cut into pieces at arbitrary places."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": [pod("old", 3)]})
        stream = web.StreamResponse()
        await stream.prepare(request)
        text = "".join(json.dumps({"type": kind, "object": obj}) + "\n" for kind, obj in events).encode()
        for i in range(0, len(text), 50_000):
            await stream.write(text[i : i + 50_000])
            await asyncio.sleep(0)
        if not end:
            await asyncio.sleep(60)
        return stream

    return answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server.up() as one:
        yield one


async def heard(server: Server) -> list[tuple[str, Any]]:
    return [event async for event in server.cluster.watch("v1", "Pod", "", "x=y", "10")]


async def test_a_watch_yields_its_events_in_any_chunks_and_of_any_size(server: Server) -> None:
    large = {**pod("p", 11), "text": "x" * 3_000_000}
    mark = {"metadata": {"resourceVersion": "15"}}
    server.answer = lines(("ADDED", large), ("DELETED", pod("q", 12)), ("BOOKMARK", mark))
    assert await heard(server) == [("ADDED", large), ("DELETED", pod("q", 12)), ("BOOKMARK", mark)]
    query = server.asked[0].query
    assert (query["resourceVersion"], query["allowWatchBookmarks"], query["labelSelector"]) == ("10", "true", "x=y")
    assert server.asked[0].path == "/api/v1/pods"
    assert server.told == [("WATCH", "Pod", 200)]


@pytest.mark.parametrize("answer", [status(410), lines(("ERROR", {"code": 410, "message": "too old"}))])
async def test_a_version_that_is_too_old_is_reported_as_410(server: Server, answer: Answer) -> None:
    server.answer = answer
    with pytest.raises(ClusterError) as caught:
        await heard(server)
    assert caught.value.status == 410


@pytest.mark.parametrize("line", ["{}", "[]", "no json", '{"type": "ERROR", "object": null}', '{"type": "ADDED"}'])
async def test_a_line_that_is_not_an_event_is_an_error(server: Server, line: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=line + "\n")

    server.answer = answer
    with pytest.raises(ClusterError):
        await heard(server)


@pytest.mark.parametrize("obj", [{}, {"metadata": None}, {"metadata": {"name": "p"}}])
async def test_an_object_without_a_version_is_an_error(server: Server, obj: Any) -> None:
    server.answer = lines(("ADDED", obj))
    with pytest.raises(ClusterError, match="lacks a resourceVersion"):
        await heard(server)


async def test_a_watch_that_falls_silent_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.2)
    server.answer = lines(("ADDED", pod("p", 11)), end=False)
    with pytest.raises(ClusterError) as caught:
        await heard(server)
    assert caught.value.status == 0


async def test_a_reflector_follows_a_server_that_lists_and_watches(server: Server) -> None:
    changed: list[ServiceKey] = []
    store: Store[ServiceKey, str] = Store(lambda obj: obj["metadata"]["name"], lambda _: CHAT, changed.append)
    server.answer = lines(("ADDED", pod("new", 11)), ("DELETED", pod("old", 12)), end=False)
    reflector = Reflector(server.cluster, "v1", "Pod", "", "", store)
    task = asyncio.create_task(reflector.run())
    async with asyncio.timeout(60):
        await reflector.filled.wait()
        while store.of(CHAT) != ["new"]:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def served_or_not(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[Reflector, Store[ServiceKey, str]]:
    """Return a reflector, with a short back-off, for a kind that the server may lack."""
    monkeypatch.setattr(watch, "MISSING_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_BACKOFF", Backoff(0.01, 0.01))
    store: Store[ServiceKey, str] = Store(lambda obj: obj["metadata"]["name"], lambda _: CHAT, lambda _: None)
    return Reflector(server.cluster, "v1", "Pod", "", "", store, optional=True), store


@pytest.mark.parametrize("code", [403, 404])
async def test_an_optional_kind_is_empty_until_its_crd_exists_and_after_it_is_deleted(
    server: Server, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    reflector, store = served_or_not(server, monkeypatch)
    server.answer = status(code)
    task = asyncio.create_task(reflector.run())
    async with asyncio.timeout(30):
        await reflector.filled.wait()
        assert not reflector.served
        server.answer = lines(("ADDED", pod("new", 11)))
        while store.of(CHAT) != ["new", "old"]:
            await asyncio.sleep(0.01)
        assert reflector.served
        server.answer = status(code)
        while store.of(CHAT) or reflector.served:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_starting_server_that_lacks_its_crds_does_not_empty_the_cache(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reflector, store = served_or_not(server, monkeypatch)
    known, denied = lines(("ADDED", pod("new", 11))), []

    async def answer(request: web.Request) -> web.StreamResponse:
        if reflector.served and len(denied) < watch._DENIALS - 1:
            denied.append(request)
            return await status(404)(request)
        return await known(request)

    server.answer = answer
    task = asyncio.create_task(reflector.run())
    async with asyncio.timeout(30):
        await reflector.filled.wait()
        while store.of(CHAT) != ["new", "old"]:
            assert reflector.served
            assert "old" in store.of(CHAT)
            await asyncio.sleep(0.001)
    assert len(denied) == watch._DENIALS - 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
