"""Malformed pages and streams reach the real scraper and prober over sockets.

Each of them leads to a typed error, soon, with little memory and a short message.
"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_localcluster.engines.faulty import Engine
from kvpilot_operator.budget import METRICS, METRICS_LINE_BYTES, METRICS_LINES
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe import page, scrape
from kvpilot_probes import packs, run
from kvpilot_probes.errors import MalformedAnswer, ProbeTimeout
from kvpilot_probes.session import Settings
from support.metrics_pages import parse_page
from support.probe_engine import engine, respond, tokens_of
from support.scrape_loop import ignore, scraping
from support.services import KEY

FINE = "vllm:kv_cache_usage_perc 0.5\n"
CONFIG = 'vllm:cache_config_info{{cache_dtype="{}",num_gpu_blocks="{}",block_size="{}"}} 1\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def answering(chunk: bytes, *, first: bytes = b"", times: int = 1, pause: float = 0.0):
    """Serve `first` and then the chunk this many times for every request, and close the connection."""

    async def handler(_path, _body, writer):
        writer.write(first)
        for _ in range(times):
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(pause)

    return handler


async def refusal(handler) -> str:
    """Return the scraper's error for a server. No server may occupy the scraper for ever."""
    async with asyncio.timeout(10 * scrape.TIMEOUT_SECONDS), engine(handler) as url, scraping() as scraper:
        with pytest.raises(ScrapeError) as caught:
            await scraper.scrape(KEY, url, ignore)
    assert len(str(caught.value)) < 700
    assert url in str(caught.value)
    return str(caught.value)


async def test_a_slowly_dripping_page_is_given_up_at_the_deadline():
    assert "no whole page within" in await refusal(answering(b"#", first=HEAD + b"\r\n", times=100, pause=0.5))


async def test_slowly_dripping_headers_are_given_up_at_the_deadline():
    assert "no whole page within" in await refusal(answering(b"x", first=HEAD + b"X-Drip: ", times=100, pause=0.5))


async def test_an_endless_page_is_given_up_at_the_size_limit():
    assert "bytes" in await refusal(answering(b"x" * 65536, first=HEAD + b"\r\n", times=10_000))


async def test_a_page_that_declares_gigabytes_and_sends_none_is_an_error():
    await refusal(answering(HEAD + b"Content-Length: 9999999999\r\n\r\n"))


async def test_an_encoded_page_is_refused_unread():
    assert "encoded" in await refusal(answering(HEAD + b"Content-Encoding: gzip\r\n\r\n" + b"\x1f\x8b" + b"x" * 1000))


async def test_a_redirect_is_not_followed():
    elsewhere = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/metrics\r\nContent-Length: 0\r\n\r\n"
    assert "HTTP 302" in await refusal(answering(elsewhere))


@pytest.mark.parametrize(
    "start",
    [b"\x00\xff garbage \r\n\r\n", b"HTTP/1.1 banana\r\n\r\n", HEAD + b"x" * 500_000 + b"\r\n\r\n", b""],
    ids=["binary", "status", "header of half a megabyte", "nothing"],
)
async def test_an_answer_that_is_not_http_is_a_short_error(start):
    await refusal(answering(start))


