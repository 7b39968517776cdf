"""A canary that an operator of another version wrote, and this one cannot read: it may have traffic, so it is kept."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from kvpilot_operator.api.names import KIND
from kvpilot_operator.decide import decide
from support.kstatus import compute, seen
from support.model_cluster import ModelCluster
from support.service_states import after, settled
from support.services import KEY
from support.trials import OLD, ROUTE, ended, on_trial, service, stage

STAGES = ["Starting", "Probing", "Shifting", "Promoting"]


def unreadable(where: str, **asked: Any) -> tuple[ModelCluster, dict[str, Any]]:
    """A trial in this stage whose canary a newer operator has moved on, and its canary."""
    cluster = on_trial(**asked)
    cluster.until(stage(where))
    return cluster, write(cluster)


def write(cluster: ModelCluster) -> dict[str, Any]:
    canary = {**cluster.status["canary"], "stage": "Soaking", "soakedSeconds": 7}
    cluster.status = {**cluster.status, "canary": canary}
    return canary


def all_of(cluster: ModelCluster) -> Any:
    return deepcopy(
        (cluster.deployments, cluster.services, cluster.rules, cluster.shares(), cluster.budget, cluster.do_not_evict)
    )


def said(cluster: ModelCluster, kind: str) -> tuple[str, str, str]:
    (one,) = [one for one in cluster.status["conditions"] if one["type"] == kind]
    return one["status"], one["reason"], one["message"]


@pytest.mark.parametrize("where", STAGES)
@pytest.mark.parametrize("routed", [False, True])
def test_it_stays_with_its_traffic_until_it_can_be_read_and_its_trial_goes_on_then(where: str, routed: bool) -> None:
    spec = {"cluster": {"rules": ROUTE}, "routeRef": {"name": "web"}} if routed else {}
    cluster, canary = unreadable(where, **spec)
    before = all_of(cluster)
    for _ in range(40):
        cluster.tick()
    assert all_of(cluster) == before
    assert cluster.status["canary"] == canary
    cluster.status["canary"] = {**canary, "stage": where}
    assert cluster.until(ended).last_canary.stage == "Promoted"


@pytest.mark.parametrize("where", STAGES)
def test_an_edit_of_the_spec_moves_nothing_meanwhile(where: str) -> None:
    cluster, canary = unreadable(where)
    before = all_of(cluster)
    cluster.edit(service(OLD, 4))
    after(cluster, 40)
    assert (all_of(cluster), cluster.status["canary"]) == (before, canary)
    cluster.edit({**cluster.obj, "spec": {**cluster.obj["spec"], "replicas": -1}})
    after(cluster, 40)
    assert (all_of(cluster)[:-1], cluster.status["canary"]) == (before[:-1], canary)


def test_the_service_stalls_and_the_field_with_its_value_and_the_remedy_are_named_once() -> None:
    cluster, _ = unreadable("Shifting")
    decision = cluster.tick()
    assert decision is not None
    (event,) = decision.events
    assert (event.type, event.reason) == ("Warning", "CanaryUnreadable")
    newest = cluster.status["decisions"][0]
    assert (newest["action"], newest["reason"]) == ("Hold", "CanaryUnreadable")
    for text in (event.message, newest["message"], said(cluster, "Stalled")[2]):
        assert "status.canary" in text
        assert "Soaking" in text
        assert f"kubectl -n {KEY.namespace} patch qllm {KEY.name} --subresource=status" in text
    for kind, word in (
        ("Ready", "False"),
        ("Serving", "True"),
        ("Available", "True"),
        ("Progressing", "False"),
        ("CanaryHealthy", "Unknown"),
    ):
        assert said(cluster, kind)[0] == word
    assert compute(seen(cluster)) == "Failed"
    again = cluster.tick()
    assert again is not None
    assert again.events == ()
    assert cluster.status["decisions"][0] == newest


def test_where_the_user_removes_it_the_trial_ends_for_what_is_stable() -> None:
    cluster, _ = unreadable("Shifting")
    cluster.edit(service(OLD))
    after(cluster, 10)
    cluster.status = {key: value for key, value in cluster.status.items() if key != "canary"}
    cluster.settle()
    assert list(cluster.deployments.values()) == [(OLD, 3)]
    assert compute(seen(cluster)) == "Current"


@pytest.mark.parametrize("where", ["Probing", "Promoting"])
@pytest.mark.parametrize("refused", [False, True])
def test_pods_that_come_anew_get_requests_where_their_revision_serves(where: str, refused: bool) -> None:
    cluster = on_trial()
    serves = cluster.status["stable"]["revision"]
    if where == "Promoting":
        cluster.until(lambda s: cluster.traffic == s.canary.revision)
        serves = cluster.status["canary"]["revision"]
    else:
        cluster.until(stage(where))
    canary = write(cluster)
    if refused:  # by a definition of the older operator
        cluster.refuses = lambda one: "stage: Unsupported value" if one["kind"] == KIND else None
        decision = cluster.tick()
        assert decision is not None
        assert [one.reason for one in decision.events] == ["CanaryUnreadable"]
    for _ in range(cluster.deployments[serves][1]):
        cluster.engines.evict(serves)
    after(cluster, 10)
    ready = {one.name for one in cluster.snapshot().ready_pods(serves)}
    assert len(ready) == cluster.deployments[serves][1]
    assert cluster.status["canary"] == canary
    assert ("conditions" in cluster.status, said(cluster, "Stalled")[0]) == (True, "False" if refused else "True")


def test_a_canary_of_another_type_than_an_object_is_kept_too() -> None:
    cluster = settled()
    cluster.status = {**cluster.status, "canary": "soaking"}
    before = all_of(cluster)
    assert decide(cluster.snapshot()).objects is None
    after(cluster)
    assert (all_of(cluster), cluster.status["canary"]) == (before, "soaking")
