"""When does a canary pass?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.api.spec import Accuracy
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


def test_the_engines_own_noise_is_not_damage():
    noisy = baseline(control_mean_kl_micronats=30_000, control_top1_agreement_permille=900)
    assert judge(measurement(45_000, 880), noisy, LIMITS).verdict == "Passed"


def test_too_few_positions_are_inconclusive():
    assert judge(measurement(1_000, 1000, positions=40), baseline(), LIMITS).verdict == "Inconclusive"


def test_garbage_fails_however_few_positions_it_let_us_reach():
    assert judge(measurement(8_000_000, 0, positions=12), baseline(), LIMITS).verdict == "Failed"


@given(kl=st.integers(0, 30_000_000), agreement=st.integers(0, 1000), positions=st.integers(0, 500))
def test_more_damage_never_turns_a_failure_into_a_pass(kl, agreement, positions):
    judged = judge(measurement(kl, agreement, positions), baseline(), LIMITS)
    worse = judge(measurement(kl + 5_000, agreement, positions), baseline(), LIMITS)
    assert not (worse.verdict == "Passed" and judged.verdict != "Passed")
