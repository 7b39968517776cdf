"""/metrics with authentication: each request is reviewed, and clients that guess tokens block no others."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from kvpilot_operator.budget import TOKEN_REVIEW
from kvpilot_operator.control.http import MetricsAccess, serve_http
from kvpilot_operator.errors import ClusterError


class FakeCluster:
    """Stand-in for Cluster. It knows tokens beginning with `good` or `other`; only `good` ones may read metrics."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.away = False

    async def review(self, _version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(kind)
        if not (spec.get("token") or spec["user"]).startswith("good-at-once"):
            await self.answers.wait()
        if self.away:
            raise ClusterError("POST", "/tokenreviews", 0, "no answer")
        if kind == "TokenReview":
            known = spec["token"].startswith(("good", "other"))
            return {"authenticated": known, "user": {"username": spec["token"], "groups": ["g"]}} if known else {}
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"allowed": spec["user"].startswith("good")}


@pytest.fixture
def api() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def access(api: FakeCluster) -> MetricsAccess:
    return MetricsAccess(api)  # type: ignore[arg-type]


async def status(access: MetricsAccess, header: str, peer: str = "10.0.0.1") -> int:
    refused = await access.refusal(header, peer)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer  ", "Basic Z29vZA==", "good", "Bearerx good"])
async def test_a_header_without_a_bearer_token_is_refused_without_a_review(
    access: MetricsAccess, api: FakeCluster, header: str
) -> None:
    assert await status(access, header) == 401
    assert api.asked == []


async def test_the_token_of_each_request_is_reviewed(access: MetricsAccess, api: FakeCluster) -> None:
    for _ in range(2):
        assert await status(access, "Bearer good") == 200
        assert await status(access, "bearer other") == 403
    assert api.asked == ["TokenReview", "SubjectAccessReview"] * 4


async def test_a_failed_token_review_denies_access(access: MetricsAccess, api: FakeCluster) -> None:
    api.away = True
    assert await status(access, "Bearer good") == 503
    api.away = False
    assert await status(access, "Bearer good") == 200


async def test_a_client_that_tries_many_tokens_causes_few_reviews_at_once(
    access: MetricsAccess, api: FakeCluster
) -> None:
    api.answers.clear()
    flood = [asyncio.create_task(status(access, f"Bearer worse-{number}")) for number in range(50)]
    await turns()
    assert len(api.asked) == TOKEN_REVIEW.share
    api.answers.set()
    assert set(await asyncio.gather(*flood)) == {401}


async def test_token_reviews_of_many_clients_are_limited_too(access: MetricsAccess, api: FakeCluster) -> None:
    api.answers.clear()
    flood = [asyncio.create_task(status(access, f"Bearer bad-{n}", f"10.0.1.{n}")) for n in range(50)]
    await turns()
    assert len(api.asked) == TOKEN_REVIEW.permits
    api.answers.set()
    assert set(await asyncio.gather(*flood)) == {401}


async def turns() -> None:
    """Let every task run until it awaits an event."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def served(access: MetricsAccess) -> AsyncIterator[str]:
    runner = await serve_http("127.0.0.1", 0, CollectorRegistry(), asyncio.Event(), access)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


def client(address: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(address, 0)))


async def scraped(http: aiohttp.ClientSession, url: str, token: str) -> int:
    async with http.get(url, headers={"Authorization": f"Bearer {token}"}) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("answered", [False, True])
async def test_a_client_with_many_bad_tokens_blocks_no_other_client(
    access: MetricsAccess, api: FakeCluster, answered: bool
) -> None:
    """Send sixty scrapes with fresh tokens from one address, while eight connections from another one guess tokens."""
    numbers = itertools.count()

    async def attack(http: aiohttp.ClientSession, url: str) -> None:
        while True:
            await scraped(http, url, f"bad-{next(numbers)}")

    if not answered:
        api.answers.clear()
    async with served(access) as url, client("127.0.0.1") as bad, client("127.0.0.2") as good:
        attacks = [asyncio.create_task(attack(bad, url)) for _ in range(8)]
        try:
            while len(api.asked) < TOKEN_REVIEW.share:
                await asyncio.sleep(0)
            assert [await scraped(good, url, f"good-at-once-{number}") for number in range(60)] == [200] * 60
        finally:
            for one in attacks:
                one.cancel()
            api.answers.set()
            await asyncio.gather(*attacks, return_exceptions=True)
