"""Latency objectives: percentiles from buckets, the reaction to a missed objective, and savings while one is met."""

import json
import math
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.api.words import ObjectiveState
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.load.objectives import judge_objectives
from kvpilot_operator.decide.load.workload import classify
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.observe.windows import retention_of
from kvpilot_operator.state.decision import ObjectiveResult
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample
from support.crd import status_faults
from support.policy_inputs import denied, policy_input, spec, step, workload
from support.services import NOW, manifest, running, samples, spec_of

BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5)
TTFT = Objective("TTFT", 95, 500)
ITL = Objective("ITL", 95, 50)


def at(seconds: float, count: float = 10) -> Histogram:
    """Return a histogram of `count` observations that are all equal to `seconds`."""
    counts = [0.0] * (len(BOUNDS) + 1)
    counts[sum(bound < seconds for bound in BOUNDS)] = count
    return Histogram(BOUNDS, tuple(counts), seconds * count)


def window(*ttft: Histogram) -> list[Sample]:
    """Return one scrape for each item, ten seconds apart. The last one is now."""
    times = [NOW - timedelta(seconds=10 * i) for i in range(len(ttft))][::-1]
    return [Sample(t, 1, 0.3, 4, 0, 3000, "auto", Flows(10.0, ttft=h)) for t, h in zip(times, ttft, strict=True)]


def found(objective: Objective, seconds: float | None) -> ObjectiveResult:
    if seconds is None:
        return ObjectiveResult(objective, ObjectiveState.NO_SAMPLES)
    held = seconds <= objective.milliseconds / 1000
    return ObjectiveResult(objective, ObjectiveState.HELD if held else ObjectiveState.MISSED, seconds)


def test_a_percentile_equals_promqls_histogram_quantile() -> None:
    h = Histogram((0.1, 0.5, 1.0), (10, 30, 50, 10), 60.0)
    assert h.quantile(0.05) == pytest.approx(0.05)
    assert h.quantile(0.4) == pytest.approx(0.5)
    assert h.quantile(0.65) == pytest.approx(0.75)
    assert h.quantile(0.99) == 1.0
    assert math.isnan(Histogram((1.0,), (0, 0)).quantile(0.5))


@given(st.lists(st.integers(0, 1000), min_size=6, max_size=6).filter(any), st.floats(0, 1), st.floats(0, 1))
def test_a_percentile_rises_with_its_share_and_stays_within_the_buckets(counts, q, more) -> None:
    h = Histogram(BOUNDS, tuple(map(float, counts)), 1.0)
    assert 0 <= h.quantile(q) <= h.quantile(q + (1 - q) * more) <= BOUNDS[-1]


def test_an_objective_is_missed_if_both_halves_of_the_window_miss_it() -> None:
    (late,) = judge_objectives([TTFT], window(*[at(2.0)] * 10), sustained=True)
    assert late.state == "Missed"
    assert late.seconds == pytest.approx(1.0 + 0.95 * 1.5)
    (held,) = judge_objectives([TTFT], window(*[at(0.2)] * 10), sustained=True)
    assert held.state == "Held"


def test_a_burst_in_one_half_of_the_window_does_not_miss_the_objective() -> None:
    (seen,) = judge_objectives([TTFT], window(*[at(0.2)] * 5, *[at(2.0)] * 5), sustained=True)
    assert seen.state == "Unsettled"


@pytest.mark.parametrize(
    ("percentile", "each", "state"),
    [(95, 3, "NoSamples"), (95, 4, "Missed"), (99, 19, "NoSamples"), (99, 20, "Missed")],
)
def test_a_percentile_of_too_few_requests_is_not_judged(percentile, each, state) -> None:
    (seen,) = judge_objectives([Objective("TTFT", percentile, 500)], window(*[at(2.0, each)] * 10), sustained=True)
    assert seen.state == state


def test_an_objective_is_not_judged_over_a_window_with_missing_scrapes() -> None:
    (seen,) = judge_objectives([TTFT], window(*[at(2.0)] * 10), sustained=False)
    assert (seen.state, seen.seconds) == ("NoSamples", None)


def test_a_histogram_without_finite_bounds_has_no_percentile() -> None:
    (seen,) = judge_objectives([TTFT], window(*[Histogram((), (50.0,), 1.0)] * 10), sustained=True)
    assert seen == ObjectiveResult(TTFT, ObjectiveState.NO_SAMPLES)


def asked(*objectives: ObjectiveResult, kind: str = "Relaxed", **changes):
    return policy_input(workload(kind, objectives=objectives, **({"waiting": 0.0} | changes)))


def test_late_requests_with_a_roomy_cache_need_a_replica_not_a_dtype() -> None:
    decision = choose_step(asked(found(TTFT, 0.8)))
    assert step(decision) == ("ScaleOut", "auto", 2)
    assert decision.reason == "ObjectiveMissed"
    assert "TTFT p95 800 ms (objective 500 ms)" in decision.message
    assert {o.outcome for o in decision.options if o.action == "DtypeDown"} == {"NotMemory"}


def test_late_requests_that_wait_for_memory_need_a_smaller_dtype() -> None:
    s = asked(found(TTFT, 0.8), kind="MemoryBound", waiting=4.0)
    decision = choose_step(s)
    assert step(decision) == ("DtypeDown", "fp8", 1)
    more = next(o for o in decision.options if o.action == "ScaleOut")
    assert more.replicas == decision.chosen.replicas + 1
    closed = tuple(denied(dtype) for dtype in ("fp8", "k8v4", "k4v4"))
    assert step(choose_step(replace(s, denied=closed))) == ("ScaleOut", "auto", 2)


