"""After a scale-in that left too few replicas, the policy does not repeat it for a day."""

from datetime import timedelta

from kvpilot_operator.decide.load.saturation import HOLD, SOON, backing_off, backoff
from kvpilot_operator.decide.load.workload import Workload
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.snapshot import NodeFacts
from kvpilot_operator.state.status import ScaleInBackoff
from support.services import NOW, manifest, spec_of

TOO_FEW = ScaleInBackoff(dtype="auto", replicas=2, time=NOW)


def after(action, dtype="auto", replicas=2, minutes=10):
    return backoff(action, dtype, replicas, NOW, NOW - timedelta(minutes=minutes), None)


def test_any_added_capacity_soon_after_a_scale_in_records_too_few_replicas():
    assert after("ScaleOut") == (None, TOO_FEW)
    assert after("DtypeDown") == (None, TOO_FEW)


def test_capacity_added_long_after_a_scale_in_records_nothing():
    given_back, too_few = after("ScaleOut", minutes=SOON.total_seconds() / 60 + 1)
    assert too_few is None
    assert given_back is not None


def test_the_time_of_a_scale_in_stays_until_the_next_one():
    assert backoff("ScaleIn", "auto", 3, NOW, None, TOO_FEW) == (NOW, TOO_FEW)
    assert backoff("Stay", "auto", 3, NOW, NOW, TOO_FEW) == (NOW, TOO_FEW)


def test_a_number_of_replicas_that_was_too_small_is_not_tried_again_for_a_day():
    assert "2 replicas of auto" in (backing_off(NOW, "auto", 2, TOO_FEW) or "")
    assert backing_off(NOW, "auto", 1, TOO_FEW) is not None
    assert backing_off(NOW, "auto", 3, TOO_FEW) is None
    assert backing_off(NOW, "k8v4", 2, TOO_FEW) is None
    assert backing_off(NOW + HOLD, "auto", 2, TOO_FEW) is None


def test_a_replica_that_was_soon_needed_again_is_not_removed():
    spec = spec_of(manifest(scaling={"minReplicas": 1, "maxReplicas": 4}))
    calm = Workload("Relaxed", "evidence", usage_percent=5, pods=3, capacity_tokens=3000, calm=True, peak_load=0.1)
    quiet = PolicyInput(NOW + timedelta(hours=2), spec, calm, "auto", 3, 3, NodeFacts())
    assert choose_step(quiet).chosen.action == "ScaleIn"
    held_back = PolicyInput(NOW + timedelta(hours=2), spec, calm, "auto", 3, 3, NodeFacts(), scale_in_backoff=TOO_FEW)
    assert choose_step(held_back).chosen.action != "ScaleIn"
