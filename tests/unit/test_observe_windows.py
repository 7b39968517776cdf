"""Samples are evenly spaced and reach as far back as the spec needs, up to a bound. Merging loses no increments."""

import gc
import math
import random
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.decide.rollout.comparison import between
from kvpilot_operator.observe.pod_metrics import PodMetrics, Totals
from kvpilot_operator.observe.windows import SampleRetention, Windows, retention_of
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.snapshot import ModelFacts
from support.services import KEY, manifest, spec_of

T0 = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
PAGE = PodMetrics(0.5, 8, 2, 16_000, 1000, "auto", process_start=0.0)
LLAMA = ModelFacts(head_dim=128, kv_heads=8, layers=32, window_layers=0, mla=False)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def page(i: int, **changes: float) -> PodMetrics:
    """Return page number `i`. Each scrape adds ten requests, all with a first token after half a second."""
    first = Histogram((0.1, 1.0), (0, 10 * i, 0), 5.0 * i)
    counted = replace(
        PAGE, totals=Totals(prompt_tokens=1000 * i, finished=10 * i, ttft=first, generation_lengths=first)
    )
    return replace(counted, **changes)  # type: ignore[arg-type]


def scraped(count: int, seconds: float, look_back: SampleRetention) -> tuple[Sample, ...]:
    windows = Windows(KEY)
    windows.retention = look_back
    for i in range(count):
        windows.add("r1", at(seconds * i), {"a": page(i)})
    return windows.samples()["r1"]


def test_samples_are_kept_as_far_back_as_the_spec_needs() -> None:
    by_default = retention_of(spec_of(manifest()), trial=True)
    assert (by_default.near, by_default.far) == (600, 60 + 3600)
    assert by_default.bucket == 300 / 24
    patient = retention_of(spec_of(manifest(kvCache={"pressure": {"sustainedSeconds": 86_400}})), trial=True)
    assert (patient.near, patient.far, patient.bucket) == (86_400, 86_400, 45)
    slow = manifest(
        canary={"steps": [{"weightPercent": 5, "holdSeconds": 7200}, {"weightPercent": 50, "holdSeconds": 0}]}
    )
    assert retention_of(spec_of(slow), trial=True).far >= 7200


