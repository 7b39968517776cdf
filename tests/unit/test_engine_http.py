"""Every part of an engine's HTTP answer has a limit: interim answers, headers, chunk extensions and trailers."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes.client import EngineClient, http_client, served_models
from kvpilot_probes.engine_http import AROUND_A_BYTE, HEAD_BYTES, INTERIM_ANSWERS
from kvpilot_probes.errors import EngineUnreachable
from support.scrape_loop import ignore, scraping

KEY = ServiceKey("models", "chat")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
PAGE = b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 8\n"
ENDLESS = {
    "interim answers": lambda: itertools.repeat(CONTINUE * 500),
    "a few interim answers at a time": lambda: itertools.repeat(CONTINUE),
    "interim answers with heads": lambda: itertools.repeat(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 100),
    "headers": lambda: itertools.chain([OK], (b"X-%d: %s\r\n" % (n, b"a" * 4000) for n in itertools.count())),
    "one header": lambda: itertools.chain([OK, b"X: "], itertools.repeat(b"a" * 4000)),
    "trailers": lambda: itertools.chain(
        [CHUNKED, b"%x\r\n%s\r\n0\r\n" % (len(PAGE), PAGE)], (b"X-%d: a\r\n" % n for n in itertools.count())
    ),
    "one trailer": lambda: itertools.chain([CHUNKED, b"0\r\nX: "], itertools.repeat(b"a" * 4000)),
    "a chunk extension": lambda: itertools.chain([CHUNKED, b"1;x="], itertools.repeat(b"a" * 4000)),
}


@asynccontextmanager
async def serving(answer: Iterable[bytes]) -> AsyncIterator[str]:
    """Send these pieces to any client until they end or the client stops reading."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in answer:
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("kind", ENDLESS)
async def test_a_scrape_ends_at_endless_headers_or_interim_answers(kind: str) -> None:
    async with serving(ENDLESS[kind]()) as url, scraping() as scraper:
        with pytest.raises(ScrapeError) as caught:
            await scraper.scrape(KEY, url, ignore)
    assert "no whole page within" not in str(caught.value)


@pytest.mark.parametrize("kind", ENDLESS)
async def test_a_probe_ends_at_endless_headers_or_interim_answers(kind: str) -> None:
    async with serving(ENDLESS[kind]()) as url, http_client() as http, asyncio.timeout(60):
        with pytest.raises(EngineUnreachable):
            await served_models(url, http)
        with pytest.raises(EngineUnreachable):
            async for _ in EngineClient(url, "m", http).decode([1], 8, 1):
                pass


@pytest.mark.parametrize("interim", range(INTERIM_ANSWERS + 2))
async def test_a_few_interim_answers_are_skipped(interim: int) -> None:
    answer = [CONTINUE * interim, OK, b"Content-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE)]
    async with serving(answer) as url, scraping() as scraper:
        if interim <= INTERIM_ANSWERS:
            assert (await scraper.scrape(KEY, url, ignore)).running == 8
        else:
            with pytest.raises(ScrapeError, match=f"more than {INTERIM_ANSWERS} interim answers"):
                await scraper.scrape(KEY, url, ignore)


async def test_a_page_in_chunks_of_one_byte_with_trailers_is_read() -> None:
    page = PAGE + b"# \n" * 10_000
    pieces = [CHUNKED, *(b"1\r\n%c\r\n" % byte for byte in page), b"0\r\nX-Time: 1\r\n\r\n"]
    assert len(pieces[1]) - 1 <= AROUND_A_BYTE
    assert len(page) > HEAD_BYTES / AROUND_A_BYTE
    async with serving([b"".join(pieces)]) as url, scraping() as scraper:
        assert (await scraper.scrape(KEY, url, ignore)).running == 8


async def test_the_error_about_an_engines_answer_names_the_exceeded_limit() -> None:
    async with serving(ENDLESS["one trailer"]()) as url, http_client() as http:
        with pytest.raises(aiohttp.ClientError, match="bytes around a body of 0"):
            async with http.get(url) as response:
                await response.read()
