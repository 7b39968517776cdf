"""The audit-log check finds each write that a replica made outside its term as leader."""

import json

import pytest

from kvpilot_localcluster.audit import misplaced, terms, writes

LEASE = "system/kvpilot-operator"


def event(user, at, *, until=None, holder=None, version=0, code=200, verb="patch"):
    found = {
        "stage": "ResponseComplete",
        "verb": verb,
        "requestURI": "/apis/apps/v1/namespaces/a/deployments/b?fieldManager=kvpilot",
        "user": {"username": user},
        "objectRef": {"resource": "deployments", "namespace": "a", "name": "b"},
        "requestReceivedTimestamp": f"2026-11-21T12:00:{at:09.6f}Z",
        "stageTimestamp": f"2026-11-21T12:00:{until or at + 0.01:09.6f}Z",
        "responseStatus": {"code": code},
    }
    if holder is not None:
        found["objectRef"] = {"resource": "leases", "namespace": "system", "name": "kvpilot-operator"}
        found["responseObject"] = {"metadata": {"resourceVersion": str(version)}, "spec": {"holderIdentity": holder}}
    return found


def lease(holder, at, version, **more):
    return event(holder or "a", at, holder=holder, version=version, **more)


# Replica a leads from second 1 and releases the Lease at 10. Replica b leads from 12 and does not release it. Replica c
# takes over at 30.
TERMS = [lease("a", 1, 8), lease("a", 3, 9), lease("", 10, 10), lease("b", 12, 11), lease("c", 30, 12)]


def faults(tmp_path, *events):
    log = tmp_path / "audit.log"
    log.write_text("".join(json.dumps(one) + "\n" for one in [*TERMS, *events]) + '{"stage": "Resp')
    return misplaced(writes(log), LEASE, lambda write: write.user)


def test_the_terms_of_leaders_follow_the_leases_resource_versions(tmp_path):
    log = tmp_path / "audit.log"
    refused = lease("z", 5, 3, code=409)
    log.write_text("".join(json.dumps(one) + "\n" for one in [*reversed(TERMS), refused]))
    found = terms(writes(log), LEASE)
    assert [term.holder for term in found] == ["a", "b", "c"]
    assert [term.claimed.second for term in found] == [1, 12, 30]
    assert [term.released and term.released.second for term in found] == [10, None, None]
    assert [term.followed and term.followed.second for term in found] == [12, 30, None]


@pytest.mark.parametrize(("user", "at"), [("a", 1.5), ("a", 9.9), ("b", 12.5), ("b", 29.5), ("c", 31)])
def test_a_write_within_its_leaders_term_is_not_a_fault(tmp_path, user, at):
    assert faults(tmp_path, event(user, at)) == []


@pytest.mark.parametrize(("user", "at"), [("a", 0.5), ("a", 10.5), ("a", 13), ("b", 11), ("b", 30.5), ("d", 20)])
def test_a_write_outside_its_leaders_term_is_a_fault(tmp_path, user, at):
    (fault,) = faults(tmp_path, event(user, at))
    assert fault.endswith(f"{user}: patch /apis/apps/v1/namespaces/a/deployments/b: 200")


def test_a_write_that_ends_after_the_next_claim_is_a_fault(tmp_path):
    assert faults(tmp_path, event("b", 29, until=30.5))


def test_an_answer_that_is_logged_after_its_leaders_release_is_not_a_fault(tmp_path):
    assert faults(tmp_path, event("a", 9.999, until=10.001)) == []


def test_a_refused_write_outside_its_leaders_term_is_a_fault_too(tmp_path):
    assert faults(tmp_path, event("b", 1.5, code=409))


def test_without_a_lease_every_write_is_a_fault(tmp_path):
    log = tmp_path / "audit.log"
    log.write_text(json.dumps(event("a", 1)) + "\n")
    assert misplaced(writes(log), LEASE, lambda write: write.user)
