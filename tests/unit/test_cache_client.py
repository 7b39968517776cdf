"""The cache's HTTP client, with a loopback server that gives the good and bad answers of API servers."""

import posixpath
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from kvpilot_operator.cluster.objects import Ref, path_of
from kvpilot_operator.errors import BadName, ClusterError, Conflict, NotFound, Rejected, Throttled
from support.answering_server import Answer, Server, pod, status


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server.up() as one:
        yield one


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
async def test_each_refusal_of_the_server_has_its_error_type(
    server: Server, answer: Answer, error: type[ClusterError], code: int
) -> None:
    server.answer = answer
    with pytest.raises(ClusterError) as caught:
        await server.cluster.get(Ref("v1", "Pod", "a", "p"))
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
async def test_a_refused_write_names_the_faulty_fields(
    server: Server, answer: Answer, reason: str, causes: tuple[tuple[str, str], ...]
) -> None:
    server.answer = answer
    with pytest.raises(Rejected) as caught:
        await server.cluster.merge(Ref("v1", "Service", "a", "s"), {})
    assert (caught.value.reason, caught.value.causes) == (reason, causes)
    assert server.wrote == []


async def test_a_write_with_another_objects_uid_is_a_conflict(server: Server) -> None:
    server.answer = refusal(422, reason="Invalid", message="m", details={"causes": OTHER_UID})
    with pytest.raises(Conflict):
        await server.cluster.merge(Ref("v1", "Service", "a", "s"), {"metadata": {"uid": "u"}})


async def test_a_delete_request_carries_the_objects_uid(server: Server) -> None:
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({})

    server.answer = answer
    await server.cluster.delete(Ref("v1", "Service", "a", "s"), uid="u-1")
    await server.cluster.delete(Ref("v1", "Service", "a", "s"))
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
async def test_an_answer_that_is_not_an_object_is_an_error(server: Server, answer: Answer) -> None:
    server.answer = answer
    with pytest.raises(ClusterError):
        await server.cluster.get(Ref("v1", "Pod", "a", "p"))


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../../../../../../api/v1/configmaps", "a/b", "a?b=c", "a#b", "%2e%2e", "A", "a..b", "a\n", "ä", ""],
)
async def test_no_request_is_sent_for_an_invalid_name(server: Server, name: str) -> None:
    with pytest.raises(BadName, match="is not a name of a Pod"):
        await server.cluster.find(Ref("v1", "Pod", "a", name))
    with pytest.raises(BadName):
        await server.cluster.delete(Ref("v1", "Pod", "a", name))
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": name}}
    with pytest.raises(BadName):
        await server.cluster.apply(manifest)
    assert server.asked == []


@given(st.text(max_size=40) | st.text("a.-/%A", max_size=12))
def test_no_name_can_lead_to_a_path_outside_its_collection(name: str) -> None:
    collection = path_of("v1", "ConfigMap", "a")
    try:
        path = path_of("v1", "ConfigMap", "a", name)
    except BadName as error:
        assert len(str(error)) < 500
        return
    assert posixpath.normpath(path) == path
    assert posixpath.dirname(path) == collection
    assert URL(f"http://host{path}").path == path


async def test_the_callback_is_called_after_every_write(server: Server) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(pod("p", 5))

    server.answer = answer
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": "p"}}
    await server.cluster.apply(manifest, subresource="status")
    await server.cluster.merge(Ref("v1", "Pod", "a", "p"), {})
    await server.cluster.create(manifest)
    await server.cluster.delete(Ref("v1", "Pod", "a", "p"))
    server.answer = status(404)
    await server.cluster.delete(Ref("v1", "Pod", "a", "p"))
    server.answer = status(500)
    with pytest.raises(ClusterError):
        await server.cluster.apply(manifest)
    assert server.wrote == [("Pod", "a", "p", pod("p", 5))] * 3 + [("Pod", "a", "p", None)] * 2
    assert server.asked[0].path == path_of("v1", "Pod", "a", "p") + "/status"
    assert server.asked[0].headers["Content-Type"] == "application/apply-patch+yaml"
    assert all(request.query["timeout"] == "15000ms" for request in server.asked)
