"""Without kvCache.mode, or after its removal, the operator does not change a service's dtype."""

import copy
from typing import Any

from support.crd import apply_defaults
from support.model_cluster import ModelCluster
from support.services import manifest

QUICK = {"pressure": {"sustainedSeconds": 30}, "minDwellSeconds": 0}
MANY = {"minReplicas": 1, "maxReplicas": 4, "scaleDownStabilizationSeconds": 60}


def service(**kv_cache: str) -> dict[str, Any]:
    """Return a service whose operator may choose dtypes and replicas. It has no mode unless `kv_cache` sets one."""
    obj = copy.deepcopy(manifest(scaling=MANY, canary={"steps": []}))
    obj["spec"]["kvCache"] = {**QUICK, "ladder": ["k8v4", "k4v4"], **kv_cache}
    return dict(apply_defaults(obj))


def served(cluster: ModelCluster) -> tuple[str, int]:
    """Return the serving dtype and its replica count."""
    stable = cluster.parsed().stable
    assert stable is not None
    return cluster.deployments[stable.revision]


def test_a_service_without_a_mode_only_recommends_under_pressure() -> None:
    cluster = ModelCluster(service(), demand=9000)
    for _ in range(60):
        cluster.tick()
        assert "canary" not in cluster.status
    assert served(cluster) == ("auto", 1)
    status = cluster.parsed()
    assert status.kv_cache.recommended_dtype == "k4v4"
    assert [one.action for one in status.decisions][:1] == ["Recommend"]


def test_in_mode_auto_a_service_under_pressure_changes_its_dtype() -> None:
    cluster = ModelCluster(service(mode="Auto"), demand=9000)
    cluster.until(lambda status: status.stable is not None and status.stable.dtype == "k4v4")


def test_a_service_whose_mode_is_removed_from_the_spec_keeps_its_dtype_under_any_load() -> None:
    cluster = ModelCluster(service(mode="Auto"), demand=9000)
    cluster.until(lambda status: status.stable is not None and status.stable.dtype == "k4v4")
    cluster.demand = 40_000
    cluster.until(lambda status: status.canary is None and (status.replicas or 0) > 1)
    cluster.settle()
    before = served(cluster)
    assert before[0] == "k4v4"
    cluster.edit(service())
    for demand in (0, 60_000):
        cluster.demand = demand
        for _ in range(60):
            cluster.tick()
            assert (served(cluster), "canary" in cluster.status) == (before, False)
