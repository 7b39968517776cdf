"""When is a service memory-bound?"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.spec import Pressure
from kvpilot_operator.decide.workload import STALE_SECONDS, classify
from support.services import NOW, samples

PRESSURE = Pressure(
    high_percent=85, low_percent=50, waiting_per_replica=1, preemptions_per_minute=1, sustained_seconds=300
)


def test_a_full_cache_that_requests_wait_for_is_memory_bound():
    verdict = classify(samples(usage=0.97, waiting=3), PRESSURE, NOW)
    assert verdict.kind == "MemoryBound"
    assert "97%" in verdict.message


def test_a_full_cache_that_nobody_waits_for_is_not_memory_bound():
    assert classify(samples(usage=0.97, waiting=0), PRESSURE, NOW).kind == "Relaxed"


def test_waiting_requests_beside_a_half_empty_cache_are_not_memory_bound():
    assert classify(samples(usage=0.4, waiting=20), PRESSURE, NOW).kind == "Relaxed"


def test_pressure_that_has_not_lasted_is_not_acted_on():
    assert classify(samples(usage=0.97, waiting=3, seconds=100), PRESSURE, NOW).kind == "Warming"


def test_one_low_scrape_in_a_long_window_does_not_hide_the_pressure():
    series = list(samples(usage=0.97, waiting=3))
    series[-10] = replace(series[-10], usage=0.2)
    assert classify(series, PRESSURE, NOW).kind == "MemoryBound"


def test_old_metrics_move_nothing():
    later = NOW + timedelta(seconds=STALE_SECONDS + 1)
    assert classify(samples(usage=0.99, waiting=9), PRESSURE, later).kind == "NoMetrics"


def test_preemptions_alone_show_that_memory_binds():
    series = [replace(s, preemptions=float(i)) for i, s in enumerate(samples(usage=0.97, waiting=0))]
    assert classify(series, PRESSURE, NOW).kind == "MemoryBound"


def test_a_counter_that_restarts_from_zero_is_no_burst_of_preemptions():
    series = [replace(s, preemptions=5000.0 if i < 40 else 0.0) for i, s in enumerate(samples(usage=0.97, waiting=0))]
    assert classify(series, PRESSURE, NOW).preemptions_per_minute == 0


def test_a_pod_that_joins_with_a_history_is_no_burst_of_preemptions():
    series = [
        replace(s, pods=1 if i < 40 else 2, preemptions=0.0 if i < 40 else 900.0)
        for i, s in enumerate(samples(usage=0.97, waiting=0))
    ]
    assert classify(series, PRESSURE, NOW).preemptions_per_minute == 0


def test_demand_counts_waiting_requests_like_running_ones():
    # 4 running requests hold 3,000 tokens; 4 waiting ones would hold as many again.
    assert classify(samples(usage=1.0, waiting=4, running=4), PRESSURE, NOW).demand_tokens == 6000


def test_pressure_ends_only_below_the_low_limit_or_when_nobody_waits():
    assert classify(samples(usage=0.7, waiting=3), PRESSURE, NOW, was_bound=True).kind == "MemoryBound"
    assert classify(samples(usage=0.4, waiting=3), PRESSURE, NOW, was_bound=True).kind == "Relaxed"
    assert classify(samples(usage=0.9, waiting=0), PRESSURE, NOW, was_bound=True).kind == "Relaxed"


@given(usage=st.floats(0, 0.84), waiting=st.floats(0, 1e6))
def test_below_the_limit_nothing_is_ever_memory_bound(usage, waiting):
    assert classify(samples(usage=usage, waiting=waiting), PRESSURE, NOW).kind == "Relaxed"
