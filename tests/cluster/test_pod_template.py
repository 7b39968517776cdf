"""engine.podTemplate on a real API server (Kubernetes 1.20, RBAC, admission): resulting pods and required rights."""

import copy
import json
from typing import Any

import pytest

from kvpilot_localcluster import certs
from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.rest import ApiError, Rest, until
from support.operated import condition, create, engine, placed, services, told
from support.rights import until_may

Json = dict[str, Any]
TEMPLATE: Json = {
    "metadata": {"labels": {"team": "search"}, "annotations": {"example.org/owner": "search"}},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "volumeMounts": [{"name": "files", "mountPath": "/files", "readOnly": True}],
                "securityContext": {"readOnlyRootFilesystem": True, "capabilities": {"add": ["CHOWN"]}},
            },
            {
                "name": "proxy",
                "image": "python:3.11",
                "command": ["sleep", "1000"],
                "ports": [{"containerPort": 8443, "name": "https"}],
                "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}],
                "envFrom": [{"configMapRef": {"name": "c", "optional": True}}],
                "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
                "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 7},
                "volumeMounts": [{"name": "shm", "mountPath": "/shm"}, {"name": "files", "mountPath": "/files"}],
                "securityContext": {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}},
            },
        ],
        "initContainers": [{"name": "fetch", "image": "python:3.11", "args": ["fetch"], "imagePullPolicy": "Never"}],
        "volumes": [
            {
                "name": "files",
                "projected": {
                    "sources": [
                        {"configMap": {"name": "c", "optional": True, "items": [{"key": "a", "path": "b"}]}},
                        {"serviceAccountToken": {"path": "token", "audience": "vault", "expirationSeconds": 3600}},
                    ],
                    "defaultMode": 288,
                },
            },
            {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
            {"name": "certificates", "secret": {"secretName": "s", "optional": True}},
            {"name": "more", "csi": {"driver": "csi.example.org", "volumeAttributes": {"a": "b"}}},
            {"name": "shared", "nfs": {"server": "files.example.org", "path": "/models"}},
        ],
        "schedulerName": "volcano",
        "securityContext": {"supplementalGroups": [44], "fsGroup": 1000},
    },
}


def missing(asked: Any, found: Any, path: str) -> list[str]:
    """Return the paths at which the stored object differs from the request. Match items of object lists by name."""
    if isinstance(asked, dict):
        return [
            one for key, value in asked.items()
            for one in (missing(value, found[key], f"{path}.{key}") if key in found else [f"{path}.{key}"])
        ]  # fmt: skip
    if isinstance(asked, list) and asked and isinstance(asked[0], dict):
        keys = [key for key in ("mountPath", "name", "containerPort") if key in asked[0]]
        if keys:
            there = {item.get(keys[0]): item for item in found}
            return [
                f for item in asked for f in missing(item, there.get(item[keys[0]], {}), f"{path}[{item[keys[0]]}]")
            ]
        return [f for i, item in enumerate(asked) for f in missing(item, found[i], f"{path}[{i}]")]
    return [] if asked == found else [path]


def deployment(rest: Rest, namespace: str) -> Json:
    """Return the Deployment of `chat` once it exists."""
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    found: Json = until(lambda: rest.get(path)["items"], "the engine's Deployment")[0]
    return found