def with_buckets(number: int) -> str:
    name = "vllm:time_to_first_token_seconds_bucket"
    return FINE + "".join(f'{name}{{le="{i}.0"}} {i}\n' for i in range(number)) + f'{name}{{le="+Inf"}} {number}\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (FINE + CONFIG.format("x" * 64, 1, 16), "cache_dtype"),
        (FINE + CONFIG.format("auto", 10**14, 10**14), "capacity"),
        (FINE + "vllm:prompt_tokens_total 1e300\n" * 2, "vllm:prompt_tokens_total"),
        (FINE + "vllm:request_prefill_time_seconds_sum -1e300\n", "vllm:request_prefill_time_seconds_sum"),
        (with_buckets(page.MOST_BUCKETS + 1), "bounds"),
        (FINE + 'vllm:time_to_first_token_seconds_bucket{le="' + "0" * 9_999 + '1"} 1\n', "characters"),
        ("vllm:kv_cache_usage_perc " + "9" * 1_000_000 + "x\n", "a line of more than"),
    ],
    ids=["dtype", "capacity", "counter", "sum", "buckets", "bound", "number"],
)
def test_impossible_figures_are_refused_with_a_short_error(text, named):
    with pytest.raises(ScrapeError, match=named) as caught:
        parse_page(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (FINE + "# HELP x y\n" * (METRICS.read_bytes // 11), "bytes"),
        (FINE * (METRICS_LINES + 1), "lines"),
        (FINE + "\n" * (METRICS_LINES + 1), "lines"),
        (f"vllm:kv_cache_usage_perc{{{'a' * METRICS_LINE_BYTES}}} 0.5", "a line of more than"),
        (f'vllm:kv_cache_usage_perc{{a="{"b" * METRICS_LINE_BYTES}"}} 0.5', "a line of more than"),
    ],
    ids=["bytes", "lines that are wanted", "lines", "a label's name", "a label's value"],
)
def test_a_page_beyond_its_budget_is_refused(text, named):
    with pytest.raises(ScrapeError, match=named):
        parse_page(text)


@pytest.mark.parametrize("long", [f"# HELP {'x' * 3 * METRICS_LINE_BYTES}"])
def test_a_long_line_is_refused_at_any_place_in_the_page(long):
    for text in (f"{long}\n{FINE}", f"{FINE}{long}"):
        with pytest.raises(ScrapeError, match=f"a line of more than {METRICS_LINE_BYTES} bytes"):
            parse_page(text)


_NAMES = st.sampled_from(sorted(name.decode() for name in page.WANTED))
_VALUES = st.sampled_from(["0", "1", "0.5", "-1", "NaN", "+Inf", "1e308", "1_000", "", "x", "9" * 400]) | st.text()
_LABELS = st.sampled_from(["", '{le="+Inf"}', '{le="1"}', '{le="NaN"}', '{engine="0"', '{a="\\"}', "{}"]) | st.text()


@given(st.lists(st.tuples(_NAMES, _LABELS, _VALUES), max_size=8))
def test_any_page_is_either_read_or_refused(lines):
    text = FINE + "\n".join(f"{name}{labels} {value}" for name, labels, value in lines)
    try:
        found = parse_page(text)
    except ScrapeError as error:
        assert len(str(error)) < 8000
    else:
        assert 0 <= found.usage <= 1


async def probed(handler, seconds: float):
    """Capture a baseline from this server within this many seconds."""
    prompt = packs.ProbePrompt(pack="p", name="n", messages=(packs.Message("user", "Say something."),))
    settings = Settings(deadline_seconds=seconds)
    async with engine(handler) as url:
        await run.capture(url, "m", [prompt], identity="i", dtype="auto", settings=settings)


def after_tokenize(chunk: bytes, *, times: int = 1, pause: float = 0.0):
    talk = answering(chunk, first=HEAD + b"\r\n", times=times, pause=pause)

    async def handler(path, body, writer):
        if path == "/tokenize":
            respond(writer, tokens_of(body))
        else:
            await talk(path, body, writer)

    return handler


@pytest.mark.parametrize(
    "handler",
    [
        answering(b"", pause=30),
        after_tokenize(b"", pause=30),
        after_tokenize(b": still there\n\n", times=100, pause=0.2),
    ],
    ids=["at once", "at the first token", "but for a sign of life now and then"],
)
async def test_a_probe_of_an_engine_that_hangs_ends_at_its_deadline(handler):
    async with asyncio.timeout(10):
        with pytest.raises(ProbeTimeout):
            await probed(handler, 1.0)


async def test_an_endless_answer_to_a_probe_is_cut_off_by_its_size_long_before_the_deadline():
    with pytest.raises(MalformedAnswer, match="more bytes than"):
        await probed(after_tokenize(b": noise\n" * 8192, times=100_000), 60.0)


def test_the_test_engine_without_a_model_has_plausible_metrics():
    found = parse_page(Engine("k4v4", "m").page().decode())
    assert (found.dtype, found.capacity_tokens, found.usage, found.running) == ("k4v4", 16_000, 0.0, 0)
