"""Error rates of the test that compares canary and stable, by simulation with fixed seeds."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from statistics import NormalDist

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st

from kvpilot_operator.decide.intervals import QUANTILE, log_quantile, share_change, student
from kvpilot_operator.decide.rollout.comparison import compare
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample
from support.model_engines import flows
from support.services import NOW, manifest, spec_of

# Default bucket bounds of vLLM 0.32, in seconds.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
SCRAPE = timedelta(seconds=5)


def load(rng: np.random.Generator, scrapes: int, *, swing: float = 0.25, memory: float = 0.8) -> Sequence[float]:
    """Return a log-normal load that drifts around 1. `memory` is the correlation of successive scrapes."""
    drift = [rng.standard_normal()]
    for _ in range(scrapes - 1):
        drift.append(memory * drift[-1] + (1 - memory**2) ** 0.5 * rng.standard_normal())
    return [float(np.exp(swing * z - swing**2 / 2)) for z in drift]


def scrapes(
    rng: np.random.Generator,
    requests: int,
    loads: Sequence[float],
    *,
    slow: float = 1.0,
    failing: float = 0.002,
    first: float = 0.35,
    spread: float = 0.6,
    between: float = 0.03,
    bounds: Sequence[float] = TTFT,
) -> tuple[Sample, ...]:
    """Return samples with about `requests` requests, distributed over scrapes by their loads.

    Under a higher load requests are slower. All tokens of one scrape have the pace of one batch.
    """
    made = [Sample(NOW, 1, 0.5, 4.0, 0.0, 1000, "auto")]
    for i, now in enumerate(loads):
        count = int(rng.poisson(requests / len(loads) * now))
        ttft = first * slow * now**0.5 * np.exp(spread * rng.standard_normal(count))
        tokens = rng.geometric(1 / 40, count)
        pace = between * slow * now**0.5 * np.exp(0.1 * rng.standard_normal())
        itl = pace * np.exp(0.25 * rng.standard_normal(int(tokens.sum())))
        made.append(
            Sample(
                NOW + SCRAPE * (i + 1), 1, 0.5, 4.0 * now, 0.0, 1000, "auto",
                Flows(
                    seconds=5.0,
                    generation_tokens=float(tokens.sum()),
                    finished=float(count),
                    failed=float(rng.binomial(count, failing)),
                    prefill_seconds=float(ttft.sum()),
                    decode_seconds=float(itl.sum()),
                    ttft=histogram(ttft, bounds),
                    itl=histogram(itl, ITL),
                    generation_lengths=Histogram((), (float(count),), float(tokens.sum())),
                ),
            )
        )  # fmt: skip
    return tuple(made)


def histogram(values: np.ndarray, bounds: Sequence[float]) -> Histogram:
    """Return the count of values in each bucket."""
    counts = np.bincount(np.searchsorted(bounds, values), minlength=len(bounds) + 1)
    return Histogram(tuple(bounds), tuple(float(c) for c in counts), float(values.sum()))


def span(count: int) -> tuple[datetime, datetime]:
    """Return start and end of the window that this many scrapes cover."""
    return NOW, NOW + SCRAPE * count


LIMITS = spec_of(manifest()).canary
LENGTH = 60


def judged(seed, *, requests=1000, slow=1.0, alpha=0.025, failing=0.002, apart=False, length=LENGTH, **both):
    rng = np.random.default_rng(seed)
    loads = load(rng, length)
    stable = scrapes(rng, requests, loads, **both)
    canary = scrapes(rng, requests, load(rng, length) if apart else loads, slow=slow, failing=failing, **both)
    return compare(stable, canary, LIMITS, *span(length), alpha)


def outcomes(runs, **case):
    return Counter(judged(seed, **case).outcome for seed in range(runs))


def test_a_canary_equal_to_stable_is_not_called_slower():
    assert outcomes(100, requests=400)["Failed"] == 0
    assert outcomes(40, requests=400, apart=True)["Failed"] <= 1


@pytest.mark.slow
def test_a_canary_exactly_at_the_limit_rarely_passes_and_rarely_fails():
    """If 2.5% of verdicts are wrong, the probability of 12 or more wrong ones in 200 is 1 in 500."""
    for apart in (False, True):
        seen = outcomes(200, slow=1.1, requests=400, apart=apart)
        assert seen["Failed"] <= 11
        assert seen["Passed"] <= 11


def test_a_regression_of_30_percent_is_found_in_1000_requests():
    seen = outcomes(40, slow=1.3)
    assert seen["Failed"] >= 38
    assert seen["Passed"] == 0


def test_a_regression_within_one_wide_bucket_is_found():
    assert outcomes(20, slow=1.3, first=0.14, spread=0.15)["Failed"] >= 19


def test_a_canary_equal_to_stable_passes_after_enough_requests_and_time():
    assert outcomes(20, requests=6000, length=240)["Passed"] >= 15


def test_a_canary_with_more_failed_requests_fails():
    verdict = judged(1, failing=0.06, requests=2000, slow=1.0)
    assert (verdict.outcome, verdict.reason) == ("Failed", "ErrorsIncreased")
    assert "points" in verdict.message


def test_a_step_with_fewer_requests_than_min_requests_is_inconclusive():
    verdict = judged(1, requests=60, slow=3.0)
    assert (verdict.outcome, verdict.reason) == ("Inconclusive", "TooFewSamples")
    assert "100" in verdict.message


def test_an_idle_canary_is_inconclusive():
    verdict = compare(steady(), (), LIMITS, *span(20), 0.025)
    assert verdict.outcome == "Inconclusive"


def steady(slow=1.0, requests=200.0, count=20, **changes):
    base = scrapes(np.random.default_rng(0), 100, [1.0] * count)
    made = [replace(s, flows=replace(flows(requests, slow), **changes)) for s in base[1:]]
    return (base[0], *made)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"decode_seconds": 1200.0}, "PerformanceRegressed"),
        ({"failed": 20.0}, "ErrorsIncreased"),
    ],
)
def test_a_failure_names_the_figure_that_failed(changed, reason):
    verdict = compare(steady(), steady(**changed), LIMITS, *span(20), 0.025)
    assert (verdict.outcome, verdict.reason) == ("Failed", reason)


def cached(share, slow=1.0, requests=30.0, **changes):
    """Return a side whose caches held this share of its prompt tokens; `slow` is the factor on prefill alone."""
    prefill = {name: getattr(flows(requests, slow), name) for name in ("ttft", "prefill_seconds")}
    return steady(requests=requests, prefix_queries=1000.0, prefix_hits=1000.0 * share, **prefill, **changes)


def test_a_cold_prefix_cache_is_not_a_regression_before_1000_requests():
    warm = cached(0.6)
    cold = compare(warm, cached(0.1, slow=2.0), LIMITS, *span(20), 0.025)
    assert (cold.outcome, cold.reason) == ("Inconclusive", "TooFewSamples")
    assert "10% of the canary's prompt tokens and 60% of the stable side's" in cold.message
    for slow in (cached(0.55, slow=2.0), cached(0.1, slow=2.0, requests=60.0)):
        found = compare(warm, slow, LIMITS, *span(20), 0.025)
        assert (found.outcome, found.reason) == ("Failed", "PerformanceRegressed")
        assert "TTFT" in found.message.partition(" is clearly worse")[0]


def test_a_cold_prefix_cache_excuses_neither_slow_decoding_nor_failed_requests():
    for changed, reason in (
        ({"itl": flows(30.0, 2.0).itl}, "PerformanceRegressed"),
        ({"failed": 9.0}, "ErrorsIncreased"),
    ):
        found = compare(cached(0.6), cached(0.1, **changed), LIMITS, *span(20), 0.025)
        assert (found.outcome, found.reason) == ("Failed", reason)


def test_a_canary_that_is_fast_enough_passes_with_a_cold_cache():
    fast = steady(slow=0.5, requests=30.0, prefix_queries=1000.0, prefix_hits=100.0)
    assert compare(cached(0.6), fast, LIMITS, *span(20), 0.025).outcome == "Passed"


def test_a_faster_canary_passes_with_its_change_in_percent():
    verdict = compare(steady(), steady(slow=0.7), LIMITS, *span(20), 0.025)
    assert verdict.outcome == "Passed"
    assert verdict.itl_p95_change_percent == pytest.approx(-30, abs=3)


def test_engines_with_different_buckets_are_compared_by_common_bounds():
    finer = tuple(sorted({*TTFT, 0.15, 0.35, 3.0}))
    rng = np.random.default_rng(3)
    loads = load(rng, LENGTH)
    stable, canary = scrapes(rng, 1000, loads), scrapes(rng, 1000, loads, slow=1.5, bounds=finer)
    assert compare(stable, canary, LIMITS, *span(LENGTH), 0.025).outcome == "Failed"


def test_engines_without_a_bucket_in_common_are_an_error():
    strange = Histogram((0.33, 0.77), (50.0, 100.0, 50.0), 90.0)
    verdict = compare(steady(), steady(ttft=strange), LIMITS, *span(20), 0.025)
    assert (verdict.outcome, verdict.reason) == ("Error", "TooFewSamples")


def test_a_canary_does_not_pass_while_one_side_lacks_a_figure():
    verdict = compare(steady(), steady(itl=Histogram()), LIMITS, *span(20), 0.025)
    assert verdict.outcome == "Inconclusive"
    assert "ITL p95 not known" in verdict.message


def test_answers_of_one_token_have_no_time_between_tokens_to_compare():
    short = {"itl": Histogram(), "generation_lengths": Histogram((), (200.0,), 200.0)}
    verdict = compare(steady(**short), steady(**short), LIMITS, *span(20), 0.025)
    assert verdict.outcome == "Passed"
    assert "ITL" not in verdict.message


def test_scrapes_before_the_window_and_after_it_do_not_count():
    late = span(20)[0] + SCRAPE * 10
    slow_start = (*steady(slow=3.0)[:10], *steady()[10:])
    verdict = compare(steady(), slow_start, LIMITS, late, span(20)[1], 0.025)
    assert "TTFT p95 +0%" in verdict.message


def test_the_verdict_reports_the_load_of_both_sides():
    assert "running a pod" in judged(2).message


@example(0.9995, 4)
@given(st.floats(0.9, 0.9995), st.integers(4, 1000))
def test_our_quantiles_of_students_t_equal_scipys(level, freedom):
    # The expansion is least accurate at level 0.9995 and 4 degrees of freedom: 1.3% too small.
    assert student(level, freedom) == pytest.approx(scipy.stats.t.ppf(level, freedom), rel=0.014)


def wilson(hits, n, alpha):
    interval = scipy.stats.binomtest(hits, n).proportion_ci(1 - 2 * alpha, method="wilson")
    return hits / n, interval.low, interval.high


SHARES = st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(SHARES, SHARES, st.floats(0.0005, 0.1))
def test_shares_are_compared_by_newcombes_tenth_method_over_scipys_intervals(ours, theirs, alpha):
    (c, c_low, c_high), (s, s_low, s_high) = wilson(*ours, alpha), wilson(*theirs, alpha)
    found = share_change(ours, theirs, alpha)
    assert found.value == pytest.approx(c - s)
    assert found.low == pytest.approx(c - s - math.hypot(c - c_low, s_high - s), abs=1e-9)
    assert found.high == pytest.approx(c - s + math.hypot(c_high - c, s - s_low), abs=1e-9)


@pytest.mark.parametrize("spread", [0.3, 0.6, 1.0])
def test_a_p95_read_from_vllms_buckets_is_near_the_true_one(spread):
    law = NormalDist(math.log(0.4), spread)
    rng = np.random.default_rng(5)
    read = log_quantile(histogram(np.exp(law.mean + spread * rng.standard_normal(200_000)), TTFT), QUANTILE)
    assert read == pytest.approx(law.inv_cdf(QUANTILE), abs=0.09)


def test_an_interval_for_the_p95_covers_the_true_change_as_often_as_it_should():
    """A 95% interval should miss the true change in 5% of runs. Allow 10% of 150, for buckets and a drifting load."""
    outside = 0
    runs = 150
    for seed in range(runs):
        verdict = judged(seed, slow=1.3, requests=600)
        text = next(part for part in verdict.message.split("; ") if "TTFT p95 " in part and "limit" in part)
        low, high = (float(word.strip("(+%")) for word in text.split("(")[1].split(", limit")[0].split(" to "))
        outside += not low <= 30 <= high
    assert outside <= 0.1 * runs


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8), st.floats(0.01, 0.99))
def test_a_quantile_rises_with_its_share(counts, q):
    h = Histogram(tuple(0.1 * 2**i for i in range(len(counts) - 1)), tuple(map(float, counts)), 1.0)
    if h.count:
        assert log_quantile(h, q / 2) <= log_quantile(h, q)


@given(st.floats(0.5, 2.0), st.integers(100, 5000))
def test_a_canary_measured_beyond_the_limit_never_passes(slow, requests):
    verdict = compare(steady(), steady(slow=slow, requests=requests / 20), LIMITS, *span(20), 0.025)
    if slow > 1.12:
        assert verdict.outcome != "Passed"
    if slow < 1.05:
        assert verdict.outcome != "Failed"


def test_a_comparison_without_samples_is_inconclusive():
    assert compare((), (), LIMITS, NOW, NOW + SCRAPE, 0.05).outcome == "Inconclusive"
    empty = tuple(replace(s, flows=Flows()) for s in steady())
    assert compare(empty, empty, LIMITS, *span(20), 0.05).outcome == "Inconclusive"
