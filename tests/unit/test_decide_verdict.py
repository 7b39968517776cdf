"""Verdicts on canaries from the statistics of their probes. test_probe_sequential.py tests the test behind them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.decide.accuracy.verdict import judge
from kvpilot_probes.results import Tasks
from support.services import baseline, manifest, measurement, spec_of

LIMITS: Accuracy = spec_of(manifest(accuracy={"maxExcessKLMillinats": 20, "minTop1AgreementPercent": 97})).accuracy


def test_a_canary_with_damage_within_the_limits_passes() -> None:
    judged = judge(measurement(5_000, 980), baseline(), LIMITS)
    assert (judged.verdict, judged.covered) == ("Passed", "general; 0 tokens in 1 s")


def test_damage_between_half_of_the_limit_and_the_limit_passes_without_a_proof() -> None:
    judged = judge(measurement(15_000, 980), baseline(), LIMITS)
    assert (judged.verdict, judged.covered) == ("Passed", "nothing; not: general; 0 tokens in 1 s")


def test_damage_beyond_the_kl_limit_fails_with_its_numbers() -> None:
    judged = judge(measurement(35_000, 990), baseline(), LIMITS)
    assert (judged.verdict, judged.reason) == ("Failed", "AccuracyRegressed")
    assert judged.message.startswith("general: excess KL 34.9 millinats (limit 20)")


def test_damage_beyond_the_limit_in_too_few_prompts_is_inconclusive() -> None:
    judged = judge(measurement(25_000, 990, prompts=8), baseline(), LIMITS)
    assert (judged.verdict, judged.reason) == ("Inconclusive", "TooFewSamples")
    assert judged.message.endswith("too few to decide about general: name more or longer probe sets")


def test_a_canary_with_disagreement_beyond_the_limit_fails() -> None:
    judged = judge(measurement(1_000, 900), baseline(), LIMITS)
    assert judged.verdict == "Failed"
    assert "top-1 agreement 90.0% (limit 97.0%)" in judged.message


@given(agreement=st.integers(970, 1000), prompts=st.integers(5, 64))
def test_a_canary_whose_agreement_is_exactly_at_the_limit_passes(agreement: int, prompts: int) -> None:
    assert judge(measurement(1_000, agreement, prompts), baseline(), LIMITS).verdict == "Passed"


def test_a_canary_that_solves_far_fewer_tasks_fails_although_its_distributions_agree() -> None:
    found = replace(measurement(5_000, 980), tasks=(Tasks("agent", 16, 15, 4),))
    judged = judge(found, baseline(), LIMITS)
    assert (judged.verdict, judged.reason) == ("Failed", "AccuracyRegressed")
    assert judged.message.startswith("agent: 4 of 16 tasks solved, 15 by the 16-bit engine; excess KL")


def test_tasks_that_the_baseline_cannot_solve_either_fail_no_canary() -> None:
    for tasks in (Tasks("agent", 16, 0, 0), Tasks("agent", 16, 12, 8)):
        assert judge(replace(measurement(5_000, 980), tasks=(tasks,)), baseline(), LIMITS).verdict == "Passed"


def test_a_baseline_that_solves_far_fewer_tasks_than_the_canary_is_unfit() -> None:
    found = replace(measurement(35_000, 900), tasks=(Tasks("reasoning", 48, 1, 40),))
    judged = judge(found, baseline(), LIMITS)
    assert (judged.verdict, judged.reason) == ("Inconclusive", "BaselineUnfit")
    assert "solved 1 of 48 tasks, the judged one 40: the baseline is damaged" in judged.message


def test_the_engines_own_noise_is_not_damage() -> None:
    noisy = baseline(control_mean_kl_micronats=15_000, control_top1_agreement_permille=980)
    assert judge(measurement(33_000, 960), noisy, LIMITS).verdict == "Passed"
    assert judge(measurement(36_000, 960), noisy, LIMITS).verdict == "Inconclusive"
    assert judge(measurement(60_000, 960, prompts=32), noisy, LIMITS).verdict == "Failed"


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
@given(kl=st.integers(0, 30_000_000), agreement=st.integers(0, 1000), prompts=st.integers(0, 20))
def test_a_control_run_beyond_the_limits_gives_no_verdict(control, kl, agreement, prompts):
    judged = judge(measurement(kl, agreement, prompts), control, LIMITS)
    assert (judged.verdict, judged.reason) == ("Inconclusive", "BaselineUnfit")


@given(control=controls, kl=st.integers(0, 30_000_000), agreement=st.integers(0, 1000), prompts=st.integers(0, 20))
def test_a_passed_canary_has_at_most_twice_the_limits_damage(control, kl, agreement, prompts):
    """The control run may show as much KL as the limit, and the canary may add as much again."""
    judged = judge(measurement(kl, agreement, prompts), control, LIMITS)
    assert judged.verdict != "Passed" or (kl <= 40_000 and prompts >= 5)


def test_the_message_about_an_unfit_control_has_its_figures_and_both_limits() -> None:
    judged = judge(measurement(), UNFIT[0], LIMITS)
    assert "mean KL of 4800.0 millinats (limit 20), top-1 agreement 0.0% (limit 97%)" in judged.message


@pytest.mark.parametrize(
    ("mean", "agreement", "verdict"),
    [(2_000, 1000, "Passed"), (2_001, 1000, "Inconclusive"), (100, 975, "Passed"), (100, 960, "Inconclusive")],
)
def test_a_control_as_noisy_as_sound_engines_is_fit_under_any_limits(mean, agreement, verdict):
    strict = spec_of(manifest(accuracy={"maxExcessKLMillinats": 0, "minTop1AgreementPercent": 100})).accuracy
    control = baseline(positions=1000, control_mean_kl_micronats=mean, control_top1_agreement_permille=agreement)
    assert judge(measurement(100, 1000), control, strict).verdict == verdict


def test_a_probe_with_too_few_prompts_is_inconclusive() -> None:
    assert judge(measurement(0, 1000, prompts=4), baseline(), LIMITS).verdict == "Inconclusive"


def test_a_canary_that_answers_garbage_fails_at_its_first_prompt() -> None:
    assert judge(measurement(8_000_000, 0, prompts=1), baseline(), LIMITS).verdict == "Failed"


@given(kl=st.integers(0, 30_000_000), agreement=st.integers(0, 1000), prompts=st.integers(0, 20))
def test_more_damage_never_turns_a_failure_into_a_pass(kl, agreement, prompts):
    judged = judge(measurement(kl, agreement, prompts), baseline(), LIMITS)
    worse = judge(measurement(kl + 5_000, agreement, prompts), baseline(), LIMITS)
    assert not (worse.verdict == "Passed" and judged.verdict != "Passed")
