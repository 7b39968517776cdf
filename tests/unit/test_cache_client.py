"""The client against a server on loopback that answers as API servers do, well and badly."""

from __future__ import annotations

import asyncio
import json
import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from yarl import URL

from kvpilot_operator.cluster import transport as module
from kvpilot_operator.cluster.cache import Store
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import path_of
from kvpilot_operator.cluster.watch import Reflector
from kvpilot_operator.errors import BadName, ClusterError, Conflict, NotFound, Rejected, Throttled
from kvpilot_operator.state.snapshot import ServiceKey

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers every request by `answer`."""

    def __init__(self) -> None:
        self.answer: Answer = _nothing
        self.asked: list[web.Request] = []
        self.told: list[tuple[str, str, int]] = []
        self.wrote: list[tuple[str, str, str, Any]] = []

    async def start(self) -> Cluster:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        self.cluster = Cluster(
            ApiClient(configuration),
            on_request=lambda method, kind, status, seconds: self.told.append((method, kind, status)),
        ).telling(lambda *wrote: self.wrote.append(wrote))
        return self.cluster

    async def stop(self) -> None:
        await self.cluster.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        return await self.answer(request)


async def _nothing(_: web.Request) -> web.StreamResponse:
    return web.json_response({})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    await one.start()
    yield one
    await one.stop()


def status(code: int, message: str = "said so", **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "message": message}, status=code, headers=headers)

    return answer


def pod(name: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"namespace": "a", "name": name, "resourceVersion": str(version)}}


async def test_a_long_list_is_read_page_by_page(server: Server) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        page = int(request.query.get("continue", "0"))
        more = {"continue": str(page + 1)} if page < 2 else {}
        return web.json_response({"metadata": {"resourceVersion": "9", **more}, "items": [pod(f"p{page}")]})

    server.answer = answer
    found = await server.cluster.list("v1", "Pod", "a", "x=y")
    assert [one["metadata"]["name"] for one in found] == ["p0", "p1", "p2"]
    assert all(request.query["labelSelector"] == "x=y" for request in server.asked)
    assert server.told == [("LIST", "Pod", 200)] * 3


@pytest.mark.parametrize(
    ("answer", "error", "code"),
    [
        (status(409), Conflict, 409),
        (status(404), NotFound, 404),
        (status(500), ClusterError, 500),
        (status(429), ClusterError, 429),
        (status(429, "Retry", **{"Retry-After": "3"}), Throttled, 429),
        (status(503, "Retry", **{"Retry-After": "3"}), Throttled, 503),
    ],
)
async def test_what_the_server_refuses_is_typed(
    server: Server, answer: Answer, error: type[ClusterError], code: int
) -> None:
    server.answer = answer
    with pytest.raises(ClusterError) as caught:
        await server.cluster.get("v1", "Pod", "a", "p")
    assert type(caught.value) is error
    assert caught.value.status == code
    assert server.told == [("GET", "Pod", code)]
    if isinstance(caught.value, Throttled):
        assert caught.value.retry_after == 3


def refusal(code: int, **said: Any) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "code": code, **said}, status=code)

    return answer


CAUSES = [{"reason": "FieldValueInvalid", "field": "spec.x", "message": "Invalid value: 7"}, {"message": "no field"}, 3]
MANY = [{"field": f"spec.x[{i}]", "message": "m"} for i in range(1000)]
OTHER_UID = [{"field": "metadata.uid", "message": 'Invalid value: "u": field is immutable'}] * 2


@pytest.mark.parametrize(
    ("answer", "reason", "causes"),
    [
        (refusal(400, reason="BadRequest", message="bad"), "BadRequest", ()),
        (refusal(403, reason="Forbidden", message="exceeded quota: team"), "Forbidden", ()),
        (
            refusal(422, reason="Invalid", message="m", details={"causes": CAUSES}),
            "Invalid",
            (("spec.x", "Invalid value: 7"),),
        ),
        (refusal(422, message="m", details="no object"), "", ()),
        (refusal(422, message="m", details={"causes": MANY}), "", tuple((f"spec.x[{i}]", "m") for i in range(8))),
        (refusal(500, message="failed to create typed patch object: .spec.x: field not declared in schema"), "", ()),
        (refusal(500, reason="InternalError", message='failed calling webhook "w": refused'), "InternalError", ()),
    ],
)
async def test_a_write_that_is_refused_says_for_what(
    server: Server, answer: Answer, reason: str, causes: tuple[tuple[str, str], ...]
) -> None:
    server.answer = answer
    with pytest.raises(Rejected) as caught:
        await server.cluster.merge("v1", "Service", "a", "s", {})
    assert (caught.value.reason, caught.value.causes) == (reason, causes)
    assert server.wrote == []


async def test_a_write_that_is_meant_for_another_object_of_the_name_is_a_conflict(server: Server) -> None:
    server.answer = refusal(422, reason="Invalid", message="m", details={"causes": OTHER_UID})
    with pytest.raises(Conflict):
        await server.cluster.merge("v1", "Service", "a", "s", {"metadata": {"uid": "u"}})


async def test_a_delete_carries_the_uid_that_it_is_meant_for(server: Server) -> None:
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({})

    server.answer = answer
    await server.cluster.delete("v1", "Service", "a", "s", uid="u-1")
    await server.cluster.delete("v1", "Service", "a", "s")
    assert [body.get("preconditions") for body in bodies] == [{"uid": "u-1"}, None]


async def _cut(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await answer.prepare(request)
    await answer.write(b'{"metadata":')
    assert request.transport is not None
    request.transport.close()
    return answer


async def _no_json(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>bad gateway</html>")


async def _list(_: web.Request) -> web.StreamResponse:
    return web.json_response([1, 2])


@pytest.mark.parametrize("answer", [_cut, _no_json, _list])
async def test_an_answer_that_is_no_object_is_an_error(server: Server, answer: Answer) -> None:
    server.answer = answer
    with pytest.raises(ClusterError):
        await server.cluster.get("v1", "Pod", "a", "p")


@pytest.mark.parametrize(
    "answered",
    [
        {"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": []},
        {"kind": "Pod", "metadata": {"name": "another"}},
        {"kind": "Pod", "metadata": ["p"]},
        {},
    ],
)
async def test_a_list_or_another_object_where_one_was_asked_for_is_an_error(server: Server, answered: Any) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(answered)

    server.answer = answer
    with pytest.raises(ClusterError, match="the answer is no Pod of this name"):
        await server.cluster.find("v1", "Pod", "a", "p")


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../../../../../../api/v1/configmaps", "a/b", "a?b=c", "a#b", "%2e%2e", "A", "a..b", "a\n", "ä", ""],
)
async def test_what_is_no_name_is_not_asked_for(server: Server, name: str) -> None:
    with pytest.raises(BadName, match="is no name of a Pod"):
        await server.cluster.find("v1", "Pod", "a", name)
    with pytest.raises(BadName):
        await server.cluster.delete("v1", "Pod", "a", name)
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": name}}
    with pytest.raises(BadName):
        await server.cluster.apply(manifest)
    assert server.asked == []


@given(st.text(max_size=40) | st.text("a.-/%A", max_size=12))
def test_a_path_leads_to_one_object_of_its_collection_whatever_its_name(name: str) -> None:
    collection = path_of("v1", "ConfigMap", "a")
    try:
        path = path_of("v1", "ConfigMap", "a", name)
    except BadName as error:
        assert len(str(error)) < 500
        return
    assert posixpath.normpath(path) == path
    assert posixpath.dirname(path) == collection
    assert URL(f"http://host{path}").path == path


async def test_whoever_asks_for_it_is_told_of_every_write(server: Server) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(pod("p", 5))

    server.answer = answer
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": "p"}}
    await server.cluster.apply(manifest, subresource="status")
    await server.cluster.merge("v1", "Pod", "a", "p", {})
    await server.cluster.create(manifest)
    await server.cluster.delete("v1", "Pod", "a", "p")
    server.answer = status(404)
    await server.cluster.delete("v1", "Pod", "a", "p")
    server.answer = status(500)
    with pytest.raises(ClusterError):
        await server.cluster.apply(manifest)
    assert server.wrote == [("Pod", "a", "p", pod("p", 5))] * 3 + [("Pod", "a", "p", None)] * 2
    assert server.asked[0].path == path_of("v1", "Pod", "a", "p") + "/status"
    assert server.asked[0].headers["Content-Type"] == "application/apply-patch+yaml"
    assert all(request.query["timeout"] == "15000ms" for request in server.asked)


@pytest.mark.parametrize("answered", [{}, {"metadata": None}, {"kind": "Status", "metadata": {}}])
async def test_a_write_that_is_not_answered_with_an_object_is_an_error(server: Server, answered: Any) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(answered)

    server.answer = answer
    with pytest.raises(ClusterError, match="the answer is no Pod"):
        await server.cluster.merge("v1", "Pod", "a", "p", {})
    assert server.wrote == []


def lines(*events: Any, end: bool = True) -> Answer:
    """A watch that says these, in pieces that do not care for lines."""

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


async def heard(server: Server) -> list[tuple[str, Any]]:
    return [event async for event in server.cluster.watch("v1", "Pod", "", "x=y", "10")]


async def test_a_watch_yields_its_events_however_they_are_cut_and_however_large(server: Server) -> None:
    large = {**pod("p", 11), "text": "x" * 3_000_000}
    mark = {"metadata": {"resourceVersion": "15"}}
    server.answer = lines(("ADDED", large), ("DELETED", pod("q", 12)), ("BOOKMARK", mark))
    assert await heard(server) == [("ADDED", large), ("DELETED", pod("q", 12)), ("BOOKMARK", mark)]
    query = server.asked[0].query
    assert (query["resourceVersion"], query["allowWatchBookmarks"], query["labelSelector"]) == ("10", "true", "x=y")
    assert server.asked[0].path == "/api/v1/pods"
    assert server.told == [("WATCH", "Pod", 200)]


@pytest.mark.parametrize("answer", [status(410), lines(("ERROR", {"code": 410, "message": "too old"}))])
async def test_a_version_that_is_too_old_is_told_as_410(server: Server, answer: Answer) -> None:
    server.answer = answer
    with pytest.raises(ClusterError) as caught:
        await heard(server)
    assert caught.value.status == 410


@pytest.mark.parametrize("line", ["{}", "[]", "no json", '{"type": "ERROR", "object": null}', '{"type": "ADDED"}'])
async def test_a_line_that_is_no_event_is_an_error(server: Server, line: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=line + "\n")

    server.answer = answer
    with pytest.raises(ClusterError):
        await heard(server)


@pytest.mark.parametrize("obj", [{}, {"metadata": None}, {"metadata": {"name": "p"}}])
async def test_an_object_of_no_version_is_an_error(server: Server, obj: Any) -> None:
    server.answer = lines(("ADDED", obj))
    with pytest.raises(ClusterError, match="no resourceVersion"):
        await heard(server)


async def test_a_watch_that_falls_silent_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.2)
    server.answer = lines(("ADDED", pod("p", 11)), end=False)
    with pytest.raises(ClusterError) as caught:
        await heard(server)
    assert caught.value.status == 0


async def test_a_reflector_follows_a_server_that_lists_and_watches(server: Server) -> None:
    changed: list[ServiceKey] = []
    store: Store[ServiceKey, str] = Store(
        lambda obj: obj["metadata"]["name"], lambda _: ServiceKey("a", "chat"), changed.append
    )
    server.answer = lines(("ADDED", pod("new", 11)), ("DELETED", pod("old", 12)), end=False)
    reflector = Reflector(server.cluster, "v1", "Pod", "", "", store)
    task = asyncio.create_task(reflector.run())
    async with asyncio.timeout(5):
        await reflector.filled.wait()
        while list(store.names()) != [("a", "new")]:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
