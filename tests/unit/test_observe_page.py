"""Valid and invalid pages of vLLM's metrics.

The pages in data/ come from a real engine, reduced to the relevant lines.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpilot_formats import dtypes, formats
from kvpilot_localcluster.engines import PAGE_LATER
from kvpilot_operator import budget
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.page import MOST_REQUESTS, PageReader
from kvpilot_operator.state.snapshot import ModelFacts
from support.metrics_pages import parse_page

REAL = PAGE_LATER.read_text()

PAGE = """
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.91
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 12.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="k4v4",num_gpu_blocks="80",kv_cache_size_tokens="10240"} 1.0
"""
TTFT = """
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0"} 5.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 6.0
vllm:time_to_first_token_seconds_sum{engine="0"} 4.5
"""


def test_a_real_page_is_read_completely() -> None:
    page = parse_page(REAL)
    assert (page.running, page.waiting) == (8, 0)
    assert page.usage == pytest.approx(16 / 59)
    assert (page.capacity_tokens, page.blocks, page.dtype) == (7680, 60, "k4v4")
    assert page.process_start == pytest.approx(1795258579.8)
    assert page.model == ModelFacts(head_dim=64, kv_heads=2, layers=2, window_layers=0, mla=False)
    totals = page.totals
    assert (totals.prompt_tokens, totals.generation_tokens, totals.finished, totals.errors) == (2404, 5902, 17, 0)
    assert totals.ttft.count == 25
    # Each token except a request's first one has a time since the previous token.
    assert totals.itl.count == totals.generation_tokens - totals.ttft.count
    assert totals.generation_lengths.total == 16 * 300 + 20
    assert 0 < totals.prefill_seconds < totals.decode_seconds


def test_tokens_from_host_memory_and_from_the_gpu_are_counted_separately() -> None:
    tiers = """
