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


def test_the_safest_sufficient_dtype_is_chosen_before_another_gpu():
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


def test_a_larger_demand_leads_to_a_smaller_dtype():
    assert step(choose_step(policy_input(workload(demand=2000))))[1] == "k8v4"
    assert step(choose_step(policy_input(workload(demand=3000))))[1] == "k4v4"


def test_demand_beyond_every_dtype_adds_the_needed_replicas_up_to_double():
    decision = choose_step(policy_input(workload(demand=8000, pods=2, capacity=1000)))
    assert step(decision) == ("ScaleOut", "auto", 4)
    assert outcomes(decision)["k4v4"] == "Insufficient"


def test_an_insufficient_dtype_is_chosen_if_replicas_cannot_grow():
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


def test_a_delayed_step_is_reported_with_the_time_at_which_it_may_happen():
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


def test_at_the_end_of_the_ladder_the_policy_adds_replicas():
    assert step(choose_step(policy_input(workload(demand=1500), dtype="k4v4"))) == ("ScaleOut", "k4v4", 2)


def test_the_policy_reports_the_end_of_the_ladder_if_no_step_is_possible():
    s = policy_input(workload(demand=1500), dtype="k4v4", spec=spec(scaling={"maxReplicas": 1}))
    assert choose_step(s).reason == "EndOfLadder"


def test_the_policy_waits_for_replicas_that_still_load():
    s = policy_input(workload(demand=9000), replicas=2, ready=1, replicas_changed=NOW - timedelta(minutes=5))
    assert step(choose_step(s)) == ("Stay", "auto", 2)


def test_missing_replicas_do_not_block_a_dtype_change_and_are_not_requested_again():
    s = policy_input(workload(demand=1500), replicas=2, ready=1, replicas_changed=NOW - timedelta(hours=2))
    decision = choose_step(s)
    assert step(decision) == ("DtypeDown", "fp8", 2)
    assert outcomes(decision)["ScaleOut"] == "ReplicasMissing"


def test_replicas_of_an_external_autoscaler_are_never_written():
    s = policy_input(workload(demand=9000), spec=spec(scaling={"mode": "External"}))
    assert outcomes(choose_step(s))["ScaleOut"] == "NotOwner"
    assert choose_step(s).chosen.action == "DtypeDown"


def test_prefill_or_compute_limits_add_a_replica_and_never_change_the_dtype():
    for kind in ("PrefillBound", "ComputeBound"):
        decision = choose_step(policy_input(workload(kind)))
        assert step(decision) == ("ScaleOut", "auto", 2)
        assert {outcomes(decision)[d] for d in ("fp8", "k8v4", "k4v4")} == {"NotMemory"}


def test_in_mode_fixed_replicas_change_but_the_dtype_does_not():
    fixed = spec_of(manifest(kvCache={"mode": "Fixed", "dtype": "fp8"}))
    decision = choose_step(policy_input(workload(demand=1500), dtype="fp8", spec=fixed))
    assert step(decision) == ("ScaleOut", "fp8", 2)
    assert not any(o.action.startswith("Dtype") for o in decision.options)


def test_without_enough_metrics_the_policy_takes_no_step():
    for kind in ("NoMetrics", "Warming"):
        assert step(choose_step(policy_input(workload(kind)))) == ("Stay", "auto", 1)


def test_no_step_begins_while_a_canary_is_in_flight():
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


def test_the_capacity_measured_by_a_canary_replaces_the_estimate_from_bits():
    decision = choose_step(policy_input(workload(demand=1500), history=(experience(capacity_percent=120),)))
    assert step(decision)[1] == "k8v4"


def test_a_capacity_measured_with_another_recent_window_does_not_count():
    found = experience(capacity_percent=120, itl_p95_change_percent=25, recent_tokens=64)
    decision = choose_step(policy_input(workload(demand=1500), history=(found,)))
    assert step(decision)[1] == "fp8"


def test_residual_pages_count_if_sequences_are_short():
    w = workload(demand=2900, mean_prompt=100.0, mean_generation=56.0)
    kv_cache = {"ladder": ["k4v4"], "recentTokens": 128}
    decision = choose_step(policy_input(w, spec=spec(kvCache=kv_cache)))
    # The window takes 128 tokens' worth of pages and the sequence 128 more, so the gain is half of 3.76x.
    assert step(decision)[0] == "ScaleOut"
    without = choose_step(policy_input(w, spec=spec(kvCache={**kv_cache, "recentTokens": 0})))
    assert step(without) == ("DtypeDown", "k4v4", 1)


def test_residual_pages_of_a_default_window_are_cut_to_the_longest_context():
    def capacity(dtype, length, *, longest=None, asked=None):
        w = workload(demand=1500, mean_prompt=float(length), mean_generation=0.0)
        kv_cache = {"ladder": [dtype]} | ({"recentTokens": asked} if asked is not None else {})
        about = {"kvCache": kv_cache} | ({"model": {"maxModelLen": longest}} if longest else {})
        return next(o.capacity_tokens for o in choose_step(policy_input(w, spec=spec(**about))).options if o.dtype)

    assert capacity("k4v4", 4000) == capacity("k4v4", 4000, asked=64) > capacity("k4v4", 4000, asked=128)
    assert capacity("k4v2", 4000) == capacity("k4v2", 4000, asked=128) < capacity("k4v2", 4000, asked=64)
    assert capacity("k2v2", 500, longest=511) == capacity("k2v2", 500, asked=256) > capacity("k2v2", 500)


def test_a_dtype_without_a_window_regains_the_reported_residual_pages():
    w = workload(demand=1500, mean_prompt=100.0, mean_generation=56.0)
    tokens = {}
    for recent in (0, 128):
        decision = choose_step(
            policy_input(w, spec=spec(kvCache={"ladder": ["k2v2"]}), dtype="k4v4", recent_tokens=recent)
        )
        tokens[recent] = next(o.capacity_tokens for o in decision.options if o.dtype == "k2v2")
    assert tokens[128] == pytest.approx(2 * tokens[0], rel=0.01)


def test_a_step_under_pressure_records_the_rate_of_a_replica():
    w = workload(demand=1500, requests_per_second=2.0, mean_prompt=300.0, mean_generation=100.0)
    assert choose_step(policy_input(w)).saturations == (
        Saturation(dtype="auto", requests_per_hour=7200, mean_prompt=300, mean_generation=100),
    )
