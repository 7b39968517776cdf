"""Lease rules: which replica may claim the Lease, when, and with which content."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.cluster.lease import Candidate, Timing

WALL = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
TIMING = Timing(15)


def candidate(name="a"):
    return Candidate(name, "system", "kvpilot-operator", TIMING)


def held(by, *, renewed=0, seconds=15, **spec):
    time = (WALL + timedelta(seconds=renewed)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": by, "leaseDurationSeconds": seconds, "acquireTime": time, "renewTime": time, **spec}
    return {"metadata": {"namespace": "system", "name": "kvpilot-operator", "resourceVersion": "7"}, "spec": spec}


def test_every_write_ends_before_another_replica_may_lead():
    for lease in (5, 15, 300):
        timing = Timing(lease)
        assert timing.retry + timing.request < timing.renew_deadline < timing.write_deadline < timing.lease
    assert TIMING.look == 1
    assert (TIMING.retry, TIMING.request, TIMING.renew_deadline, TIMING.write_deadline) == (2, 5, 10, 14)


def test_a_lease_that_was_never_read_is_not_claimed():
    assert candidate().wait(1000.0) == 15


def test_another_holders_lease_is_claimed_one_duration_after_its_last_change():
    one = candidate()
    one.observe(held("b"), 100.0)
    assert one.wait(114.9) == pytest.approx(0.1)
    assert one.wait(115.0) == 0
    one.observe(held("b", renewed=2), 114.9)
    assert one.wait(115.0) == pytest.approx(14.9)
    one.observe(held("b", renewed=2), 120.0)
    assert one.wait(129.9) == 0


@given(st.integers(-(10**6), 10**6))
def test_the_holders_wall_clock_does_not_matter(skew):
    one = candidate()
    one.observe(held("b", renewed=skew), 100.0)
    assert one.wait(100.0) == 15
    assert one.wait(115.0) == 0


def test_a_longer_lease_duration_of_the_holder_is_respected():
    one = candidate()
    one.observe(held("b", seconds=60), 0.0)
    assert one.wait(59.0) == 1
    one.observe(held("b", seconds=5, renewed=1), 59.0)
    assert one.wait(59.0) == 15


@pytest.mark.parametrize("seconds", [None, 0, "soon"])
def test_a_lease_without_a_valid_duration_is_respected_for_our_own_duration(seconds):
    one = candidate()
    one.observe(held("b", seconds=seconds), 0.0)
    assert one.wait(14.0) == 1


def test_a_released_lease_is_claimed_at_once():
    one = candidate()
    one.observe(held("b"), 0.0)
    one.observe(held(""), 1.0)
    assert one.wait(1.0) == 0


def test_a_missing_lease_is_created_at_once_and_claimed_after_its_duration():
    one = candidate()
    one.observe(None, 0.0)
    assert one.wait(0.0) == 0
    created = one.claim(WALL, 0.0)
    assert one.blind
    one.observe(created, 1.0)
    assert one.wait(15.9) == pytest.approx(0.1)
    assert one.wait(16.0) == 0
    one.claim(WALL, 16.0)
    assert not one.blind


def test_a_leader_recreates_a_deleted_lease_as_its_own_before_its_deadline():
    one = candidate()
    one.renewed(held("a"), 20.0)
    one.observe(None, 22.0)
    one.claim(WALL, 29.9)
    assert not one.blind
    one.claim(WALL, 30.0)
    assert one.blind


def test_a_claim_whose_answer_was_lost_is_recognised_as_ours():
    one = candidate()
    one.observe(held("a"), 0.0)
    assert one.wait(0.0) == 0
    assert not one.lost()


def test_claiming_a_lease_counts_the_transition_and_keeps_the_metadata_of_others():
    one = candidate()
    lease = held("b", leaseTransitions=3)
    lease["metadata"]["labels"] = {"team": "serving"}
    one.observe(lease, 0.0)
    claim = one.claim(WALL, 0.0)
    assert claim["metadata"] == lease["metadata"]
    assert claim["spec"] == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-11-21T12:00:00.000000Z",
        "renewTime": "2026-11-21T12:00:00.000000Z",
        "leaseTransitions": 4,
    }


def test_a_renewal_changes_only_the_renew_time():
    one = candidate()
    lease = held("a", leaseTransitions=3)
    one.renewed(lease, 0.0)
    spec = one.claim(WALL + timedelta(seconds=2), 2.0)["spec"]
    assert spec == {**lease["spec"], "renewTime": "2026-11-21T12:00:02.000000Z"}


def test_the_first_lease_has_all_fields():
    one = candidate()
    one.observe(None, 0.0)
    claim = one.claim(WALL, 0.0)
    assert claim["metadata"] == {"namespace": "system", "name": "kvpilot-operator"}
    assert (claim["apiVersion"], claim["kind"]) == ("coordination.k8s.io/v1", "Lease")
    assert claim["spec"]["leaseTransitions"] == 0


def test_releasing_a_lease_clears_only_its_holder():
    one = candidate()
    one.renewed(held("a", leaseTransitions=3), 0.0)
    spec = one.release(WALL)["spec"]
    assert spec["holderIdentity"] == ""
    assert spec["leaseTransitions"] == 3


def test_the_renew_deadline_is_counted_from_before_the_renewal_was_sent():
    one = candidate()
    assert one.left(0.0) < 0
    one.renewed(held("a"), 100.0)
    assert one.left(109.0) == 1
    assert one.left(110.0) == 0
