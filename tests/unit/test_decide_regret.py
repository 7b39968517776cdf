"""A number of replicas that was too few is not tried again for a day."""

from __future__ import annotations

from datetime import timedelta

from kvpilot_operator.decide.judging.arbiter import Situation, arbitrate
from kvpilot_operator.decide.judging.regret import HOLD, SOON, held, remembered
from kvpilot_operator.decide.judging.workload import Workload
from kvpilot_operator.state.snapshot import NodeFacts
from kvpilot_operator.state.status import Regret
from support.services import NOW, manifest, spec_of

REGRET = Regret(dtype="auto", replicas=2, time=NOW)


def after(action, dtype="auto", replicas=2, minutes=10):
    return remembered(action, dtype, replicas, NOW, NOW - timedelta(minutes=minutes), None)


def test_relief_soon_after_a_scale_in_is_regretted_whatever_the_relief():
    assert after("ScaleOut") == (None, REGRET)
    assert after("DtypeDown") == (None, REGRET)


def test_relief_long_after_a_scale_in_is_not():
    given_back, regret = after("ScaleOut", minutes=SOON.total_seconds() / 60 + 1)
    assert regret is None
    assert given_back is not None


def test_a_scale_in_is_remembered_and_nothing_else_forgets_it():
    assert remembered("ScaleIn", "auto", 3, NOW, None, REGRET) == (NOW, REGRET)
    assert remembered("Stay", "auto", 3, NOW, NOW, REGRET) == (NOW, REGRET)


def test_as_few_replicas_of_that_dtype_are_held_for_a_day():
    assert "2 replicas of auto" in (held(NOW, "auto", 2, REGRET) or "")
    assert held(NOW, "auto", 1, REGRET) is not None
    assert held(NOW, "auto", 3, REGRET) is None
    assert held(NOW, "k8v4", 2, REGRET) is None
    assert held(NOW + HOLD, "auto", 2, REGRET) is None


def test_the_arbiter_gives_no_replica_back_that_was_regretted():
    spec = spec_of(manifest(scaling={"minReplicas": 1, "maxReplicas": 4}))
    calm = Workload("Relaxed", "evidence", usage_percent=5, pods=3, capacity_tokens=3000, calm=True, peak_load=0.1)
    quiet = Situation(NOW + timedelta(hours=2), spec, calm, "auto", 3, 3, NodeFacts())
    assert arbitrate(quiet).chosen.action == "ScaleIn"
    held_back = Situation(NOW + timedelta(hours=2), spec, calm, "auto", 3, 3, NodeFacts(), regret=REGRET)
    assert arbitrate(held_back).chosen.action != "ScaleIn"