@pytest.mark.parametrize("sustained", [5, 60, 300, 3600, 20_000])
def test_the_pressure_window_has_evenly_spaced_samples_without_gaps(sustained: int) -> None:
    look_back = retention_of(spec_of(manifest(kvCache={"pressure": {"sustainedSeconds": sustained}})), trial=True)
    series = scraped(2 * sustained // 5 + 40, 5, look_back)
    window = [s for s in series if s.time >= series[-1].time - timedelta(seconds=sustained)]
    assert (window[-1].time - window[0].time).total_seconds() >= 0.9 * sustained - 5
    steps = [(b.time - a.time).total_seconds() for a, b in pairwise(window)]
    assert max(steps) < 60
    assert len(window) >= min(24, sustained // 5)


@pytest.mark.parametrize(("hold", "sustained", "calm"), [(30, 10, 20), (600, 300, 600), (3600, 5, 0)])
def test_a_traffic_step_is_judged_by_the_same_requests_until_it_is_judged_again(
    hold: int, sustained: int, calm: int
) -> None:
    canary = {"steps": [{"weightPercent": 50, "holdSeconds": hold}], "warmUpSeconds": 5}
    pressure, scaling = {"sustainedSeconds": sustained}, {"scaleDownStabilizationSeconds": calm}
    spec = spec_of(manifest(canary=canary, kvCache={"pressure": pressure}, scaling=scaling))
    windows = Windows(KEY)
    windows.retention = retention_of(spec, trial=True)
    for i in range(min(8 * hold, hold + spec.canary.progress_deadline_seconds) // 5):
        windows.add("r1", at(5 * i), {"a": page(i)})
        judged = max(1, 5 * i // hold)
        end = hold * 2 ** int(math.log2(judged))
        if 5 * i >= end:
            found = between(windows.samples()["r1"], at(0), at(end))
            assert sum(s.flows.finished for s in found) >= 0.85 * 10 * (end // 5 - 1)
            assert len(found) >= min(26, end // 5 - 1)


def test_samples_older_than_the_longest_window_are_dropped() -> None:
    series = scraped(2000, 5, SampleRetention(near=300, far=900, bucket=12.5))
    assert 900 - 60 <= (series[-1].time - series[0].time).total_seconds() <= 900


@settings(max_examples=40, deadline=None)
@given(
    near=st.floats(5, 5000),
    times=st.floats(1, 20),
    buckets=st.integers(4, 100),
    every=st.floats(0.5, 60),
    count=st.integers(1, 400),
)
def test_increments_are_merged_and_never_lost(
    near: float, times: float, buckets: int, every: float, count: int
) -> None:
    look_back = SampleRetention(near, near * times, near / buckets)
    series = scraped(count, every, look_back)
    assert len(series) <= buckets + 4 + 2 * 32 * math.log(times) + 2
    assert [s.time for s in series] == sorted(s.time for s in series)
    if count * every < look_back.far:
        assert sum(s.flows.finished for s in series) == 10 * (count - 1)
        assert sum(s.flows.ttft.count for s in series) == 10 * (count - 1)
        assert sum(s.flows.seconds for s in series) == pytest.approx(every * (count - 1))


@pytest.mark.parametrize("running", [8, 1e6])
def test_the_newest_scrape_of_a_bucket_gives_the_dtype(running: float) -> None:
    """The dtype counts even if the page is implausible: in the second case, more requests run than there are blocks."""
    windows = Windows(KEY)
    windows.retention = SampleRetention(bucket=1000.0)
    windows.add("r", at(0), {"p": page(1)})
    for i in range(1, 6):
        windows.add("r", at(5 * i), {"p": page(1, running=running, dtype="fp8")})  # type: ignore[arg-type]
    (sample,) = windows.samples()["r"]
    assert (sample.pods, sample.observed_dtype) == (1, "fp8")


def test_gauges_of_merged_scrapes_are_averaged() -> None:
    windows = Windows(KEY)
    windows.retention = SampleRetention(near=600, far=600, bucket=60)
    for i, usage in enumerate((0.2, 0.4, 0.9)):
        windows.add("r1", at(i * 5), {"a": page(i, usage=usage, waiting=3 * i)})
    [sample] = windows.samples()["r1"]
    assert sample.usage == pytest.approx(0.5)
    assert sample.waiting == pytest.approx(3)
    assert sample.time == at(10)
    assert sample.flows.prompt_tokens == 2000


def test_a_scrape_without_plausible_pods_does_not_dilute_the_others() -> None:
    windows = Windows(KEY)
    windows.retention = SampleRetention(near=600, far=600, bucket=300)
    for i in range(12):
        windows.add("r1", at(i * 5), {"a": page(i, running=0, usage=0.9) if i > 3 else page(i)})
    [sample] = windows.samples()["r1"]
    assert (sample.pods, sample.usage, sample.running) == (1, 0.5, 8)
    assert "while nothing runs" in sample.implausible[0]


def test_a_pod_that_is_plausible_again_counts_from_then_on() -> None:
    windows = Windows(KEY)
    windows.retention = SampleRetention(near=600, far=600, bucket=300)
    for i in range(12):
        windows.add("r1", at(i * 5), {"a": page(i, running=0, usage=0.9) if i < 11 else page(i)})
    [sample] = windows.samples()["r1"]
    assert (sample.pods, sample.usage, sample.running, sample.time) == (1, 0.5, 8, at(55))


def test_an_implausible_pod_is_reported_even_if_no_other_pod_answers() -> None:
    windows = Windows(KEY)
    for i in range(12):
        windows.add("r1", at(i * 5), {"a": page(i, running=0, usage=0.9)})
    last = windows.samples()["r1"][-1]
    assert (last.pods, len(last.implausible)) == (0, 1)


def test_samples_are_kept_per_revision_and_dropped_with_its_deployment() -> None:
    windows = Windows(KEY)
    for revision in ("r1", "r2"):
        windows.add(revision, at(0), {"a": PAGE})
    windows.keep_only({"r2"})
    assert set(windows.samples()) == {"r2"}


def test_without_a_canary_histograms_are_kept_only_in_the_pressure_window() -> None:
    windows = (SampleRetention(near=300, far=1200, bucket=12.5, pressure=100, trial=trial) for trial in (True, False))
    later = SampleRetention(near=300, far=1200, bucket=12.5, pressure=100, trial=False)
    assert sum(s.flows.ttft.count for s in scraped(300, 5, later)) == 0
    with_, without = (scraped(60, 5, look_back) for look_back in windows)
    for one, other in zip(with_, without, strict=True):
        assert other == replace(one, flows=other.flows)
        assert other.flows.finished == one.flows.finished
        recent = with_[-1].time - one.time <= timedelta(seconds=100)
        assert one.flows.ttft.count > 0 or one is with_[0]
        assert other.flows.generation_lengths == (one.flows.generation_lengths if recent else Histogram())


def test_after_the_clock_is_set_back_no_sample_is_in_the_future(caplog: pytest.LogCaptureFixture) -> None:
    windows = Windows(KEY)
    windows.retention = SampleRetention(near=100, far=1200, bucket=5)
    for i in range(60):
        windows.add("r1", at(5 * i), {"a": page(i)})
    for i in range(60, 63):
        windows.add("r1", at(5 * i - 200), {"a": page(i)})
    series = windows.samples()["r1"]
    assert series[-1].time == at(110)
    assert [s.time for s in series] == sorted(s.time for s in series)
    assert series[-3].flows.finished == 0  # the previous page lies in the future, so this page counts as the first one
    assert series[-1].flows.finished == 10
    assert len([r for r in caplog.records if "set back" in r.getMessage()]) == 1


def test_the_model_is_the_one_that_most_pods_report() -> None:
    windows = Windows(KEY)
    assert windows.model() is None
    liar = replace(PAGE, model=replace(LLAMA, head_dim=7))
    honest = replace(PAGE, model=LLAMA)
    windows.add("r1", at(0), {"a": liar, "b": honest, "c": honest, "d": PAGE})
    assert windows.model() == LLAMA


@pytest.mark.parametrize(("trial", "limit"), [(False, 95), (True, 330)])
def test_a_busy_service_with_the_default_spec_stays_below_its_memory_limit(trial: bool, limit: int) -> None:
    """2,000 services, few of them with a canary, must fit in 512 MiB together with the operator itself."""
    rng = random.Random(0)
    bounds = tuple(float(i) for i in range(22))
    tokens, requests = [0] * 23, [0] * 23
    windows = Windows(KEY)
    windows.retention = retention_of(spec_of(manifest()), trial=trial)

    def scrape(i: int) -> None:
        for _ in range(50):  # ten requests a second with 200 tokens each
            tokens[min(22, int(rng.expovariate(0.3)))] += 200
            requests[min(22, int(rng.expovariate(0.1)))] += 1
        itl, ttft = (Histogram(bounds, tuple(counts), rng.random() + i) for counts in (tokens, requests))
        lengths = Histogram(bounds[:17], tuple(requests[:18]), 1000 * i)
        totals = Totals(
            preemptions=5 * i,
            prompt_tokens=900 * i,
            generation_tokens=9000 * i,
            prefix_queries=900 * i,
            prefix_hits=300 * i,
            host_hits=90 * i,
            finished=50 * i,
            prefill_seconds=0.3 * i,
            decode_seconds=0.7 * i,
            ttft=ttft,
            itl=itl,
            generation_lengths=lengths,
        )
        windows.add("r1", at(5 * i), {"a": replace(PAGE, usage=rng.random(), totals=totals)})

    tracemalloc.start()
    for i in range(760):
        scrape(i)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(windows.samples()["r1"]) > 50
    assert used < limit * 1024
