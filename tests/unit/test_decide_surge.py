"""A surge adds replicas within a minute. Their number follows from the arrival rate and a replica's throughput."""

from bisect import bisect_left
from dataclasses import replace
from datetime import timedelta

import pytest

from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.decide.load.saturation import learned
from kvpilot_operator.decide.load.surge import Surge, find
from kvpilot_operator.decide.load.workload import classify
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.state.decision import ObjectiveResult
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample
from kvpilot_operator.state.status import Saturation
from support.policy_inputs import policy_input, spec, step, workload
from support.services import NOW

PRESSURE = spec().kv_cache.pressure
BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
TTFT, ITL = Objective("TTFT", 99, 5000), Objective("ITL", 95, 60)
SURGE = Surge("the queue grows", arrivals=20.0, waiting=0.0)


def took(*parts):
    """Return a histogram of pairs (seconds, requests)."""
    counts = [0.0] * (len(BOUNDS) + 1)
    for seconds, count in parts:
        counts[bisect_left(BOUNDS, seconds)] += count
    return Histogram(BOUNDS, tuple(counts))


def scrapes(in_hand, finished=5.0, *, pods=1, every=15, ttft=None, itl=None):
    """Return one replica's scrapes up to NOW, from its in-flight requests. `finished` requests end each second."""
    return [
        Sample(
            NOW - timedelta(seconds=every * back), pods, 0.2, number, 0.0, 1_000_000 * pods, "auto",
            Flows(
                seconds=every * pods, finished=finished * every * pods, generation_tokens=1000.0 * every,
                decode_seconds=10.0 * every, ttft=ttft or Histogram(), itl=itl or Histogram(),
            ),
        )
        for back, number in zip(range(len(in_hand) - 1, -1, -1), in_hand, strict=True)
    ]  # fmt: skip


CALM, RISING = [10.0] * 20, [10.0] * 17 + [80.0, 200.0, 330.0]


def test_a_growing_queue_is_a_surge_long_before_the_window_is_over():
    assert find(scrapes(CALM), PRESSURE, (TTFT,)) is None
    assert find(scrapes(RISING), PRESSURE, (TTFT,)) is not None


def test_without_objectives_there_is_no_surge():
    assert find(scrapes(RISING), PRESSURE, ()) is None


def test_a_few_more_requests_are_not_a_surge():
    assert find(scrapes([1.0] * 17 + [1.0, 2.0, 4.0], finished=0.05), PRESSURE, (TTFT,)) is None


def test_a_queue_that_stopped_growing_is_not_a_surge():
    assert find(scrapes([10.0] * 10 + [330.0] * 10), PRESSURE, (TTFT,)) is None


def test_late_requests_of_a_draining_queue_are_not_a_surge():
    late, draining = took((0.4, 90), (8.0, 10)), [330.0] * 17 + [240.0, 120.0, 30.0]
    assert find(scrapes(CALM, ttft=late), PRESSURE, (TTFT,)) is not None
    assert find(scrapes(draining, ttft=late), PRESSURE, (TTFT,)) is None


def test_the_arrival_rate_is_extrapolated_by_its_growth():
    surge = find(scrapes(RISING), PRESSURE, (TTFT,))
    # In 45 s the requests in flight grow by 320, and 5 finish each second. So 12.1 arrive each second, 7.1 more than
    # before. The growth continues for 300 s.
    assert surge.arrivals == pytest.approx(12.1 + 7.1 * 300 / 180, rel=0.02)


def test_a_minute_with_as_many_late_requests_as_the_whole_window_may_have_is_a_surge():
    late, well = took((0.03, 700), (0.4, 300)), took((0.03, 800), (0.4, 200))
    assert "ITL p95" in find(scrapes(CALM, itl=late), PRESSURE, (ITL,)).message
    assert find(scrapes(CALM, itl=well), PRESSURE, (ITL,)) is None
    assert "TTFT p99" in find(scrapes(CALM, ttft=took((0.4, 90), (8.0, 10))), PRESSURE, (TTFT,)).message
    assert find(scrapes(CALM, ttft=took((0.4, 97), (8.0, 3))), PRESSURE, (TTFT,)) is None


def test_one_late_half_minute_is_not_a_surge():
    late, well = took((0.4, 1000)), took((0.03, 1000))
    window = scrapes(CALM, itl=well)
    window[-1] = replace(window[-1], flows=replace(window[-1].flows, itl=late))
    assert find(window, PRESSURE, (ITL,)) is None


def test_a_new_or_unobserved_replica_shows_no_surge():
    window = scrapes(RISING)
    assert find(window[-2:], PRESSURE, (TTFT,)) is None
    assert find([*window[:-1], replace(window[-1], unanswered=1)], PRESSURE, (TTFT,)) is None
    assert find([*window[:-1], replace(window[-1], pods=2)], PRESSURE, (TTFT,)) is None
    assert find(scrapes(RISING, every=60), PRESSURE, (TTFT,)) is None


