"""If the API server rejects a trial's engines, stable is unaffected, and the trial continues once they are accepted."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.state.status import parse_status
from support.model_cluster import ModelCluster
from support.services import KEY, revision_of
from support.trials import NEW, OLD, ROUTE, at_every_moment, ended, on_trial, service, stage

TAKEN = "Service models/chat-canary exists and has another owner"
QUOTA = "exceeded quota: team, requested: count/deployments.apps=1, used: x=1, limited: x=1"


def refusing(cluster: ModelCluster, dtype: str = NEW) -> None:
    """Make the API server reject the Deployment of this dtype."""
    revision = revision_of(cluster.obj, dtype)

    def refuses(manifest: dict[str, Any]) -> str | None:
        return QUOTA if manifest["kind"] == "Deployment" and manifest["metadata"]["name"].endswith(revision) else None

    cluster.refuses = refuses


@pytest.mark.parametrize("policy", ["Surge", "ReplaceOne", "SurgeOrReplaceOne"])
def test_no_replica_is_removed_for_a_refused_canary(policy: str) -> None:
    cluster = on_trial(3, capacityPolicy=policy)
    refusing(cluster)
    cluster.watch = at_every_moment
    for _ in range(40):
        cluster.tick()
        assert [count for _, count in cluster.deployments.values()] == [3]
        assert cluster.answering() == 3
    status = parse_status(cluster.status)
    assert status.canary is not None
    told = status.condition("Reconciling")
    assert told is not None
    assert told.status == "True"
    assert QUOTA in told.message
    cluster.refuses = lambda _: None
    assert cluster.until(ended).kv_cache.active_dtype == NEW


def test_a_service_is_scaled_while_its_trial_is_refused() -> None:
    cluster = on_trial(3)
    refusing(cluster)
    for _ in range(5):
        cluster.tick()
    for replicas in (2, 4):
        cluster.edit(service(NEW, replicas))
        for _ in range(5):
            cluster.tick()
        assert [count for _, count in cluster.deployments.values()] == [replicas]


def test_a_refused_trial_ends_at_its_deadline_with_the_refusal() -> None:
    cluster = on_trial(3)
    refusing(cluster)
    last = cluster.until(ended).last_trial
    assert last is not None
    assert last.reason == "ProgressDeadlineExceeded"
    assert QUOTA in last.message
    assert list(cluster.deployments.values()) == [(OLD, 3)]


def test_a_canarys_service_of_another_owner_gets_no_requests() -> None:
    cluster = on_trial(3, cluster={"rules": ROUTE}, routeRef={"name": "web"})
    cluster.refuses = lambda manifest: TAKEN if manifest["metadata"]["name"] == f"{KEY.name}-canary" else None
    cluster.watch = at_every_moment
    cluster.until(stage("Shifting"))
    for _ in range(10):
        cluster.tick()
        assert cluster.rules == ROUTE
    told = parse_status(cluster.status).condition("Reconciling")
    assert told is not None
    assert TAKEN in told.message
    cluster.refuses = lambda _: None
    assert cluster.until(ended).kv_cache.active_dtype == NEW


def test_a_refused_baseline_ends_the_trial_and_delays_nothing_else() -> None:
    cluster = on_trial(3)
    cluster.refuses = lambda manifest: QUOTA if manifest["kind"] == "ConfigMap" else None
    cluster.until(lambda s: s.canary is not None and s.canary.errors > 0)
    cluster.drop_services()
    cluster.until(lambda s: s.canary is not None and s.canary.errors > 1)
    assert cluster.traffic == revision_of(service(OLD), OLD)
    status = cluster.until(ended)
    assert status.accuracy.baseline is None
    assert status.last_trial is not None
    assert status.last_trial.reason == "BaselineLost"
    assert QUOTA in status.last_trial.message
    assert list(cluster.deployments.values()) == [(OLD, 3)]


@pytest.mark.slow
@given(
    cuts=st.dictionaries(st.integers(0, 60), st.integers(0, 4), max_size=12),
    refused=st.sets(st.integers(0, 60), max_size=40),
    policy=st.sampled_from(["Surge", "ReplaceOne"]),
)
@settings(max_examples=10, deadline=None)
def test_kills_and_refusals_at_any_write_do_not_change_how_a_trial_ends(
    cuts: dict[int, int], refused: set[int], policy: str
) -> None:
    cluster = on_trial(3, capacityPolicy=policy)
    cluster.watch = at_every_moment
    for tick in range(60):
        cluster.refuses = lambda _: None
        if tick in refused:
            refusing(cluster)
        cluster.tick(cut_after=cuts.get(tick))
    cluster.refuses = lambda _: None
    status = cluster.until(lambda s: s.canary is None and s.kv_cache.active_dtype == NEW)
    assert status.condition("Stalled") is not None
    assert list(cluster.deployments.values()) == [(NEW, 3)]
