"""The disruption budget keeps enough replicas available and never blocks a node drain for ever."""

import pytest
from kubernetes.aio.client import V1PodDisruptionBudgetSpec

from kvpilot_operator.api.names import REVISION_LABEL
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.traffic_plan import one_can_leave
from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import manifest, running, spec_of
from support.trials import NEW, at_every_moment, ended, on_trial, service, stage


def covered(cluster: ModelCluster) -> int:
    """Return the number of desired replicas among the pods that the budget selects."""
    assert cluster.budget is not None
    one = cluster.budget["selector"]["matchLabels"].get(REVISION_LABEL)
    return sum(count for name, (_, count) in cluster.deployments.items() if one in (None, name))


@pytest.mark.parametrize(
    ("most", "replicas", "away"),
    [(1, 1, 1), (1, 8, 1), (3, 2, 3), (0, 4, 0), ("25%", 8, 2), ("25%", 3, 1), ("0%", 3, 0), ("100%", 3, 3)],
)
def test_the_budget_follows_max_unavailable_and_rounds_percentages_up(most, replicas, away):
    cluster = ModelCluster(service("auto", replicas, max_unavailable=most))
    cluster.settle()
    assert cluster.budget["maxUnavailable"] == away


@pytest.mark.parametrize(("most", "leave"), [(1, False), ("50%", False), ("100%", True)])
def test_a_canary_replaces_the_last_replica_only_if_all_may_be_unavailable(most, leave):
    assert one_can_leave(spec_of(service("auto", 1, max_unavailable=most)), 1) is leave
    assert one_can_leave(spec_of(service("auto", 2, max_unavailable=most)), 2)


def test_a_replica_replaced_by_a_canary_counts_as_unavailable_in_the_budget():
    cluster = on_trial(2, capacityPolicy="ReplaceOne", steps=[])
    cluster.watch = at_every_moment
    cluster.until(stage("Probing"))
    assert cluster.budget["maxUnavailable"] == 0
    assert covered(cluster) == 1
    cluster.until(ended)
    cluster.settle()
    assert (covered(cluster), cluster.budget["maxUnavailable"]) == (2, 1)


def test_during_a_pause_a_replica_replaced_by_a_canary_does_not_block_drains():
    cluster = on_trial(2, capacityPolicy="ReplaceOne", steps=[])
    cluster.until(stage("Probing"))
    cluster.edit(service(NEW, 2, capacityPolicy="ReplaceOne", steps=[], paused=True))
    for _ in range(20):
        cluster.tick()
    canary = parse_status(cluster.status).canary
    assert sorted(count for _, count in cluster.deployments.values()) == [1, 1]
    assert cluster.deployments[canary.revision][1] == 1
    assert cluster.budget["maxUnavailable"] == 1


def test_a_pod_that_is_not_ready_never_blocks_a_drain():
    objects = decide(running(manifest(replicas=3), "auto")).objects
    (spec,) = (m["spec"] for m in objects.apply if m["kind"] == "PodDisruptionBudget")
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    known = V1PodDisruptionBudgetSpec.attribute_map.values()
    assert set(spec) <= set(known)