def test_pods_have_every_requested_field_and_kvpilots_own_fields(rest: Rest, namespace: str) -> None:
    create(rest, namespace, **engine(podTemplate=TEMPLATE))
    template = deployment(rest, namespace)["spec"]["template"]
    assert missing(TEMPLATE, template, "template") == []
    (one, other) = template["spec"]["containers"]
    assert (one["name"], other["name"]) == ("engine", "proxy")
    assert one["command"] == ["kvpilot-serve"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in one["volumeMounts"]  # noqa: S108
    assert one["securityContext"]["capabilities"] == {"add": ["CHOWN"], "drop": ["ALL"]}
    assert template["spec"]["securityContext"]["runAsUser"] == 65532
    assert condition(rest, namespace, "Stalled")["status"] == "False"


def test_a_spec_with_host_access_starts_no_pod_and_is_reported(rest: Rest, namespace: str) -> None:
    create(rest, namespace, **engine(podTemplate={"spec": {"hostNetwork": True}}))
    found = told(rest, namespace, "Stalled", "SpecInvalid")
    assert found["message"].startswith("spec.engine.podTemplate.spec.hostNetwork: is true")
    assert "engines.hostAccess" in found["message"]
    assert rest.get(f"/apis/apps/v1/namespaces/{namespace}/deployments")["items"] == []
    rest.merge(f"{services(namespace)}/chat", {"spec": {"engine": {"podTemplate": None}}})
    assert "hostNetwork" not in deployment(rest, namespace)["spec"]["template"]["spec"]


def test_a_failing_init_container_is_named_in_the_status(rest: Rest, namespace: str) -> None:
    failing = {"name": "fetch", "image": "python:3.11", "command": ["python3", "-c", "raise SystemExit(3)"]}
    create(rest, namespace, **engine(podTemplate={"spec": {"initContainers": [failing]}}))
    found = told(rest, namespace, "Serving", "CrashLoopBackOff")
    assert found["message"] == "container fetch: Error with code 3"


def test_a_missing_secret_of_a_volume_is_named_in_the_status(rest: Rest, namespace: str) -> None:
    volume = {"name": "certificates", "secret": {"secretName": "certificates"}}
    create(rest, namespace, **engine(podTemplate={"spec": {"volumes": [volume]}}))
    found = told(rest, namespace, "Serving", "ContainerCreating")
    assert "It needs Secret certificates." in found["message"]
    secret = {"metadata": {"name": "certificates"}, "stringData": {"tls.crt": "x"}}
    rest.create(f"/api/v1/namespaces/{namespace}/secrets", secret)
    until(lambda: condition(rest, namespace, "Serving")["reason"] != "ContainerCreating", "the pod starts")


def user(cluster: LocalCluster, namespace: str, role: str) -> Rest:
    """Return a client that has only this ClusterRole, in this namespace."""
    name = f"{role}-of-{namespace}"
    bound = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}],
    }
    cluster.rest.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", bound)
    until_may(cluster.rest, name, resourceAttributes={"namespace": namespace, "verb": "list", "resource": "pods"})
    certs.certificate(cluster.plane.folder, name, f"/CN={name}")
    return Rest.of_kubeconfig(certs.kubeconfig(cluster.plane.folder, name, cluster.rest.server))


def by_hand(theirs: Rest, namespace: str, template: Json) -> None:
    """Create a Deployment and a pod with this template by dry runs."""
    labels = {"made": "by-hand"}
    template = copy.deepcopy(template)
    template["metadata"]["labels"] |= labels
    spec = {"selector": {"matchLabels": labels}, "template": template}
    apps, core = f"/apis/apps/v1/namespaces/{namespace}", f"/api/v1/namespaces/{namespace}"
    theirs.create(f"{apps}/deployments?dryRun=All", {"metadata": {"name": "by-hand"}, "spec": spec})
    pod = {"metadata": {"name": "by-hand", "labels": labels}, "spec": template["spec"]}
    theirs.create(f"{core}/pods?dryRun=All", pod)


def test_the_operator_creates_only_pods_that_the_tenant_could_create(
    rest: Rest, cluster: LocalCluster, namespace: str
) -> None:
    rest.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "models"}})
    create(
        rest,
        namespace,
        **engine(podTemplate={**TEMPLATE, "spec": {**TEMPLATE["spec"], "serviceAccountName": "models"}}),
    )
    template = deployment(rest, namespace)["spec"]["template"]
    tenant = user(cluster, namespace, "edit")
    until(lambda: tenant.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/models").get("secrets"), "its token")
    by_hand(tenant, namespace, template)
    with pytest.raises(ApiError, match="cannot create resource"):
        by_hand(user(cluster, namespace, "view"), namespace, template)


def test_a_quota_on_a_priority_class_applies_to_engines(rest: Rest, cluster: LocalCluster, namespace: str) -> None:
    high = f"high-{namespace}"
    rest.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": high}, "value": 1000})
    scope = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": [high]}]}
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    rest.create(quotas, {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "0"}, "scopeSelector": scope}})
    until(lambda: rest.get(f"{quotas}/team")["status"].get("hard"), "the quota is in force")
    create(rest, namespace, **placed(priorityClassName=high))
    found = told(rest, namespace, "Stalled", "FailedCreate")
    assert "exceeded quota: team" in found["message"]
    assert rest.get(f"/api/v1/namespaces/{namespace}/pods")["items"] == []
    template = deployment(rest, namespace)["spec"]["template"]
    with pytest.raises(ApiError) as caught:
        by_hand(user(cluster, namespace, "edit"), namespace, template)
    assert "exceeded quota: team" in json.loads(caught.value.body)["message"]
    rest.merge(f"{services(namespace)}/chat", {"spec": {"engine": {"podTemplate": None}}})
    until(lambda: condition(rest, namespace, "Stalled").get("status") == "False", "the default pods are admitted")
