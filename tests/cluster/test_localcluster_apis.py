"""The local cluster serves APIs that its Kubernetes 1.20 server lacks: policy/v1, and CRDs with CEL rules."""

import subprocess

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define, undefine
from kvpilot_localcluster.rest import ApiError, until
from kvpilot_localcluster.toolbox.kubectl import kubectl

DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "pairs.test.kvpilot.io"},
    "spec": {
        "group": "test.kvpilot.io",
        "scope": "Namespaced",
        "names": {"plural": "pairs", "kind": "Pair"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {"least": {"type": "integer"}, "most": {"type": "integer"}},
                                "x-kubernetes-validations": [{"rule": "self.least <= self.most"}],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def test_a_crd_is_served_with_its_rules_until_it_is_deleted(cluster: LocalCluster, namespace: str) -> None:
    pairs = f"/apis/test.kvpilot.io/v1/namespaces/{namespace}/pairs"
    bad = {
        "apiVersion": "test.kvpilot.io/v1", "kind": "Pair", "metadata": {"name": "a"}, "spec": {"least": 2, "most": 1},
    }  # fmt: skip
    define(cluster.rest, [DEFINITION])
    with pytest.raises(ApiError, match=r"failed rule: self\.least") as refused:
        cluster.rest.create(pairs, bad)
    assert refused.value.status == 422
    undefine(cluster.rest, DEFINITION)

    def gone() -> bool:
        try:
            cluster.rest.get("/apis/test.kvpilot.io/v1")
        except ApiError as error:
            return error.status == 404
        return False

    until(gone, "the aggregator's route is deleted")


def test_the_disruption_controller_handles_a_budget_of_policy_v1(cluster: LocalCluster, namespace: str) -> None:
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    body = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "a"},
        "spec": {
            "minAvailable": 1,
            "selector": {"matchLabels": {"app": "a"}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
    path = f"{budgets}/a?fieldManager=test"
    made = cluster.rest.call("PATCH", path, body, content="application/apply-patch+yaml")
    assert (made["apiVersion"], made["spec"]["minAvailable"]) == ("policy/v1", 1)
    until(lambda: cluster.rest.get(f"{budgets}/a").get("status", {}).get("observedGeneration"), "its status is written")
    (listed,) = cluster.rest.get(budgets)["items"]
    assert listed["metadata"]["uid"] == made["metadata"]["uid"]
    cluster.rest.delete(f"{budgets}/a")
    assert cluster.rest.get(budgets)["items"] == []


def test_requests_to_policy_v1_run_with_the_users_rights(cluster: LocalCluster, namespace: str) -> None:
    command = [kubectl(), "--kubeconfig", cluster.kubeconfig, "--as=nobody", "--namespace", namespace]
    command += ["get", "poddisruptionbudgets.v1.policy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 1
    assert 'User "nobody" cannot list resource "poddisruptionbudgets"' in done.stderr
