"""Fetches one engine's /metrics, within limits on time and size."""

from __future__ import annotations

import asyncio

import aiohttp

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.page import PodMetrics, parse_page

# A healthy engine's page is some 50 KiB for each data parallel rank; a pod that sends more than this is not believed.
MAX_PAGE_BYTES = 4 * 1024 * 1024
# For all of it: a server that drips a byte a second must not hold a scrape.
TIMEOUT_SECONDS = 5.0
# Reading a page of this size takes about 5 ms; a larger one is read in a thread, so that nobody waits for it.
_LARGE = 256 * 1024
_EXCERPT = 200


def open_session() -> aiohttp.ClientSession:
    """A session for `scrape`; whoever opens it closes it.

    No proxy from the environment, no cookies, and plain bytes only: a few KiB of a compressed page may be gigabytes. A
    connection for each scrape: engines close idle ones after 5 s, sooner than a large fleet comes back to them.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def scrape(session: aiohttp.ClientSession, url: str) -> PodMetrics:
    """Fetch and read one pod's page; every failure is a ScrapeError that names the address."""
    address = f"{url}/metrics"
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS), session.get(address, allow_redirects=False) as answer:
            page = await _body(address, answer)
    except TimeoutError as error:
        raise ScrapeError(f"{address}: no whole page within {TIMEOUT_SECONDS:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # What the server sent may be part of the text.
        raise ScrapeError(f"{address}: {type(error).__name__}: {str(error)[:_EXCERPT]}") from error
    text = page.decode("utf-8", errors="replace")
    try:
        return parse_page(text) if len(page) < _LARGE else await asyncio.to_thread(parse_page, text)
    except ScrapeError as error:
        raise ScrapeError(f"{address}: {error}") from error


async def _body(address: str, answer: aiohttp.ClientResponse) -> bytearray:
    if answer.status != 200:
        raise ScrapeError(f"{address}: HTTP {answer.status}")
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ScrapeError(f"{address}: the page is encoded ({encoding[:_EXCERPT]}), though plain text was asked for")
    page = bytearray()
    async for chunk in answer.content.iter_any():
        page += chunk
        if len(page) > MAX_PAGE_BYTES:
            raise ScrapeError(f"{address}: more than {MAX_PAGE_BYTES} bytes")
    return page
