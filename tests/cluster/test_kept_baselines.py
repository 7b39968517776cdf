"""Baselines on a real API server: the operator keeps few, and never reads or deletes other objects with their label."""

from collections.abc import AsyncIterator

import pytest_asyncio
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from kvpilot_localcluster.controlplane import ControlPlane
from kvpilot_operator.act.perform import MAX_KEPT, MAX_SEEN, Actor
from kvpilot_operator.api.names import SERVICE_LABEL
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.state.decision import Decision
from kvpilot_probes.codec import Baseline
from support.services import KEY, manifest, snapshot

MAPS = f"/api/v1/namespaces/{KEY.namespace}/configmaps"


@pytest_asyncio.fixture
async def cluster(plane: ControlPlane) -> AsyncIterator[Cluster]:
    configuration = Configuration()
    await config.load_kube_config(config_file=str(plane.kubeconfig), client_configuration=configuration)
    cluster = Cluster(ApiClient(configuration))
    yield cluster
    await cluster.close()


async def test_old_baselines_are_deleted_without_reading_a_tenants_many_large_config_maps(
    plane: ControlPlane, cluster: Cluster
) -> None:
    # These objects come after the baselines in a list, and are older.
    large = {"filler": "x" * 50_000}
    for number in range(2 * MAX_SEEN):
        about = {"name": f"zzz-{number}", "labels": {SERVICE_LABEL: KEY.name}}
        plane.rest.create(MAPS, {"metadata": about, "data": large})
    listed = [
        one async for one in cluster.metadata("v1", "ConfigMap", KEY.namespace, f"{SERVICE_LABEL}={KEY.name}", most=8)
    ]
    assert len(listed) == 8
    assert all("data" not in one and one["name"].startswith("zzz-") for one in listed)
    observed = snapshot(manifest())
    for number in range(2 * MAX_KEPT):
        baseline = Baseline(f"{number:08d}", "org/model", "auto", ())
        await Actor(cluster).perform(observed, Decision(observed.status, baseline=baseline))
    names = {
        one["metadata"]["name"] for one in plane.rest.get(f"{MAPS}?labelSelector={SERVICE_LABEL}={KEY.name}")["items"]
    }
    kept = {name for name in names if not name.startswith("zzz-")}
    assert len(kept) == MAX_KEPT
    assert len(names) == MAX_KEPT + 2 * MAX_SEEN
