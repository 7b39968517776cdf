"""vLLM's page of metrics, sound and otherwise."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.metrics import combine, parse_page

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


def test_the_current_names_are_read():
    metrics = parse_page(PAGE)
    assert (metrics.usage, metrics.running, metrics.waiting, metrics.preemptions) == (0.91, 7, 3, 12)
    assert (metrics.capacity_tokens, metrics.dtype) == (10240, "k4v4")


def test_the_old_name_of_the_usage_is_read_and_said():
    metrics = parse_page(PAGE.replace("kv_cache_usage_perc", "gpu_cache_usage_perc"))
    assert metrics.usage_name == "vllm:gpu_cache_usage_perc"
    assert metrics.usage == 0.91


def test_capacity_comes_from_blocks_where_tokens_are_not_given():
    metrics = parse_page(PAGE.replace(',kv_cache_size_tokens="10240"', ""))
    assert metrics.capacity_tokens == 80 * 128


@pytest.mark.parametrize(
    ("page", "word"),
    [
        ("", "is this a vLLM server"),
        ("<html>404</html>", "not Prometheus text"),
        (PAGE.replace("0.91", "NaN"), "share"),
        (PAGE.replace("0.91", "91"), "share"),
        (PAGE.replace(" 7.0", " -7.0"), "negative"),
        (PAGE.replace(" 3.0", " +Inf"), "not a number"),
    ],
)
def test_a_page_that_cannot_be_true_is_refused(page, word):
    with pytest.raises(ScrapeError, match=word):
        parse_page(page)


def test_use_is_weighted_by_capacity_and_counts_add_up():
    big = parse_page(PAGE)
    small = parse_page(PAGE.replace("10240", "2560").replace("0.91", "0.11"))
    sample = combine(datetime(2026, 1, 1, tzinfo=UTC), [big, small])
    assert sample.capacity_tokens == 12800
    assert sample.usage == pytest.approx((0.91 * 4 + 0.11) / 5)
    assert sample.waiting == 6
