"""The step that the policy takes under memory pressure, and the steps that it skips."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kvpilot_operator.decide.steps.policy import PolicyDecision, choose_step
from kvpilot_operator.state.status import Experience, Saturation
from support.policy_inputs import A100, DWELL, LLAMA, denied, policy_input, spec, step, workload
from support.services import NOW, manifest, spec_of


def outcomes(decision: PolicyDecision) -> dict[str, str]:
    return {o.dtype if o.action.startswith("Dtype") else o.action: o.outcome for o in decision.options}


def test_the_safest_dtype_that_holds_the_demand_is_taken_before_a_gpu():
    decision = choose_step(policy_input(workload(demand=1500)))
    assert step(decision) == ("DtypeDown", "fp8", 1)
    assert "75% full" in decision.chosen.message
    assert outcomes(decision) == {
        "fp8": "Chosen",
        "k8v4": "Possible",
        "k4v4": "Possible",
        "ScaleOut": "Possible",
        "Stay": "Possible",
    }


def test_more_demand_takes_a_smaller_dtype():
    assert step(choose_step(policy_input(workload(demand=2000))))[1] == "k8v4"
    assert step(choose_step(policy_input(workload(demand=3000))))[1] == "k4v4"


def test_demand_that_no_dtype_holds_alone_takes_as_many_replicas_as_it_needs_at_most_twice_as_many():
    decision = choose_step(policy_input(workload(demand=8000, pods=2, capacity=1000)))
    assert step(decision) == ("ScaleOut", "auto", 4)
    assert outcomes(decision)["k4v4"] == "Insufficient"


def test_a_dtype_that_is_not_enough_alone_is_taken_where_replicas_cannot_grow():
    s = policy_input(workload(demand=9000), spec=spec(scaling={"maxReplicas": 1}))
    assert step(choose_step(s)) == ("DtypeDown", "k4v4", 1)


def test_a_replica_is_added_while_the_dwell_holds_the_dtype():
    s = policy_input(workload(demand=1500), dtype_changed=NOW - timedelta(seconds=DWELL - 1))
    decision = choose_step(s)
    assert step(decision) == ("ScaleOut", "auto", 2)
    assert outcomes(decision)["fp8"] == "CoolingDown"
    assert step(choose_step(replace(s, now=NOW + timedelta(seconds=2))))[0] == "DtypeDown"


def test_after_a_rollback_the_next_dtype_waits():
    s = policy_input(workload(demand=1500), rolled_back=NOW - timedelta(minutes=59))
    assert outcomes(choose_step(s))["fp8"] == "CoolingDown"
    assert step(choose_step(replace(s, now=NOW + timedelta(minutes=2))))[0] == "DtypeDown"


def test_a_held_step_says_what_it_would_be_and_when():
    s = policy_input(workload(demand=1500), dtype_changed=NOW, spec=spec(scaling={"maxReplicas": 1}))
    decision = choose_step(s)
    assert step(decision) == ("Stay", "auto", 1)
    assert decision.reason == "CoolingDown"
    assert "it may not change before 2026-11-21T18:00:00Z" in (decision.hold or "")
    assert decision.wanted is not None
    assert decision.wanted.dtype == "fp8"


def test_a_denied_dtype_is_skipped_for_this_model_image_and_gpu_only():
    s = policy_input(workload(demand=1500))
    assert step(choose_step(replace(s, denied=(denied("fp8"),))))[1] == "k8v4"
    assert step(choose_step(replace(s, denied=(denied("fp8", gpu="NVIDIA-L4"),))))[1] == "fp8"


def test_a_dtype_that_the_gpu_cannot_compute_is_skipped():
    odd = replace(LLAMA, head_dim=80)
    decision = choose_step(policy_input(workload(demand=1500), node=A100, model=odd))
    assert step(decision)[1] == "k8v4"
    assert outcomes(decision)["fp8"] == "Vetoed"


def test_at_the_end_of_the_ladder_it_scales_out():
    assert step(choose_step(policy_input(workload(demand=1500), dtype="k4v4"))) == ("ScaleOut", "k4v4", 2)


def test_with_nothing_left_it_reports_it():
    s = policy_input(workload(demand=1500), dtype="k4v4", spec=spec(scaling={"maxReplicas": 1}))
    assert choose_step(s).reason == "EndOfLadder"


def test_replicas_that_still_load_are_waited_for():
    s = policy_input(workload(demand=9000), replicas=2, ready=1, replicas_changed=NOW - timedelta(minutes=5))
    assert step(choose_step(s)) == ("Stay", "auto", 2)


def test_replicas_that_never_came_up_do_not_stand_in_the_way_of_a_dtype_and_are_not_asked_for_again():
    s = policy_input(workload(demand=1500), replicas=2, ready=1, replicas_changed=NOW - timedelta(hours=2))
    decision = choose_step(s)
    assert step(decision) == ("DtypeDown", "fp8", 2)
    assert outcomes(decision)["ScaleOut"] == "ReplicasMissing"


def test_replicas_that_belong_to_an_autoscaler_are_never_written():
    s = policy_input(workload(demand=9000), spec=spec(scaling={"mode": "External"}))
    assert outcomes(choose_step(s))["ScaleOut"] == "NotOwner"
    assert choose_step(s).chosen.action == "DtypeDown"


def test_prompts_or_the_batch_get_a_replica_and_never_a_dtype():
    for kind in ("PrefillBound", "ComputeBound"):
        decision = choose_step(policy_input(workload(kind)))
        assert step(decision) == ("ScaleOut", "auto", 2)
        assert {outcomes(decision)[d] for d in ("fp8", "k8v4", "k4v4")} == {"NotMemory"}


def test_a_fixed_dtype_is_never_stepped_but_replicas_are():
    fixed = spec_of(manifest(kvCache={"mode": "Fixed", "dtype": "fp8"}))
    decision = choose_step(policy_input(workload(demand=1500), dtype="fp8", spec=fixed))
    assert step(decision) == ("ScaleOut", "fp8", 2)
    assert not any(o.action.startswith("Dtype") for o in decision.options)


def test_metrics_that_say_too_little_move_nothing():
    for kind in ("NoMetrics", "Warming"):
        assert step(choose_step(policy_input(workload(kind)))) == ("Stay", "auto", 1)


def test_nothing_begins_while_a_canary_is_in_flight():
    assert choose_step(policy_input(workload(demand=1500), busy="fp8 is on trial")).reason == "Busy"


def experience(**found):
    return Experience(
        revision="r",
        dtype="fp8", from_dtype="auto", model="hf://Qwen/Qwen3-8B", image="kvpilot/runtime:1", gpu="NVIDIA-H200",
        time=NOW, verdict="Passed", reason="CanaryPassed", **found,
    )  # fmt: skip


def test_a_step_that_a_canary_found_too_slow_is_not_tried_again():
    decision = choose_step(policy_input(workload(demand=1500), history=(experience(itl_p95_change_percent=25),)))
    assert outcomes(decision)["fp8"] == "Vetoed"
    assert step(decision)[1] == "k8v4"


def test_the_capacity_that_a_canary_measured_counts_more_than_bits():
    decision = choose_step(policy_input(workload(demand=1500), history=(experience(capacity_percent=120),)))
    assert step(decision)[1] == "k8v4"


def test_what_a_canary_measured_with_another_recent_window_does_not_count():
    found = experience(capacity_percent=120, itl_p95_change_percent=25, recent_tokens=64)
    decision = choose_step(policy_input(workload(demand=1500), history=(found,)))
    assert step(decision)[1] == "fp8"


def test_the_pages_of_recent_windows_count_where_sequences_are_short():
    w = workload(demand=2900, mean_prompt=100.0, mean_generation=56.0)
    kv_cache = {"ladder": ["k4v4"], "recentTokens": 128}
    decision = choose_step(policy_input(w, spec=spec(kvCache=kv_cache)))
    # The window takes 128 tokens' worth of pages and the sequence 128 more, so the gain is half of 3.76x.
    assert step(decision)[0] == "ScaleOut"
    without = choose_step(policy_input(w, spec=spec(kvCache={**kv_cache, "recentTokens": 0})))
    assert step(without) == ("DtypeDown", "k4v4", 1)


def test_the_pages_of_a_default_window_are_those_of_the_dtype_cut_to_the_longest_context():
    def capacity(dtype, length, *, longest=None, asked=None):
        w = workload(demand=1500, mean_prompt=float(length), mean_generation=0.0)
        kv_cache = {"ladder": [dtype]} | ({"recentTokens": asked} if asked is not None else {})
        about = {"kvCache": kv_cache} | ({"model": {"maxModelLen": longest}} if longest else {})
        return next(o.capacity_tokens for o in choose_step(policy_input(w, spec=spec(**about))).options if o.dtype)

    assert capacity("k4v4", 4000) == capacity("k4v4", 4000, asked=64) > capacity("k4v4", 4000, asked=128)
    assert capacity("k4v2", 4000) == capacity("k4v2", 4000, asked=128) < capacity("k4v2", 4000, asked=64)
    assert capacity("k4v2", 96, longest=100) == capacity("k4v2", 96, asked=64) > capacity("k4v2", 96)


def test_a_dtype_without_a_recent_window_gets_back_what_the_engines_say_that_theirs_takes():
    w = workload(demand=1500, mean_prompt=100.0, mean_generation=56.0)
    tokens = {}
    for recent in (0, 128):
        decision = choose_step(
            policy_input(w, spec=spec(kvCache={"ladder": ["k2v2"]}), dtype="k4v4", recent_tokens=recent)
        )
        tokens[recent] = next(o.capacity_tokens for o in decision.options if o.dtype == "k2v2")
    assert tokens[128] == pytest.approx(2 * tokens[0], rel=0.01)


def test_a_step_under_pressure_remembers_what_a_replica_could_do():
    w = workload(demand=1500, requests_per_second=2.0, mean_prompt=300.0, mean_generation=100.0)
    assert choose_step(policy_input(w)).saturations == (
        Saturation(dtype="auto", requests_per_hour=7200, mean_prompt=300, mean_generation=100),
    )