vllm:prefix_cache_hits_total{engine="0"} 300.0
vllm:external_prefix_cache_hits_total{engine="0"} 500.0
vllm:external_prefix_cache_hits_total{engine="1"} 20.0
vllm:external_prefix_cache_queries_total{engine="0"} 700.0
"""
    totals = parse_page(PAGE + tiers).totals
    assert (totals.prefix_hits, totals.host_hits) == (300, 520)
    assert parse_page(PAGE).totals.host_hits == 0


def test_capacity_is_computed_from_blocks_if_tokens_are_missing() -> None:
    assert parse_page(PAGE.replace(',kv_cache_size_tokens="10240"', "")).capacity_tokens == 80 * 128


def test_only_requests_that_wait_for_capacity_count_as_waiting() -> None:
    reasons = 'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0\n'
    reasons += 'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 2.0\n'
    assert parse_page(PAGE + reasons).waiting == 1
    assert parse_page(PAGE).waiting == 3


def test_ranks_of_data_parallelism_are_one_pod() -> None:
    second = (
        PAGE.replace('engine="0"', 'engine="1"')
        .replace("0.91", "0.11")
        .replace("num_gpu_blocks", 'r="1",num_gpu_blocks')
    )
    page = parse_page(PAGE + TTFT + second + TTFT.replace('engine="0"', 'engine="1"'))
    assert page.usage == 0.91
    assert [(rank.name, rank.usage, rank.running, rank.waiting) for rank in page.ranks] == [
        ("engine 0", 0.91, 7, 3),
        ("engine 1", 0.11, 7, 3),
    ]
    assert (page.running, page.waiting, page.totals.preemptions) == (14, 6, 24)
    assert (page.capacity_tokens, page.blocks) == (20480, 160)
    assert page.totals.ttft.counts == (6, 4, 2)
    assert page.totals.ttft.total == 9


def test_errors_of_the_engine_count_as_failed_requests_and_aborts_do_not() -> None:
    ended = "".join(
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}"}} {n}\n'
        for reason, n in {"stop": 5, "length": 4, "abort": 3, "error": 2}.items()
    )
    ended += 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 6\n'
    ended += 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 7\n'
    ended += 'http_requests_total{handler="/tokenize",method="POST",status="5xx"} 8\n'
    totals = parse_page(PAGE + ended).totals
    assert (totals.finished, totals.errors, totals.server_errors) == (14, 2, 6)
    assert totals.stopped == 5


def test_the_max_tokens_of_requests_are_added_up() -> None:
    asked = "".join(f'vllm:request_params_max_tokens_sum{{engine="{rank}"}} 4096.0\n' for rank in range(2))
    assert parse_page(PAGE + asked).totals.asked_tokens == 8192


def test_metrics_missing_on_a_page_are_empty_and_not_an_error() -> None:
    page = parse_page('vllm:kv_cache_usage_perc{engine="0"} 0.5\n')
    assert (page.running, page.capacity_tokens, page.dtype, page.process_start, page.model) == (0, 0, "", None, None)
    assert page.totals.ttft.count == 0


def test_a_model_gauge_without_numbers_is_ignored() -> None:
    line = 'kvpilot_model_info{head_dim="64",kv_heads="many",layers="2",mla="false",window_layers="0"} 1.0\n'
    assert parse_page(PAGE + line).model is None


def test_calibration_hash_and_recent_window_are_read() -> None:
    lines = 'kvpilot_calibration_info{hash="0fd35bb7a1c2e394",reason="",source="self"} 1.0\n'
    lines += 'kvpilot_recent_window_info{dtype="k4v4",reason="",tokens="128"} 1.0\n'
    page = parse_page(PAGE + lines)
    assert (page.factors, page.recent_tokens) == ("0fd35bb7a1c2e394", 128)
    off = 'kvpilot_recent_window_info{dtype="k4v4",reason="ShortContext",tokens="0"} 1.0\n'
    assert parse_page(PAGE + off).recent_tokens == 0
    assert (parse_page(PAGE).factors, parse_page(PAGE).recent_tokens) == ("", None)


@pytest.mark.parametrize("told", [*dtypes.names(), *formats.VLLM_DTYPES_LEFT_OUT, ""])
def test_a_known_dtype_is_read_unchanged(told: str) -> None:
    assert parse_page(PAGE.replace('cache_dtype="k4v4"', f'cache_dtype="{told}"')).dtype == told


@given(st.integers(0))
def test_unknown_dtypes_become_one_label(number: int) -> None:
    assert parse_page(PAGE.replace('cache_dtype="k4v4"', f'cache_dtype="fp8_{number}"')).dtype == "Other"


@pytest.mark.parametrize("text", ["", "none", "-64", "65", "6e1", "9" * 400, "٦٤"])
def test_an_invalid_hash_or_window_is_ignored(text: str) -> None:
    lines = f'kvpilot_calibration_info{{hash="{text} x"}} 1.0\nkvpilot_recent_window_info{{tokens="{text}"}} 1.0\n'
    page = parse_page(PAGE + lines)
    assert (page.factors, page.recent_tokens) == ("", None)


@pytest.mark.parametrize(
    ("page", "word"),
    [
        ("", "is this a vLLM server"),
        ("<html>404</html>", "is this a vLLM server"),
        (PAGE.replace(" 7.0", ""), "not Prometheus text"),
        (PAGE.replace(" 7.0", " seven"), "not Prometheus text"),
        (PAGE.replace("0.91", "NaN"), "share"),
        (PAGE.replace("0.91", "91"), "share"),
        (PAGE.replace("0.91", "-0.1"), "share"),
        (PAGE.replace(" 7.0", " -7.0"), "negative"),
        (PAGE.replace(" 3.0", " +Inf"), "not a number"),
        (PAGE.replace(" 12.0", " NaN"), "not a number"),
        (PAGE.replace(" 3.0", f" {MOST_REQUESTS + 1}"), "impossible"),
        (PAGE + TTFT.replace(" 5.0", " 2.0"), "the bound before it"),
        (PAGE + TTFT.replace(" 5.0", " -5.0"), "negative"),
        (PAGE + TTFT.replace('le="+Inf"', 'le="2.0"'), r"\+Inf"),
        (PAGE + TTFT.replace('le="0.1"', 'le="low"'), "le"),
        (PAGE + TTFT.replace('le="0.1"', 'le="1"'), "twice"),
        (PAGE + TTFT.replace('le="0.1"', 'le="NaN"'), "le"),
        (PAGE + TTFT.replace(" 4.5", " NaN"), "_sum"),
    ],
)
def test_a_page_with_impossible_numbers_is_refused(page: str, word: str) -> None:
    with pytest.raises(ScrapeError, match=word):
        parse_page(page)


@given(st.text(max_size=200), st.sampled_from(["vllm:kv_cache_usage_perc", "vllm:num_requests_running{", ""]))
def test_any_text_is_either_read_or_refused(text: str, start: str) -> None:
    try:
        parse_page(start + text)
    except ScrapeError:
        return


@given(
    usage=st.floats(0, 1),
    waiting=st.integers(0, 10_000),
    generated=st.integers(0, 10**12),
    latencies=st.lists(st.floats(0, 20), max_size=30),
    name=st.text(max_size=20),
)
def test_text_written_by_prometheus_client_is_read_exactly(
    usage: float, waiting: int, generated: int, latencies: list[float], name: str
) -> None:
    registry = CollectorRegistry()
    labels = {"model_name": name, "engine": "0"}
    Gauge("vllm:kv_cache_usage_perc", "", labels, registry=registry).labels(**labels).set(usage)
    Gauge("vllm:num_requests_waiting", "", labels, registry=registry).labels(**labels).set(waiting)
    Counter("vllm:generation_tokens", "", labels, registry=registry).labels(**labels).inc(generated)
    itl = Histogram("vllm:inter_token_latency_seconds", "", labels, registry=registry, buckets=(0.1, 1, 10))
    for latency in latencies:
        itl.labels(**labels).observe(latency)
    page = parse_page(generate_latest(registry).decode())
    assert (page.usage, page.waiting, page.totals.generation_tokens) == (usage, waiting, generated)
    assert page.totals.itl.count == len(latencies)
    assert page.totals.itl.total == pytest.approx(sum(latencies))
    for i, (low, high) in enumerate([(-1, 0.1), (0.1, 1), (1, 10), (10, 99)] if latencies else []):
        assert page.totals.itl.counts[i] == sum(low < latency <= high for latency in latencies)


@given(
    st.lists(st.one_of(st.sampled_from(REAL.splitlines()), st.text(max_size=40)), max_size=400),
    st.integers(1, 5000),
    st.integers(1, 100),
)
def test_a_page_gives_the_same_result_in_any_chunks(lines: list[str], chunk: int, step: int) -> None:
    def read(size: int) -> object:
        reader = PageReader()
        try:
            for start in range(0, len(text), size):
                for _ in reader.steps(text[start : start + size]):
                    pass
            return reader.close()
        except ScrapeError as error:
            return str(error)

    text = "\n".join(lines).encode()
    whole = read(len(text) or 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "METRICS_STEP_LINES", step)
        assert read(chunk) == whole


def test_the_dtypes_of_ranks_are_joined_if_they_differ() -> None:
    """If the ranks' dtypes were not joined, only the dtype of the last rank would be seen."""
    config = 'vllm:cache_config_info{{cache_dtype="{}",engine="{}",num_gpu_blocks="10",block_size="16"}} 1.0\n'
    for reported, told in (
        (("k4v4", "k4v4"), "k4v4"),
        (("auto", "k4v4"), "auto+k4v4"),
        (("auto", "x" * 60, "fp8"), "auto+Other"),
    ):
        page = "".join(config.format(dtype, rank) for rank, dtype in enumerate(reported))
        assert parse_page(f"vllm:kv_cache_usage_perc 0.5\n{page}").dtype == told
