"""The status says why a group's pods cannot be created, although StatefulSets report that only in Events."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define, undefine
from kvpilot_localcluster.rest import Rest, until
from support.leader_workers import GROUP, LEADER_WORKER_SET_CRD
from support.operated import create, engine, exists, services, told

Json = dict[str, Any]
# The operator looks for a missing kind every half minute.
SECONDS = 600


@pytest.fixture(scope="module")
def groups(cluster: LocalCluster) -> Iterator[None]:
    """Install the CRD of LeaderWorkerSet without its controller."""
    define(cluster.rest, [LEADER_WORKER_SET_CRD])
    yield
    undefine(cluster.rest, LEADER_WORKER_SET_CRD)


def stateful_set(of: Json) -> Json:
    """Return the StatefulSet that LeaderWorkerSet would create for its leaders."""
    labels = {"app": of["metadata"]["name"]}
    template = of["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    return {
        "metadata": {"name": of["metadata"]["name"]},
        "spec": {
            "replicas": of["spec"]["replicas"],
            "serviceName": "none",
            "selector": {"matchLabels": labels},
            "template": {**template, "metadata": {**template["metadata"], "labels": labels}},
        },
    }


@pytest.mark.usefixtures("groups")
def test_a_quota_that_refuses_the_leaders_of_groups_is_reported_with_the_remedy(rest: Rest, namespace: str) -> None:
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    rest.create(quotas, {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "0"}}})
    until(lambda: rest.get(f"{quotas}/team")["status"].get("hard"), "the quota is in force")
    create(rest, namespace, **engine(nodes=2))
    sets = f"/apis/{GROUP}/v1/namespaces/{namespace}/leaderworkersets"
    until(lambda: rest.get(sets)["items"], "the operator has found the kind and creates a set", seconds=SECONDS)
    [made] = rest.get(sets)["items"]
    rest.create(f"/apis/apps/v1/namespaces/{namespace}/statefulsets", stateful_set(made))
    found = told(rest, namespace, "Stalled", "FailedCreate")
    assert found["status"] == "True"
    assert "exceeded quota: team" in found["message"]
    assert f"(LeaderWorkerSet {made['metadata']['name']})" in found["message"]
    assert told(rest, namespace, "Serving", "FailedCreate")["status"] == "False"


@pytest.mark.usefixtures("groups")
def test_a_group_is_created_only_after_the_service_owns_its_headless_service(rest: Rest, namespace: str) -> None:
    found = f"/api/v1/namespaces/{namespace}/services"
    sets = f"/apis/{GROUP}/v1/namespaces/{namespace}/leaderworkersets"
    create(rest, namespace, **engine(nodes=2))
    until(lambda: rest.get(sets)["items"], "the operator creates a set", seconds=SECONDS)
    name = rest.get(sets)["items"][0]["metadata"]["name"]
    made = rest.get(f"{found}/{name}")
    assert made["spec"]["clusterIP"] == "None"
    assert made["spec"]["publishNotReadyAddresses"] is True
    assert made["metadata"]["ownerReferences"][0]["name"] == "chat"
    rest.delete(f"{services(namespace)}/chat")
    until(lambda: not exists(rest, f"{sets}/{name}"), "the set is deleted")
    until(lambda: not exists(rest, f"{found}/{name}"), "the set's Service is deleted")
    ports = [{"port": 29501}]
    theirs = rest.create(found, {"metadata": {"name": name}, "spec": {"selector": {"app": "shop"}, "ports": ports}})
    create(rest, namespace, **engine(nodes=2))
    assert f"Service {namespace}/{name}" in told(rest, namespace, "Stalled", "NameTaken")["message"]
    assert rest.get(sets)["items"] == []
    assert rest.get(f"{found}/{name}")["spec"] == theirs["spec"]