def test_a_dtype_under_which_the_prompts_alone_would_be_late_is_not_enough() -> None:
    slow = asked(found(TTFT, 0.8), kind="MemoryBound", waiting=4.0, prompts_in_hand=0.9, requests_per_second=1.5)
    decision = choose_step(slow)
    assert decision.chosen.action == "ScaleOut"
    down = next(o for o in decision.options if o.dtype == "fp8")
    assert down.outcome == "Insufficient"
    assert "TTFT p95 would be 600 ms, objective 500 ms" in down.message


def test_a_queue_needs_no_replica_while_every_objective_is_met() -> None:
    for kind in ("PrefillBound", "ComputeBound"):
        decision = choose_step(asked(found(TTFT, 0.4), found(ITL, 0.01), kind=kind, waiting=40.0))
        assert (decision.chosen.action, decision.reason) == ("Stay", "ObjectivesHeld")
    full = asked(found(TTFT, 0.4), kind="MemoryBound", waiting=40.0)
    assert choose_step(full).chosen.action == "DtypeDown"
    assert choose_step(replace(full, dtype="k4v4")).reason == "ObjectivesHeld"


def test_an_itl_objective_that_is_met_does_not_excuse_a_queue() -> None:
    assert choose_step(asked(found(ITL, 0.01), kind="ComputeBound", waiting=40.0)).chosen.action == "ScaleOut"


def test_no_replica_is_added_if_less_than_one_request_runs_on_each() -> None:
    decision = choose_step(asked(found(ITL, 0.08), running=0.7))
    assert decision.chosen.action == "Stay"
    assert "less than one request runs" in (decision.hold or "")


def test_a_replica_is_removed_only_with_a_margin_to_every_objective() -> None:
    def calm(ttft: float, busy: float = 0.1):
        return asked(found(TTFT, ttft), pods=2, demand=200, calm=True, peak_load=0.2, running=1.0, prompts_in_hand=busy)

    assert choose_step(calm(0.2)).chosen.action == "ScaleIn"
    assert choose_step(calm(0.45)).chosen.action == "Stay"
    assert choose_step(calm(0.2, busy=0.3)).chosen.action == "ScaleIn"
    assert choose_step(calm(0.3, busy=0.3)).chosen.action == "Stay"


def test_a_missed_objective_of_an_external_autoscaler_is_reported_with_the_reason() -> None:
    external = replace(asked(found(TTFT, 0.8)), spec=spec(scaling={"mode": "External"}))
    decision = choose_step(external)
    assert decision.chosen.action == "Stay"
    another = "an autoscaler or a person sets the replicas (scaling.mode External)"
    assert decision.hold == f"an objective is missed, but {another}"
    assert decision.wanted is not None
    assert decision.wanted.action == "ScaleOut"


def late_service(**scaling):
    obj = manifest(scaling={"objectives": [{"metric": "TTFT", "percentile": 95, "milliseconds": 500}]} | scaling)
    seen = tuple(
        replace(s, flows=Flows(5.0, finished=5, generation_tokens=500, ttft=at(2.0, 5)))
        for s in samples(usage=0.3, waiting=0)
    )
    s = running(obj, "auto")
    return replace(s, samples={s.traffic: seen})


def test_observed_latencies_are_in_metrics_condition_and_journal() -> None:
    decision = decide(late_service())
    assert decision.figures.objectives == (ObjectiveResult(Objective("TTFT", 95, 500), ObjectiveState.MISSED, 2.425),)
    condition = decision.status.condition("ObjectivesHeld")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "Missed")
    # Round to two digits, so that a figure that hardly moved causes no status write.
    assert condition.message == "TTFT p95 2400 ms (objective 500 ms)"
    assert decision.status.scaling.desired_replicas == 2
    entry = decision.status.decisions[0]
    assert (entry.action, entry.reason) == ("ScaleOut", "ObjectiveMissed")
    assert "ScaleOutObjectiveMissed" in [event.reason for event in decision.events]


def test_any_metrics_of_engines_give_a_status_that_the_crd_accepts() -> None:
    s = late_service()
    huge = Histogram((1e-300, 1e300), (0, 5, 0), 1e300)
    seen = tuple(replace(one, flows=replace(one.flows, ttft=huge)) for one in s.samples[s.traffic])
    status = decide(replace(s, samples={s.traffic: seen})).status
    assert status.condition("ObjectivesHeld").reason == "Missed"
    assert status_faults(json.loads(json.dumps(status.as_written()))) == ()


def test_a_service_without_objectives_has_no_condition_about_them_and_keeps_no_latencies() -> None:
    assert decide(running(manifest(), "auto")).status.condition("ObjectivesHeld") is None
    assert not retention_of(spec_of(manifest()), trial=False).latencies
    assert retention_of(late_service().spec, trial=False).latencies


def test_objectives_are_judged_over_the_workloads_window() -> None:
    s = late_service()
    seen = classify(s.samples[s.traffic], s.spec.kv_cache.pressure, NOW, objectives=s.spec.scaling.objectives)
    assert seen.missed == "TTFT p95 2425 ms (objective 500 ms)"
    later = NOW + timedelta(minutes=5)
    assert not classify(s.samples[s.traffic], s.spec.kv_cache.pressure, later, objectives=(TTFT,)).missed
