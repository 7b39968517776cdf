"""The disruption budget keeps enough replicas available and never blocks a node drain for ever."""

from __future__ import annotations

import pytest
from kubernetes.aio.client import V1PodDisruptionBudgetSpec

from kvpilot_operator.api.names import REVISION_LABEL
from kvpilot_operator.decide import decide
from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import manifest, running
from support.trials import NEW, at_every_moment, ended, on_trial, service, stage


def covered(cluster: ModelCluster) -> int:
    """Return the number of desired replicas among the pods that the budget selects."""
    assert cluster.budget is not None
    one = cluster.budget["selector"]["matchLabels"].get(REVISION_LABEL)
    return sum(count for name, (_, count) in cluster.deployments.items() if one in (None, name))


@pytest.mark.parametrize(("replicas", "least", "there"), [(1, 1, False), (2, 1, True), (2, 2, False), (3, 2, True)])
def test_a_budget_that_would_never_let_a_pod_leave_is_not_there(replicas, least, there):
    cluster = ModelCluster(service("auto", replicas, min_available=least))
    cluster.settle()
    assert (cluster.budget is not None) == there
    assert not there or cluster.budget["minAvailable"] == least < covered(cluster)


def test_an_autoscaler_that_goes_down_to_the_least_takes_the_budget_with_it():
    cluster = ModelCluster(service("auto", 3))
    cluster.settle()
    assert cluster.budget is not None
    cluster.edit(service("auto", 1))
    cluster.settle()
    assert cluster.budget is None
    cluster.edit(service("auto", 2))
    cluster.settle()
    assert cluster.budget is not None


def test_the_budget_stands_while_a_canary_has_the_place_of_a_replica_for_that_has_an_end():
    cluster = on_trial(2, capacityPolicy="ReplaceOne", steps=[])
    cluster.watch = at_every_moment
    cluster.until(stage("Probing"))
    assert cluster.budget["minAvailable"] == 1
    assert covered(cluster) == 1
    cluster.until(ended)
    cluster.settle()
    assert covered(cluster) == 2


def test_a_paused_trial_whose_canary_has_the_place_of_a_replica_has_no_budget_that_keeps_the_other_for_ever():
    cluster = on_trial(2, capacityPolicy="ReplaceOne", steps=[])
    cluster.until(stage("Probing"))
    cluster.edit(service(NEW, 2, capacityPolicy="ReplaceOne", steps=[], paused=True))
    for _ in range(20):
        cluster.tick()
    canary = parse_status(cluster.status).canary
    assert sorted(count for _, count in cluster.deployments.values()) == [1, 1]
    assert cluster.deployments[canary.revision][1] == 1
    assert cluster.budget is None
    cluster.edit(service(NEW, 2, capacityPolicy="ReplaceOne", steps=[]))
    cluster.until(ended)
    cluster.settle()
    assert cluster.budget is not None


def test_a_pod_that_is_not_ready_never_keeps_a_node():
    objects = decide(running(manifest(replicas=3), "auto")).objects
    (spec,) = (m["spec"] for m in objects.apply if m["kind"] == "PodDisruptionBudget")
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    known = V1PodDisruptionBudgetSpec.attribute_map.values()
    assert set(spec) <= set(known)
