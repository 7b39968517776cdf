"""The policy removes replicas and raises precision after the pressure is gone."""

from dataclasses import replace
from datetime import timedelta

import msgspec
from msgspec.structs import replace as replace_struct

from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.state.status import Saturation, parse_status
from support.policy_inputs import DWELL, LLAMA, policy_input, spec, step, workload
from support.services import NOW


def calm(*, load=0.1, pods=2, kind="Relaxed", rate=None, **changes):
    base = workload(
        kind, demand=int(1000 * load), pods=pods, usage_percent=round(100 * load / pods), waiting=0.0, calm=True,
        peak_load=load, requests_per_second=rate, mean_prompt=100.0, mean_generation=100.0,
    )  # fmt: skip
    return replace(base, **changes)


def test_after_pressure_a_replica_is_removed_first():
    s = policy_input(calm(load=0.2), dtype="k4v4", dtype_changed=NOW - timedelta(days=9))
    assert step(choose_step(s)) == ("ScaleIn", "k4v4", 1)


def test_a_larger_dtype_is_chosen_once_no_replica_can_be_removed():
    s = policy_input(calm(load=0.1, pods=1), dtype="k4v4", dtype_changed=NOW - timedelta(days=9))
    decision = choose_step(s)
    assert step(decision) == ("DtypeUp", "auto", 1)
    assert "38% full" in decision.chosen.message


def test_a_larger_dtype_is_chosen_only_if_the_peak_stays_below_low_percent():
    s = policy_input(calm(load=0.2, pods=1), dtype="k4v4", dtype_changed=NOW - timedelta(days=9))
    assert step(choose_step(s)) == ("DtypeUp", "fp8", 1)


def test_a_larger_dtype_waits_for_four_times_min_dwell_seconds():
    s = policy_input(calm(load=0.1, pods=1), dtype="k4v4", dtype_changed=NOW - timedelta(seconds=4 * DWELL - 1))
    assert step(choose_step(s))[0] == "Stay"


def test_a_replica_stays_if_the_peak_would_overfill_the_others():
    assert step(choose_step(policy_input(calm(load=0.7))))[0] == "Stay"


def test_a_replica_stays_if_the_others_would_get_a_rate_at_which_requests_queued():
    learned = (Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=100, mean_generation=100),)
    s = policy_input(calm(load=0.1, rate=0.45), saturations=learned)
    assert step(choose_step(s))[0] == "Stay"
    assert step(choose_step(replace(s, workload=calm(load=0.1, rate=0.3))))[0] == "ScaleIn"


def test_a_replica_stays_if_the_others_would_compute_too_many_prompts():
    assert step(choose_step(policy_input(calm(load=0.1, prompts_in_hand=0.35))))[0] == "Stay"
    assert step(choose_step(policy_input(calm(load=0.1, prompts_in_hand=0.25))))[0] == "ScaleIn"


def test_a_calm_replica_above_its_recorded_rate_corrects_the_record():
    learned = (Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=100, mean_generation=100),)
    assert step(choose_step(policy_input(calm(load=0.1, rate=1.1), saturations=learned)))[0] == "Stay"
    assert step(choose_step(policy_input(calm(load=0.1, rate=1.5), saturations=learned)))[0] == "ScaleIn"


def test_a_recorded_rate_counts_only_for_similar_requests():
    learned = (Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=4000, mean_generation=100),)
    assert step(choose_step(policy_input(calm(load=0.1, rate=0.45), saturations=learned)))[0] == "ScaleIn"


def test_an_idle_service_keeps_its_last_replica():
    s = policy_input(calm(load=0.0, pods=1, kind="Idle"), spec=spec(scaling={"minReplicas": 0}))
    assert step(choose_step(s))[0] == "Stay"


def test_a_larger_dtype_that_would_be_too_slow_is_ruled_out():
    w = calm(load=0.1, pods=1, itl_seconds=0.01, usage_percent=10)
    w = replace(w, capacity_tokens=3_346_368)
    s = policy_input(w, dtype="k4v4", dtype_changed=NOW - timedelta(days=9), model=LLAMA)
    assert step(choose_step(s))[0] == "Stay"
    patient = spec(canary={"maxITLP95RegressionPercent": 1000})
    assert step(choose_step(replace(s, spec=patient)))[0] == "DtypeUp"


KNOWN = Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=100, mean_generation=100)
EIGHT = spec(scaling={"maxReplicas": 8})


def test_half_of_the_replicas_are_removed_at_once_if_the_rate_of_one_is_known():
    known = replace_struct(KNOWN, computed_prompt=50)
    quiet = policy_input(calm(load=0.1, pods=8, rate=0.1, computed_prompt=50.0), spec=EIGHT)
    assert step(choose_step(quiet)) == ("ScaleIn", "auto", 7)
    assert step(choose_step(replace(quiet, saturations=(known,)))) == ("ScaleIn", "auto", 4)
    busier = calm(load=0.1, pods=8, rate=0.4, computed_prompt=50.0)
    assert step(choose_step(replace(quiet, workload=busier, saturations=(known,)))) == ("ScaleIn", "auto", 5)


def test_records_without_prompt_tokens_remove_one_replica_at_a_time():
    old = {"dtype": "auto", "requestsPerHour": 3600, "meanPrompt": 100, "meanGeneration": 100}
    saturations = parse_status({"scaling": {"saturations": [old]}}).scaling.saturations
    assert saturations == (KNOWN,)
    assert list(msgspec.to_builtins(saturations)) == [old]
    quiet = policy_input(calm(load=0.1, pods=8, rate=0.1, computed_prompt=50.0), spec=EIGHT, saturations=saturations)
    assert step(choose_step(quiet)) == ("ScaleIn", "auto", 7)
    busy = replace(quiet, workload=calm(load=0.1, pods=8, rate=0.65, computed_prompt=50.0))
    assert step(choose_step(busy))[0] == "Stay"


def test_a_rate_recorded_with_heavy_prompts_limits_scale_in_only_for_similar_prompts():
    heavy = replace_struct(KNOWN, computed_prompt=90)
    light = calm(load=0.1, pods=8, rate=1.1, computed_prompt=10.0)
    s = policy_input(light, spec=EIGHT, saturations=(heavy,))
    assert step(choose_step(s)) == ("ScaleIn", "auto", 4)
    alike = replace(s, workload=replace(light, computed_prompt=80.0))
    assert step(choose_step(alike))[0] == "Stay"


def test_if_only_memory_requires_a_replica_a_smaller_dtype_replaces_it():
    memory = replace_struct(KNOWN, memory=True)
    kept = policy_input(calm(load=0.2, rate=0.5), saturations=(memory,))
    decision = choose_step(kept)
    assert step(decision) == ("DtypeDown", "fp8", 2)
    assert decision.reason == "LoadLeft"
    assert step(choose_step(replace(kept, saturations=(KNOWN,))))[0] == "Stay"
    prompts = replace(kept, workload=calm(load=0.2, rate=0.5, prompts_in_hand=0.4))
    assert step(choose_step(prompts))[0] == "Stay"
    dwelling = replace(kept, dtype_changed=NOW - timedelta(seconds=DWELL - 1))
    assert step(choose_step(dwelling))[0] == "Stay"


def test_a_smaller_dtype_that_saves_no_replica_is_not_chosen():
    memory = replace_struct(KNOWN, memory=True)
    assert step(choose_step(policy_input(calm(load=0.2, rate=1.2), saturations=(memory,))))[0] == "Stay"