def test_a_short_window_detects_no_surge():
    quick = spec(kvCache={"mode": "Auto", "pressure": {"sustainedSeconds": 120}}).kv_cache.pressure
    assert find(scrapes(RISING), quick, (TTFT,)) is None


def test_the_workload_has_the_surge_and_the_best_rate_of_a_replica():
    w = classify(scrapes(RISING), PRESSURE, NOW, objectives=(TTFT,))
    assert w.surge is not None
    assert w.best_requests_per_second == pytest.approx(5.0)


def surging(replicas=1, **changes):
    w = workload("Relaxed", pods=replicas, surge=SURGE, best_requests_per_second=6.0, **changes)
    return policy_input(w, spec=spec(scaling={"maxReplicas": 8}))


def test_a_surge_adds_replicas_for_the_forecast_up_to_four_or_double():
    assert step(choose_step(surging(1))) == ("ScaleOut", "auto", 4)
    assert step(choose_step(surging(3))) == ("ScaleOut", "auto", 4)
    assert choose_step(surging(3)).reason == "Surge"
    flood = replace(SURGE, arrivals=1000.0)
    for replicas, most in ((1, 5), (3, 7), (6, 12)):
        s = surging(replicas)
        s = replace(s, spec=spec(scaling={"maxReplicas": 20}), workload=replace(s.workload, surge=flood))
        assert step(choose_step(s)) == ("ScaleOut", "auto", most)


def test_a_surge_with_memory_pressure_adds_replicas_too():
    s = surging(2)
    bound = replace(s, workload=replace(s.workload, kind="MemoryBound"))
    assert step(choose_step(bound)) == ("ScaleOut", "auto", 4)


def test_in_a_surge_with_evicted_prefixes_replicas_are_doubled():
    assert step(choose_step(surging(4, memory=True))) == ("ScaleOut", "auto", 8)


def test_while_replicas_load_more_are_requested_only_if_the_loading_ones_are_not_enough():
    s = replace(surging(1), replicas_changed=NOW - timedelta(seconds=15), ready=1)
    assert step(choose_step(replace(s, replicas=2))) == ("ScaleOut", "auto", 4)
    assert choose_step(replace(s, replicas=4)).reason == "Busy"


def test_a_surge_beside_a_canary_waits_for_it():
    assert choose_step(replace(surging(3), busy="k4v4 is on trial")).reason == "Busy"


def test_a_trial_that_a_surge_may_abort_does_not_delay_new_replicas():
    busy = replace(surging(3), busy="k4v4 is on trial", yields=True)
    assert step(choose_step(busy)) == ("ScaleOut", "auto", 4)
    assert choose_step(replace(busy, replicas=4, ready=4)).reason == "Busy"
    assert choose_step(replace(busy, workload=replace(busy.workload, surge=None, kind="ComputeBound"))).reason == "Busy"


def test_a_surge_that_max_replicas_keeps_from_being_served_is_reported():
    decision = choose_step(replace(surging(8)))
    assert (decision.chosen.action, decision.hold) == ("Stay", None)
    assert "maxReplicas" in decision.message


def test_a_surge_does_not_lower_a_recorded_rate_of_similar_requests():
    known = (Saturation(dtype="auto", requests_per_hour=36_000, mean_prompt=100, mean_generation=100),)
    w = workload("Relaxed", surge=SURGE, best_requests_per_second=1.0, mean_prompt=100.0, mean_generation=100.0)
    assert learned(known, w, "auto")[0].requests_per_hour == 36_000
    assert learned(known, replace(w, surge=None), "auto")[0].requests_per_hour == 3600


def test_a_surge_keeps_the_record_of_a_memory_shortage():
    known = (Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=100, mean_generation=100, memory=True),)
    w = workload("Relaxed", surge=SURGE, best_requests_per_second=2.0, mean_prompt=100.0, mean_generation=100.0)
    (seen,) = learned(known, replace(w, objectives=(ObjectiveResult(TTFT, "Held", 1.0),)), "auto")
    assert (seen.requests_per_hour, seen.memory) == (7200, True)


def test_records_for_faster_scale_ins_are_made_only_with_objectives():
    w = workload("MemoryBound", memory=True, best_requests_per_second=1.0, best_computed_prompt=50.0)
    (seen,) = learned((), w, "auto")
    assert (seen.requests_per_hour, seen.computed_prompt, seen.memory) == (3600, None, None)
    (seen,) = learned((), replace(w, objectives=(ObjectiveResult(TTFT, "Held", 1.0),)), "auto")
    assert (seen.requests_per_hour, seen.computed_prompt, seen.memory) == (3600, 50, True)
