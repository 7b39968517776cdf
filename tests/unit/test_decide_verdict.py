"""Verdicts on canaries from the statistics of their probes."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.decide.accuracy.verdict import judge
from support.model_cluster import measurement
from support.services import baseline, manifest, spec_of

LIMITS: Accuracy = spec_of(manifest(accuracy={"maxExcessKLMillinats": 20, "minTop1AgreementPercent": 97})).accuracy


def test_damage_within_the_limits_passes():
    assert judge(measurement(15_000, 980), baseline(), LIMITS).verdict == "Passed"


def test_damage_beyond_the_kl_limit_fails_with_its_numbers():
    judged = judge(measurement(35_000, 990), baseline(), LIMITS)
    assert (judged.verdict, judged.reason) == ("Failed", "AccuracyRegressed")
    assert "34.9 millinats (limit 20)" in judged.message


def test_disagreement_beyond_the_limit_fails():
    assert judge(measurement(1_000, 900), baseline(), LIMITS).verdict == "Failed"


def test_agreement_a_little_below_the_limit_passes_where_so_few_positions_may_say_so_by_chance():
    few, many = (judge(measurement(1_000, 960, positions=n), baseline(positions=n), LIMITS) for n in (256, 4096))
    assert few.verdict == "Passed"
    assert "top-1 agreement 96.0% (limit 97.0%, within chance)" in few.message
    assert many.verdict == "Failed"


@given(agreement=st.integers(970, 1000), positions=st.integers(100, 2000))
def test_a_dtype_that_agrees_as_often_as_the_limit_asks_for_passes(agreement, positions):
    judged = judge(measurement(1_000, agreement, positions), baseline(), LIMITS)
    assert judged.verdict == "Passed"
    assert "chance" not in judged.message


@pytest.mark.parametrize(("rate", "positions"), [(0.979, 243), (0.982, 844), (0.977, 740)])
def test_k4v4_as_it_was_measured_fails_less_than_once_in_a_thousand_draws(rate, positions):
    agreeing = [
        n for n in range(positions + 1)
        if judge(measurement(5_000, n * 1000 // positions, positions), baseline(), LIMITS).verdict == "Failed"
    ]  # fmt: skip
    assert sum(comb(positions, n) * rate**n * (1 - rate) ** (positions - n) for n in agreeing) < 1e-3


def test_fp8_as_it_was_measured_on_a_small_model_fails_by_its_agreement_alone():
    assert judge(measurement(1_000, 911, 225), baseline(), LIMITS).verdict == "Failed"


def test_the_engines_own_noise_is_not_damage():
    noisy = baseline(control_mean_kl_micronats=15_000, control_top1_agreement_permille=980)
    assert judge(measurement(33_000, 960), noisy, LIMITS).verdict == "Passed"
    assert judge(measurement(36_000, 960), noisy, LIMITS).verdict == "Failed"


controls = st.builds(
    baseline,
    positions=st.integers(0, 4096),
    control_mean_kl_micronats=st.integers(0, 30_000_000),
    control_top1_agreement_permille=st.integers(0, 1000),
)
UNFIT = [
    baseline(control_mean_kl_micronats=4_800_000, control_top1_agreement_permille=0),
    baseline(control_mean_kl_micronats=20_001),
    baseline(control_top1_agreement_permille=900),
    baseline(positions=0, control_mean_kl_micronats=0, control_top1_agreement_permille=0),
]


@pytest.mark.parametrize("control", UNFIT, ids=["random answers", "KL", "agreement", "0 of 0 positions"])
@given(kl=st.integers(0, 30_000_000), agreement=st.integers(0, 1000), positions=st.integers(0, 500))
def test_nothing_passes_or_fails_against_a_control_that_is_beyond_the_limits(control, kl, agreement, positions):
    judged = judge(measurement(kl, agreement, positions), control, LIMITS)
    assert (judged.verdict, judged.reason) == ("Inconclusive", "BaselineUnfit")


@given(control=controls, kl=st.integers(0, 30_000_000), agreement=st.integers(0, 1000), positions=st.integers(0, 500))
def test_what_passes_is_no_further_from_16_bits_than_twice_the_limit(control, kl, agreement, positions):
    """The limit covers both the engine's own noise and the allowed damage."""
    judged = judge(measurement(kl, agreement, positions), control, LIMITS)
    assert judged.verdict != "Passed" or (kl <= 40_000 and min(positions, control.positions) >= 100)


def test_the_message_about_an_unfit_control_has_its_figures_and_both_limits():
    judged = judge(measurement(), UNFIT[0], LIMITS)
    assert "mean KL of 4800.0 millinats (limit 20), top-1 agreement 0.0% (limit 97%)" in judged.message


@pytest.mark.parametrize(
    ("mean", "agreement", "verdict"),
    [(2_000, 1000, "Passed"), (2_001, 1000, "Inconclusive"), (100, 975, "Passed"), (100, 960, "Inconclusive")],
)
def test_a_control_that_is_as_noisy_as_sound_engines_are_is_fit_however_strict_the_limits_are(mean, agreement, verdict):
    strict = spec_of(manifest(accuracy={"maxExcessKLMillinats": 0, "minTop1AgreementPercent": 100})).accuracy
    control = baseline(positions=1000, control_mean_kl_micronats=mean, control_top1_agreement_permille=agreement)
    assert judge(measurement(100, 1000, positions=1000), control, strict).verdict == verdict


def test_too_few_positions_are_inconclusive():
    assert judge(measurement(1_000, 1000, positions=40), baseline(), LIMITS).verdict == "Inconclusive"


def test_garbage_fails_however_few_positions_it_let_us_reach():
    assert judge(measurement(8_000_000, 0, positions=12), baseline(), LIMITS).verdict == "Failed"


@given(kl=st.integers(0, 30_000_000), agreement=st.integers(0, 1000), positions=st.integers(0, 500))
def test_more_damage_never_turns_a_failure_into_a_pass(kl, agreement, positions):
    judged = judge(measurement(kl, agreement, positions), baseline(), LIMITS)
    worse = judge(measurement(kl + 5_000, agreement, positions), baseline(), LIMITS)
    assert not (worse.verdict == "Passed" and judged.verdict != "Passed")
