"""Scrapes of many engines run at once. Engines that hang, drip or send large pages delay none of the others."""

import asyncio
import contextlib
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvpilot_localcluster.engines.hostile_texts import REAL
from kvpilot_operator.budget import METRICS, METRICS_LINES, METRICS_STEP_LINES, METRICS_WORK_BYTES
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe import scrape as module
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServiceKey
from support.scrape_loop import ignore, scraping

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
LINE = b"vllm:num_requests_running 1\n"
USAGE = b"vllm:kv_cache_usage_perc 0.5\n"
GOOD = ServiceKey("good", "good")


class Engines:
    """Server whose behaviour depends on the path. `asked` counts requests by path, and `open` those that hang."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.open = self.most_open = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode().split("/")[1]
        self.asked[path] += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if path == "hang":
                await reader.read()
            writer.write(HEAD)
            if path == "large":
                for _ in range(64):
                    writer.write(LINE * (65536 // len(LINE)))
                    await writer.drain()
            writer.write(REAL)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def engines() -> AsyncIterator[Engines]:
    one = Engines()
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0, backlog=4096)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()


async def failed(scraper: Scraper, service: ServiceKey, url: str) -> str:
    with pytest.raises(ScrapeError) as caught:
        await scraper.scrape(service, url, ignore)
    return str(caught.value)


async def test_a_page_is_read_completely_through_a_small_buffer() -> None:
    async with engines() as served, scraping() as scraper:
        page = await scraper.scrape(GOOD, f"{served.url}/good", ignore)
    assert (page.running, page.dtype) == (8, "k4v4")


@pytest.mark.parametrize("namespaces", [1, 3, 40])
async def test_a_service_is_scraped_while_forty_others_hang(monkeypatch: pytest.MonkeyPatch, namespaces: int) -> None:
    # Engines of many namespaces together hold all permits until their scrapes time out.
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 10.0 if namespaces > 3 else 60.0)
    async with engines() as served, scraping() as scraper:
        bad = [ServiceKey(f"bad-{i % namespaces}", f"bad-{i}") for i in range(40)]
        hanging = [asyncio.create_task(failed(scraper, key, f"{served.url}/hang")) for key in bad for _ in range(10)]
        while served.open < min(METRICS.permits, namespaces * METRICS.share):
            await asyncio.sleep(0.01)
        page = await scraper.scrape(GOOD, f"{served.url}/good", ignore)
        assert page.running == 8
        assert served.most_open <= METRICS.permits + 1
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_concurrent_scrapes_of_a_namespace_are_limited() -> None:
    async with engines() as served, scraping() as scraper:
        hanging = [asyncio.create_task(failed(scraper, GOOD, f"{served.url}/hang")) for _ in range(2 * METRICS.share)]
        while served.open < METRICS.share:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert served.most_open == METRICS.share
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_a_busy_event_loop_makes_no_scrape_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)  # a fake clock, so that the machine's load does not matter

    async def busy() -> None:
        nonlocal now
        while True:
            now += 0.02  # as long as reconciles of other services take
            await asyncio.sleep(0)

    async with engines() as served, scraping() as scraper:
        other = asyncio.create_task(busy())
        keys = [ServiceKey(f"team-{i % 10}", f"model-{i}") for i in range(100)]
        pages = await asyncio.gather(
            *(scraper.scrape(key, f"{served.url}/good", ignore) for key in keys for _ in range(3))
        )
        other.cancel()
    assert {page.running for page in pages} == {8}


@pytest.mark.slow
async def test_large_pages_of_many_pods_at_once_take_little_memory() -> None:
    async with engines() as served, scraping() as scraper:
        await scraper.scrape(GOOD, f"{served.url}/good", ignore)
        tracemalloc.start()
        refused = await asyncio.gather(
            *(failed(scraper, ServiceKey("bad", f"bad-{i % 8}"), f"{served.url}/large") for i in range(8))
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert all("more than" in words or "no whole page" in words for words in refused)
    print("peak", peak)
    # Client and server share this process: 8 pages of 4 MiB are 32 MiB on each side.
    assert peak < 8 * 512 * 1024


async def answer(head: bytes, body: bytes) -> tuple[list[int], str, int]:
    """Return the cost of one scrape of a server that sends this: work, error and turns of the event loop."""
    turns, spent = 0, []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(head + body)
            await writer.drain()
            writer.close()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    counting = asyncio.create_task(count())
    words = ""
    async with scraping() as scraper:
        try:
            await scraper.scrape(GOOD, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", spent.append)
        except ScrapeError as error:
            words = str(error)
    counting.cancel()
    server.close()
    return spent, words, turns


async def test_other_tasks_run_between_two_steps_of_a_page() -> None:
    number = METRICS_LINES - 1
    spent, words, turns = await answer(HEAD, USAGE + b"\n" * (number - 1))
    assert not words
    assert spent == [number + (len(USAGE) + number - 1) // METRICS_WORK_BYTES]
    assert turns >= number // METRICS_STEP_LINES


async def test_the_work_of_reading_a_refused_page_is_counted() -> None:
    spent, words, _ = await answer(HEAD, USAGE + b"\n" * 5000 + b"vllm:num_requests_running -1\n" + b"\n" * 5000)
    assert "negative" in words
    assert 5000 < spent[0] < 5000 + METRICS_STEP_LINES + 11_000 // METRICS_WORK_BYTES


async def test_a_page_that_declares_too_many_bytes_is_not_read() -> None:
    size = METRICS.read_bytes + 1
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    spent, words, _ = await answer(head, USAGE + b"#" * (size - len(USAGE)))
    assert f"{size} bytes" in words
    assert spent == [0]
