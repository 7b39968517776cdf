"""A server with the LeaderWorkerSet CRD accepts the operator's sets."""

from collections.abc import Iterator

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define, undefine
from kvpilot_localcluster.rest import ApiError, Rest
from kvpilot_operator.act.ownership import claim
from kvpilot_operator.observe.views import deployment_view
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.render.objects import workload
from kvpilot_operator.state.snapshot import ServiceKey
from support.leader_workers import LEADER_WORKER_SET_CRD
from support.services import manifest, spec_of

KEY = ServiceKey("default", "chat")
SETS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"


@pytest.fixture(scope="module")
def server(cluster: LocalCluster) -> Iterator[Rest]:
    """Yield the API server with the CRD of LeaderWorkerSet."""
    rest = cluster.rest
    define(rest, [LEADER_WORKER_SET_CRD])
    yield rest
    undefine(rest, LEADER_WORKER_SET_CRD)


def test_the_api_server_stores_a_leader_worker_set_and_its_placeholder_unchanged(server: Rest) -> None:
    template = pod_template(KEY.name, spec_of(manifest(engine={"nodes": 4})), "k4v4")
    whole = workload(KEY, "u-1", template, 3, 600, nodes=4)
    for made in (whole, claim(whole)):
        stored = server.create(f"{SETS}?dryRun=All", made)
        assert stored["spec"] == {**whole["spec"], "startupPolicy": "LeaderCreated"}
        view = deployment_view(stored, "LeaderWorkerSet")
        assert (view.replicas, view.nodes, view.dtype, view.has_gate) == (3, 4, "k4v4", True)


def test_an_unknown_restart_policy_is_refused(server: Rest) -> None:
    template = pod_template(KEY.name, spec_of(manifest(engine={"nodes": 2})), "auto")
    made = workload(KEY, "u-1", template, 1, 600, nodes=2)
    made["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Sometimes"
    with pytest.raises(ApiError) as refused:
        server.create(f"{SETS}?dryRun=All", made)
    assert refused.value.status == 422
