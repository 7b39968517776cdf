"""A probe yields to users: it waits for their requests for a limited time, then continues like one more user."""

import asyncio
from functools import partial

import pytest

from kvpilot_probes import session
from kvpilot_probes.codec import Baseline, BaselinePrompt
from kvpilot_probes.packs import Message, ProbePrompt
from kvpilot_probes.run import capture, measure
from kvpilot_probes.session import GiveWay, Settings
from kvpilot_probes.stats import Logprobs, Measurement
from support.metrics_pages import parse_page
from support.probe_engine import Body, Handler, Writer, counting, engine, respond
from support.scrape_loop import scraping
from support.services import KEY

PAGE = """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 90
vllm:num_requests_running{engine="0"} 7
vllm:num_requests_waiting{engine="0",model_name="a b"} %s
vllm:num_requests_waiting{engine="1",model_name="a b"} %s
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_AGAIN_SECONDS", 0.01)


def kept(prompts: int = 3) -> Baseline:
    answer = tuple(Logprobs(3 + i, {3 + i: -0.1, 9999: -3.0}) for i in range(8))
    return Baseline(
        "i", "m", "auto", tuple(BaselinePrompt(f"p{i}", "tail", "text", (1, 2, 3), answer) for i in range(prompts))
    )


def queueing(*lengths: float, asked: list[str] | None = None) -> Handler:
    """Return an engine with these queue lengths, one for each poll. The last one repeats."""
    left = list(lengths)

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if asked is not None:
            asked.append(path)
        if path != "/metrics":
            await counting(path, body, writer)
            return
        waiting = left.pop(0) if len(left) > 1 else left[0]
        respond(writer, (PAGE % (waiting, 0.0)).encode())

    return handler


async def load(page: bytes, status: str = "200 OK") -> tuple[float, float]:
    async def handler(_path: str, _body: Body, writer: Writer) -> None:
        respond(writer, page, status)

    async with engine(handler) as url, scraping() as scraper:
        return await scraper.load(KEY, url)


async def gently(handler: Handler, prompts: int, seconds: float) -> Measurement:
    """Run one measurement, which waits at most this many seconds while the engine's queue shows users."""
    async with engine(handler) as url, scraping() as scraper:
        give_way = GiveWay(partial(scraper.load, KEY, url), seconds)
        return await measure(url, "m", kept(prompts), settings=Settings(tokens=8, concurrency=1, give_way=give_way))


async def test_the_queue_is_the_sum_over_an_engines_ranks_and_no_other_metric() -> None:
    assert await load((PAGE % (3.0, 4.0)).encode()) == (7.0, 7.0)


async def test_a_probe_and_the_scraper_read_one_queue() -> None:
    page = (PAGE % (3.0, 4.0)).replace("deferred", "capacity")
    assert (await load(page.encode()))[0] == parse_page(page).waiting == 90.0


@pytest.mark.parametrize(
    ("page", "status"),
    [
        (b"", "200 OK"),
        (b"nothing here", "404 Not Found"),
        (b"vllm:num_requests_waiting\n", "200 OK"),
        (b"x" * 400_000, "200 OK"),
    ],
)
async def test_an_engine_without_a_queue_metric_counts_as_idle(page: bytes, status: str) -> None:
    assert await load(page, status) == (0.0, 0.0)


async def test_an_engine_too_busy_to_send_its_metrics_counts_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpilot_operator.observe.scrape.TIMEOUT_SECONDS", 0.05)

    async def handler(_path: str, _body: Body, _writer: Writer) -> None:
        await asyncio.sleep(5)

    async with engine(handler) as url, scraping() as scraper:
        assert await scraper.load(KEY, url) == (1.0, 1.0)


async def test_a_probe_lets_queued_users_go_first() -> None:
    asked: list[str] = []
    found = await gently(queueing(5.0, 2.0, 0.0, asked=asked), 3, 5)
    assert asked[:4] == ["/metrics", "/metrics", "/metrics", "/v1/completions"]
    assert asked.count("/metrics") == 2 + 4
    assert found.positions == 21


async def test_an_endless_queue_delays_a_probe_only_for_a_time() -> None:
    asked: list[str] = []
    found = await gently(queueing(0.0, 5.0, asked=asked), 3, 0.1)
    assert found.positions == 21
    last = len(asked) - 1 - asked[::-1].index("/metrics")
    assert asked[last + 1 :] == ["/v1/completions"] * 3  # two prompts, and the answer to show


async def test_a_starved_low_priority_probe_continues_at_normal_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpilot_probes.client.RETRY_PAUSE_SECONDS", 0.0)
    seen: list[object] = []

    async def starving(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/completions":
            seen.append(body.get("priority"))
            if "priority" in body:
                writer.close()
                return
        await counting(path, body, writer)

    async with engine(starving) as url:
        found = await measure(url, "m", kept(), settings=Settings(tokens=8, concurrency=1, priority=9))
    assert found.positions == 21
    assert seen == [9, 9, None, None, None, None]


async def test_a_capture_eventually_continues() -> None:
    prompts = [ProbePrompt("p", f"n{i}", (Message("user", "hello"),)) for i in range(3)]
    async with engine(queueing(5.0)) as url, scraping() as scraper:
        give_way = GiveWay(partial(scraper.load, KEY, url), 0.05)
        settings = Settings(tokens=8, give_way=give_way)
        captured = await capture(url, "m", prompts, identity="i", dtype="auto", settings=settings)
    assert captured.positions == 24


async def test_the_total_waiting_time_of_a_run_is_bounded() -> None:
    asked: list[str] = []
    looks = [v for _ in range(500) for v in (1.0, 1.0, 1.0, 0.0)]
    found = await gently(queueing(*looks, asked=asked), 200, 0.2)
    assert found.prompts == 200
    assert asked.count("/metrics") < 4 * 200
