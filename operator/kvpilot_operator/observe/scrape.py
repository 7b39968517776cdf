"""Fetches one engine's /metrics, within limits on time and size."""

from __future__ import annotations

import asyncio

import httpx

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.page import PodMetrics, parse_page

# A healthy engine's page is some 50 KiB for each data parallel rank; a pod that sends more than this is not believed.
MAX_PAGE_BYTES = 4 * 1024 * 1024
TIMEOUT_SECONDS = 5.0


async def scrape(client: httpx.AsyncClient, url: str) -> PodMetrics:
    """Fetch and read one pod's page; every failure is a ScrapeError that names the address."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS), client.stream("GET", f"{url}/metrics") as answer:
            if answer.status_code != 200:
                raise ScrapeError(f"{url}/metrics: HTTP {answer.status_code}")
            page = bytearray()
            async for chunk in answer.aiter_bytes():
                page += chunk
                if len(page) > MAX_PAGE_BYTES:
                    raise ScrapeError(f"{url}/metrics: more than {MAX_PAGE_BYTES} bytes")
    except (httpx.HTTPError, TimeoutError) as error:
        raise ScrapeError(f"{url}/metrics: {type(error).__name__}: {error}") from error
    try:
        return await asyncio.to_thread(parse_page, page.decode("utf-8", errors="replace"))
    except ScrapeError as error:
        raise ScrapeError(f"{url}/metrics: {error}") from error
