"""A PersistentVolumeClaim for weights, on a real API server (Kubernetes 1.20) with its controllers and admission."""

from typing import Any

import pytest

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import Rest, until
from support.operated import condition, create, exists, services, told
from support.operator_pair import Operator

Json = dict[str, Any]
SECONDS = 600


@pytest.fixture(scope="module", autouse=True)
def waiting(cluster: LocalCluster, operator: Operator) -> str:
    """Create a service whose pod waits for a volume.

    A later test reads the condition that reports this after a minute.
    """
    rest, namespace = cluster.rest, "waiting"
    rest.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    rest.create(
        "/apis/storage.k8s.io/v1/storageclasses",
        {
            "metadata": {"name": f"class-{namespace}"},
            "provisioner": "example.org/none",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
    )
    create(rest, namespace, **weights("1Gi", storageClassName=f"class-{namespace}"))
    return namespace


def claim(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/chat-weights"


def weights(size: str, **more: str) -> Json:
    return {"cache": {"weights": {"size": size, **more}}}


def ask(rest: Rest, namespace: str, size: str, **more: str) -> None:
    rest.merge(f"{services(namespace)}/chat", {"spec": weights(size, **more)})


def bound(rest: Rest, namespace: str, *, grows: bool) -> str:
    """Create a service with a claim of 2 GiB, and return its storage class. `grows` lets the class resize claims."""
    name = f"class-{namespace}"
    rest.create(
        "/apis/storage.k8s.io/v1/storageclasses",
        {"metadata": {"name": name}, "provisioner": "example.org/none", "allowVolumeExpansion": grows},
    )
    rest.create(
        "/api/v1/persistentvolumes",
        {
            "metadata": {"name": f"disk-{namespace}"},
            "spec": {
                "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": name,
                "hostPath": {"path": f"/tmp/{namespace}"},  # noqa: S108 - nobody mounts it
            },
        },
    )  # fmt: skip
    create(rest, namespace, **weights("2Gi", storageClassName=name))
    until(lambda: exists(rest, claim(namespace)), "the claim is made")
    until(lambda: rest.get(claim(namespace)).get("status", {}).get("phase") == "Bound", "the claim is bound")
    return name


def test_a_claim_is_bound_and_grows_if_its_class_allows_it(rest: Rest, namespace: str) -> None:
    name = bound(rest, namespace, grows=True)
    ask(rest, namespace, "5Gi")
    until(lambda: rest.get(claim(namespace))["spec"]["resources"]["requests"]["storage"] == "5Gi", "claim resized")
    assert condition(rest, namespace, "Stalled")["status"] == "False"
    ask(rest, namespace, "3Gi")
    found = told(rest, namespace, "Stalled", "Invalid")
    assert "spec.cache.weights: a claim keeps its class" in found["message"]
    assert rest.get(claim(namespace))["spec"]["resources"]["requests"]["storage"] == "5Gi"
    # The spec names the claim's actual size again, so the server refuses nothing.
    ask(rest, namespace, "5Gi")
    until(lambda: condition(rest, namespace, "Stalled")["status"] == "False", "nothing is refused")
    assert rest.get(claim(namespace))["spec"]["storageClassName"] == name


@pytest.mark.parametrize(
    ("size", "more", "reason"),
    [
        ("5Gi", {}, "Forbidden"),
        ("2Gi", {"storageClassName": "other"}, "Invalid"),
        ("2Gi", {"accessMode": "ReadWriteOnce"}, "Invalid"),
    ],
)
def test_an_impossible_change_of_a_claim_is_reported_with_the_remedy(
    rest: Rest, namespace: str, size: str, more: dict[str, str], reason: str
) -> None:
    bound(rest, namespace, grows=False)
    before = rest.get(claim(namespace))["spec"]
    ask(rest, namespace, size, **more)
    found = told(rest, namespace, "Stalled", reason)
    assert found["status"] == "True"
    assert ("a claim keeps its class" if reason == "Invalid" else "can be resized") in found["message"]
    assert rest.get(claim(namespace))["spec"] == before


def test_the_claim_is_deleted_with_the_service(rest: Rest, namespace: str) -> None:
    create(rest, namespace, **weights("1Gi"))
    until(lambda: exists(rest, claim(namespace)), "the claim is made")
    rest.delete(f"{services(namespace)}/chat")
    until(lambda: not exists(rest, claim(namespace)), "the claim is deleted")


@pytest.mark.parametrize("more", [{}, {"storageClassName": "nobody-has-this"}])
def test_a_claim_whose_class_makes_no_volume_is_reported_with_the_remedy(
    rest: Rest, namespace: str, more: dict[str, str]
) -> None:
    create(rest, namespace, **weights("1Gi", **more))
    found = told(rest, namespace, "Ready", "ClaimNotBound")
    assert more.get("storageClassName", "the cluster's default StorageClass") in found["message"]
    assert "accessMode ReadWriteOnce" in found["message"]
    assert rest.get(claim(namespace))["status"]["phase"] == "Pending"


def test_a_quota_on_storage_is_reported(rest: Rest, namespace: str) -> None:
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    rest.create(quotas, {"metadata": {"name": "team"}, "spec": {"hard": {"requests.storage": "1Gi"}}})
    until(lambda: rest.get(f"{quotas}/team")["status"].get("hard"), "the quota is in force")
    create(rest, namespace, **weights("2Gi"))
    found = told(rest, namespace, "Stalled", "Forbidden")
    assert "exceeded quota: team" in found["message"]


def test_no_engine_starts_with_another_owners_claim(rest: Rest, namespace: str) -> None:
    asked = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    theirs = rest.create(claims, {"metadata": {"name": "chat-weights"}, "spec": asked})
    create(rest, namespace, **weights("2Gi"))
    for kind in ("Stalled", "Ready"):
        assert "spec.cache.weightsClaimName" in told(rest, namespace, kind, "NameTaken")["message"]
    started = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    assert rest.get(started)["items"] == []
    assert rest.get(claim(namespace))["spec"] == theirs["spec"]
    rest.delete(claim(namespace))
    until(lambda: rest.get(started)["items"], "the operator requests an engine", seconds=SECONDS)
    (owner,) = rest.get(claim(namespace))["metadata"]["ownerReferences"]
    assert owner["name"] == "chat"


def test_a_missing_volume_is_reported_before_the_scheduler_gives_up(rest: Rest, waiting: str) -> None:
    found = told(rest, waiting, "Ready", "ClaimNotBound", seconds=SECONDS)
    assert f"of StorageClass class-{waiting}" in found["message"]
    assert "The scheduler says: nothing about pod chat-" in found["message"]
    assert rest.get(claim(waiting))["status"]["phase"] == "Pending"
