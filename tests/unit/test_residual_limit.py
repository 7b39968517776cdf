"""Limit on the share of a cache that is read at 8 bits: its bounds, and how fast it falls and rises with the load."""

import sys
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy.residual_limit import FAST, FULL, SLOW, Limit
from benchmarks.accuracy.residual_pool import FLOOR, Case, Elastic, Pool, simulate
from kvpilot_cli.backtest.batch import Limits, Request
from kvpilot_cli.backtest.costs import load_profile

seconds = st.floats(0.0, 1000.0)
history = st.lists(st.tuples(seconds, st.integers(1, 100_000)), max_size=20)


def after(steps, objective=0.06):
    limit = Limit(objective)
    for took, count in steps:
        limit = limit.after(took, count)
    return limit


@given(history, st.floats(0.001, 10.0))
def test_the_share_of_the_cache_at_8_bits_is_between_0_and_1(steps, objective):
    assert 0.0 <= after(steps, objective).share <= 1.0


@given(history, history, st.tuples(seconds, st.integers(1, 100_000)), seconds)
def test_a_longer_step_never_raises_the_share_at_8_bits(before, later, step, more):
    took, count = step
    short, long = (after([*before, (took + extra, count), *later]).share for extra in (0.0, more))
    assert long <= short + 1e-9


@given(history, seconds, st.integers(1, 1000), st.integers(1, 1000))
def test_a_run_of_equal_steps_changes_the_share_like_the_same_steps_in_two_parts(before, took, first, second):
    start = after(before)
    together, apart = start.after(took, first + second), start.after(took, first).after(took, second)
    assert together.fast == pytest.approx(apart.fast, abs=1e-9)
    assert together.slow == pytest.approx(apart.slow, abs=1e-9)


@given(history)
def test_fast_steps_raise_the_share_to_1_and_steps_at_the_latency_objective_lower_it_to_0(before):
    assert after([*before, (FULL * 0.06 * 0.99, 30 * SLOW)]).share == 1.0
    assert after([*before, (0.06, FAST)]).share == 0.0


def test_the_share_at_8_bits_falls_at_once_and_rises_slowly():
    calm = after([(0.01, SLOW)])
    assert calm.share == 1.0
    busy = calm.after(0.06, FAST)
    assert busy.share == 0.0
    long = calm.after(0.06, SLOW)
    assert long.after(0.01, 2 * FAST).share == 0.0
    assert long.after(0.01, 4 * SLOW).share == 1.0


def test_one_long_prefill_does_not_lower_the_share_at_8_bits():
    assert after([(0.01, SLOW), (0.2, 1)]).share == 1.0


@pytest.mark.parametrize(("took", "share"), [(0.01, 0.75), (0.06, 2 * FLOOR * 64 / 1280)])
def test_the_newest_blocks_are_read_at_8_bits_under_any_limit(took, share):
    engine = Elastic(load_profile(), Limits(), inf, Limit(0.06).after(took, SLOW))
    for number in range(2):
        engine.decoding.add(Request(number, 0.0, 640, 64, computed=640))
    engine.blocks.share = 0.75
    assert engine.share == pytest.approx(share)


def test_an_engine_measures_its_decoding_steps():
    engine = Elastic(load_profile(), Limits(), inf, Limit(0.06))
    engine.submit(Request(0, 0.0, 640, 500))
    engine.advance(10.0)
    assert engine.steps == 500
    step = engine.costs.decode_step(1, 900)
    assert step * 0.8 < engine._limit.fast < step


@pytest.mark.parametrize(("firm", "floor"), [(FLOOR, 1.0), (1, 0.5), (0, 0.0)])
def test_only_residuals_that_are_marked_firm_may_take_the_pages_of_cached_prefixes(firm, floor):
    engine = Elastic(load_profile(), Limits(), inf, firm=firm)
    pool: Pool = engine.blocks
    pool.take(pool.total)
    pool.give(pool.total, 7, pool.total)
    for number in range(10):
        engine.running[number] = Request(number, 0.0, 64, 64)
    pool.take(0)
    assert pool.floor == pytest.approx(floor)
    assert pool.kept(7) == pool.total - 10 * firm


def test_the_limit_keeps_requests_in_time_that_would_be_late_with_all_blocks_at_8_bits():
    """Check one row of the page: at this load, an engine without the limit loses more than half of its requests."""
    plain, limited = (simulate(load_profile(), Case("agents", 0.8, row)) for row in ("k4v4", "elastic-limit"))
    assert limited["good"] >= 0.98 * plain["good"]
