"""Metrics identify the resource that limits a service."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpilot_operator.api.kv_cache import Pressure
from kvpilot_operator.decide.load.window import STALE_SECONDS
from kvpilot_operator.decide.load.workload import classify
from kvpilot_operator.state.samples import Flows
from support.services import NOW, samples

PRESSURE = Pressure(high_percent=85, low_percent=50, waiting_per_replica=1, sustained_seconds=300)
CHAT = Flows(seconds=5, prompt_tokens=2000, generation_tokens=1500, finished=5, prefill_seconds=0.5, decode_seconds=60)
# Prompts have 8,000 tokens, and answers have 50. Every step includes part of a prompt, so decode looks slow, although
# prefill is the limit.
RAG = Flows(
    seconds=5, prompt_tokens=160_000, generation_tokens=1000, finished=20, prefill_seconds=5, decode_seconds=250
)
EMBED = Flows(seconds=5, prompt_tokens=9000, generation_tokens=40, finished=20, prefill_seconds=3, decode_seconds=1)


def series(flows=CHAT, **gauges):
    return tuple(replace(s, flows=flows) for s in samples(**gauges))


def kind(window, **changes):
    return classify(window, PRESSURE, NOW, **changes).kind


def test_a_full_cache_with_waiting_requests_is_memory_bound():
    verdict = classify(samples(usage=0.97, waiting=3), PRESSURE, NOW)
    assert verdict.kind == "MemoryBound"
    assert "97%" in verdict.message


def test_a_full_cache_without_waiting_requests_is_not_memory_bound():
    assert kind(series(usage=0.97, waiting=0)) == "Relaxed"


def test_waiting_requests_with_a_half_empty_cache_are_compute_bound():
    verdict = classify(series(usage=0.4, waiting=20, running=256), PRESSURE, NOW)
    assert verdict.kind == "ComputeBound"
    assert "256.0 requests run on a replica" in verdict.message


@pytest.mark.parametrize("flows", [RAG, EMBED])
@pytest.mark.parametrize("usage", [0.4, 0.97])
def test_requests_that_wait_for_prompts_are_prefill_bound_with_any_cache_use(flows, usage):
    assert kind(series(flows, usage=usage, waiting=20)) == "PrefillBound"


def reused(share, flows=RAG):
    return replace(flows, prefix_queries=flows.prompt_tokens, prefix_hits=share * flows.prompt_tokens)


def test_evicted_prefixes_of_a_full_cache_are_memory_bound():
    window = samples(usage=0.97, waiting=20, seconds=900)
    window = tuple(replace(s, flows=reused(0.9 if i < 90 else 0.1)) for i, s in enumerate(window))
    verdict = classify(window, PRESSURE, NOW)
    assert verdict.kind == "MemoryBound"
    assert "held 90% before" in verdict.message
    assert verdict.demand_tokens >= 2 * verdict.capacity_tokens


@pytest.mark.parametrize(("capacity", "memory"), [(1_000_000, True), (100_000_000, False)])
def test_prefixes_count_as_evicted_only_if_the_windows_tokens_could_overwrite_the_cache(capacity, memory):
    window = samples(usage=0.5, waiting=0.2, seconds=900)
    window = tuple(
        replace(s, flows=reused(0.9 if i < 90 else 0.1), capacity_tokens=capacity) for i, s in enumerate(window)
    )
    verdict = classify(window, PRESSURE, NOW)
    assert (verdict.memory, verdict.kind) == (memory, "Relaxed")


def test_prefixes_that_went_to_host_memory_and_are_loaded_from_there_are_not_evicted():
    offloaded = replace(reused(0.1), host_hits=0.8 * RAG.prompt_tokens)
    window = samples(usage=0.97, waiting=20, seconds=900)
    window = tuple(replace(s, flows=reused(0.9) if i < 90 else offloaded) for i, s in enumerate(window))
    verdict = classify(window, PRESSURE, NOW)
    assert "evicted" not in verdict.message
    assert verdict.kind == kind(series(reused(0.9), usage=0.97, waiting=20, seconds=900))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_prompts_that_were_never_reused_do_not_show_evictions(share):
    assert kind(series(reused(share), usage=0.97, waiting=20, seconds=900)) == "PrefillBound"


# Sessions have 15,000 tokens. The full cache has evicted their prefixes, so every turn computes its prompt again.
AGENTS = Flows(
    seconds=5, prompt_tokens=90_000, generation_tokens=1700, finished=7, prefill_seconds=5, decode_seconds=250
)
# The values of a simulated H200 at its limit (kvpilot backtest, Llama-3-8B).
CROWDED = Flows(
    seconds=5, prompt_tokens=84_000, generation_tokens=12_000, finished=37, prefill_seconds=8, decode_seconds=1050
)


@pytest.mark.parametrize("flows", [AGENTS, CROWDED])
def test_a_full_cache_is_memory_bound_if_prompts_do_not_fill_the_steps(flows):
    assert kind(series(flows, usage=0.97, waiting=20)) == "MemoryBound"


def test_the_size_of_a_full_step_follows_from_the_engines_arguments():
    assert kind(series(AGENTS, usage=0.97, waiting=20), step_tokens=2048) == "PrefillBound"


def test_pressure_shorter_than_sustained_seconds_is_not_acted_on():
    assert kind(samples(usage=0.97, waiting=3, seconds=100)) == "Warming"
    assert kind(series(usage=0.4, waiting=30, seconds=100)) == "Warming"


def test_an_intermittent_queue_with_a_roomy_cache_limits_nothing():
    window = [replace(s, waiting=40.0 if i % 10 == 0 else 0.0) for i, s in enumerate(series(usage=0.4, waiting=0))]
    assert kind(window) == "Relaxed"


def test_a_queue_with_a_sometimes_full_cache_is_not_compute_bound():
    window = [replace(s, usage=0.70 if i % 5 == 0 else 0.97) for i, s in enumerate(series(usage=0.97, waiting=9))]
    assert kind(window) == "Warming"


def test_a_service_with_hardly_any_requests_is_idle():
    assert kind(series(Flows(), usage=0.0, waiting=0, running=0.05)) == "Idle"


def test_one_low_scrape_in_a_long_window_does_not_hide_the_pressure():
    window = list(samples(usage=0.97, waiting=3))
    window[-10] = replace(window[-10], usage=0.2)
    assert kind(window) == "MemoryBound"


def test_old_metrics_are_not_judged():
    later = NOW + timedelta(seconds=STALE_SECONDS + 1)
    assert classify(samples(usage=0.99, waiting=9), PRESSURE, later).kind == "NoMetrics"


def test_preemptions_alone_are_memory_bound():
    assert kind(series(Flows(seconds=5.0, preemptions=1.0), usage=0.97, waiting=0)) == "MemoryBound"


def test_preemptions_are_counted_per_replica():
    rare = Flows(seconds=40.0, preemptions=0.5)  # the sum over 8 replicas
    window = [replace(s, pods=8) for s in series(rare, usage=0.97, waiting=0)]
    verdict = classify(window, PRESSURE, NOW)
    assert "0.8 preemptions a minute" in verdict.message
    assert verdict.kind == "Relaxed"


def test_if_the_time_of_a_request_is_unknown_all_waiting_requests_count_as_demand():
    # 4 running requests hold 3,000 tokens, so the 4 waiting requests would need 3,000 more.
    assert classify(samples(usage=1.0, waiting=4, running=4), PRESSURE, NOW).demand_tokens == 6000


def test_demand_counts_the_requests_that_must_run_to_drain_the_queue_in_two_minutes():
    # A request takes 12 s. If 100 wait, 10 more concurrent requests empty the queue in two minutes.
    flows = Flows(seconds=5, finished=5, generation_tokens=100, prefill_seconds=6, decode_seconds=54)
    verdict = classify(series(flows, usage=1.0, waiting=100, running=20), PRESSURE, NOW)
    assert verdict.demand_tokens == 4500


def test_pressure_ends_below_low_percent_or_when_no_request_waits():
    assert kind(samples(usage=0.7, waiting=3), was_bound=True) == "MemoryBound"
    assert kind(samples(usage=0.4, waiting=3), was_bound=True) != "MemoryBound"
    assert kind(samples(usage=0.9, waiting=0), was_bound=True) == "Relaxed"


def test_gaps_between_scrapes_do_not_count_as_sustained_pressure():
    window = [s for s in samples(usage=0.97, waiting=9) if not 20 < (NOW - s.time).total_seconds() < 290]
    assert kind(window) == "Warming"


def test_scrapes_of_too_few_pods_give_no_verdict():
    blind = [replace(s, pods=1, unanswered=2) for s in samples(usage=0.97, waiting=9)]
    assert kind(blind) == "NoMetrics"
    doubted = [replace(s, implausible=("chat-1: why", "chat-2: why")) for s in samples(usage=0.97, waiting=9)]
    verdict = classify(doubted, PRESSURE, NOW)
    assert verdict.kind == "NoMetrics"
    assert "chat-1" in verdict.message


def test_unanswered_pods_are_assumed_to_have_the_load_of_the_others():
    window = [
        replace(s, pods=3, unanswered=1, capacity_tokens=9000, running=30.0) for s in series(usage=0.5, waiting=0)
    ]
    verdict = classify(window, PRESSURE, NOW)
    assert (verdict.pods, verdict.capacity_tokens, verdict.demand_tokens, verdict.running) == (4, 12_000, 6000, 40.0)


def test_a_load_is_calm_only_with_metrics_of_every_pod_for_the_whole_time_and_no_queue():
    quiet = series(usage=0.2, waiting=0, seconds=600)
    assert classify(quiet, PRESSURE, NOW).calm
    assert not classify(quiet, PRESSURE, NOW, calm_seconds=900).calm
    assert not classify(series(usage=0.2, waiting=0.8, seconds=600), PRESSURE, NOW).calm
    assert not classify([replace(s, unanswered=1, pods=3) for s in quiet], PRESSURE, NOW).calm
    assert not classify([s for s in quiet if not 50 < (NOW - s.time).total_seconds() < 300], PRESSURE, NOW).calm
    assert not classify(series(usage=0.6, waiting=0, seconds=600), PRESSURE, NOW).calm


def test_the_peak_of_the_calm_time_is_remembered():
    quiet = list(series(usage=0.2, waiting=0, seconds=600))
    quiet[3] = replace(quiet[3], usage=0.45, pods=2)
    assert classify(quiet, PRESSURE, NOW).peak_load == pytest.approx(0.9)


def test_a_new_replica_starts_a_new_window_of_measurement():
    window = series(usage=0.97, waiting=9)
    grown = [replace(s, pods=2) if (NOW - s.time).total_seconds() < 100 else s for s in window]
    assert kind(grown) == "Warming"
    shrunk = [replace(s, pods=1 if (NOW - s.time).total_seconds() < 100 else 2, waiting=9.0) for s in window]
    assert kind(shrunk) == "MemoryBound"


def test_the_rate_of_a_replica_is_its_best_rate_before_the_queue():
    before = replace(CHAT, finished=10)
    window = [
        replace(s, flows=before if (NOW - s.time).total_seconds() > 300 else CHAT)
        for s in series(usage=0.97, waiting=9, seconds=900)
    ]
    verdict = classify(window, PRESSURE, NOW)
    assert (verdict.requests_per_second, verdict.best_requests_per_second) == (1.0, 2.0)


@given(usage=st.floats(0, 0.84), waiting=st.floats(0, 1e6), flows=st.sampled_from([Flows(), CHAT, RAG, EMBED]))
def test_a_service_below_high_percent_is_never_memory_bound(usage, waiting, flows):
    assert kind(series(flows, usage=usage, waiting=waiting)) != "MemoryBound"


COUNTS = st.integers(0, 3)
GAUGES = st.floats(0, 1e9)


@given(
    st.lists(st.tuples(COUNTS, COUNTS, COUNTS, st.floats(0, 1), GAUGES, GAUGES, st.integers(0, 10**9)), max_size=30),
    st.booleans(),
    st.integers(0, 200),
)
@example([(1, 0, 0, 1.0, 5e-324, 1.0, 1)], False, 0)
@example([(1, 0, 0, 0.0, 5e-324, 1.0, 0)], False, 0)
def test_any_series_of_samples_is_judged_without_an_error(rows, was_bound, spacing):
    window = [
        replace(
            s, time=NOW - timedelta(seconds=spacing * (len(rows) - i)), pods=pods, implausible=("x: y",) * doubted,
            unanswered=unanswered, usage=usage, running=running, waiting=waiting, capacity_tokens=capacity,
        )
        for i, (s, (pods, doubted, unanswered, usage, running, waiting, capacity)) in enumerate(
            zip(samples(usage=0, waiting=0), rows, strict=False)
        )
    ]  # fmt: skip
    verdict = classify(window, PRESSURE, NOW, was_bound=was_bound)
    assert verdict.message
    trusted = [s for s in window if s.pods and s.pods >= 2 * (len(s.implausible) + s.unanswered)]
    if len(trusted) < 2:
        assert verdict.kind not in ("MemoryBound", "PrefillBound", "ComputeBound")
        assert not verdict.calm
