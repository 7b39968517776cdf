"""Scrapes and probes reach only pods of a service's own Deployments, and follow no redirects."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvpilot_operator.cluster.objects import path_of
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.views import is_ours
from kvpilot_probes.client import EngineClient, http_client
from kvpilot_probes.errors import EngineRefused, MalformedAnswer
from support.answering_server import Server
from support.scrape_loop import ignore, scraping
from support.services import KEY

LABELS = {"kvpilot.io/service": "chat", "kvpilot.io/revision": "0a1b2c3d"}
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "chat-0a1b2c3d-5d9f", "controller": True}


def pod(*owners: dict[str, Any], labels: dict[str, str] = LABELS) -> dict[str, Any]:
    return {"metadata": {"name": "pod", "labels": labels, "ownerReferences": list(owners)}}


def test_a_pod_of_a_replica_set_of_our_deployment_is_ours() -> None:
    assert is_ours(pod(OWNER), "chat")
    assert is_ours(pod({"kind": "Node", "name": "local"}, OWNER), "chat")


@pytest.mark.parametrize(
    ("stranger", "why"),
    [
        (pod(), "made by hand with copied labels"),
        (pod(OWNER | {"name": "chat-0a1b2c3d"}), "an owner named like the Deployment itself"),
        (pod(OWNER | {"name": "chat-ffffffff-5d9f"}), "another revision's"),
        (pod(OWNER | {"name": "chatter-0a1b2c3d-5d9f"}), "another service's"),
        (pod(OWNER | {"kind": "StatefulSet"}), "a StatefulSet's of the same name"),
        (pod(OWNER | {"apiVersion": "example.org/v1"}), "a custom resource's that is called ReplicaSet"),
        (pod(OWNER | {"controller": False}), "not controlled by its owner"),
        (pod(OWNER, labels={"kvpilot.io/service": "chat"}), "without a revision"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pod_with_our_labels_and_another_owner_is_not_ours(stranger: dict[str, Any], why: str) -> None:
    assert not is_ours(stranger, "chat")


@asynccontextmanager
async def listening(elsewhere: str = "") -> AsyncIterator[Server]:
    """Serve a page without metrics, or redirect every request to the server `elsewhere`."""

    async def answer(request: web.Request) -> web.Response:
        if elsewhere:
            return web.Response(status=307, headers={"Location": f"{elsewhere}{request.path}"})
        return web.Response(text="# nothing here\n")

    async with Server.up() as server:
        server.answer = answer
        yield server


def asked(server: Server) -> list[str]:
    return [f"{request.method} {request.path}" for request in server.asked]


async def test_a_pod_cannot_send_a_scrape_elsewhere() -> None:
    async with listening() as other, listening(other.url) as engine, scraping() as scraper:
        with pytest.raises(ScrapeError, match="307"):
            await scraper.scrape(KEY, engine.url, ignore)
    assert (asked(engine), asked(other)) == (["GET /metrics"], [])


async def test_a_pod_cannot_send_a_probe_elsewhere() -> None:
    async with listening() as other, listening(other.url) as pod_of_ours, http_client() as http:
        engine = EngineClient(pod_of_ours.url, "chat", http)
        with pytest.raises(EngineRefused):
            async for _ in engine.decode([1, 2, 3], 1, 1):
                pass
    assert (asked(pod_of_ours), asked(other)) == (["POST /v1/completions"], [])


async def test_scrapes_and_probes_use_no_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as proxy, listening() as engine:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("NO_PROXY", "")
        async with scraping() as scraper:
            with pytest.raises(ScrapeError):
                await scraper.scrape(KEY, engine.url, ignore)
        async with http_client() as http:
            with pytest.raises(MalformedAnswer):
                async for _ in EngineClient(engine.url, "chat", http).decode([1, 2, 3], 1, 1):
                    pass
    assert asked(proxy) == []
    assert asked(engine) == ["GET /metrics", "POST /v1/completions"]


def test_the_operators_client_cannot_read_a_secret() -> None:
    with pytest.raises(KeyError):
        path_of("v1", "Secret", "team", "hf")
