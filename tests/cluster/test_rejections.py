"""The status shows rejections by a real API server and its admission plugins (Kubernetes 1.20), with field and text."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpilot_localcluster.rest import ApiError, Rest, until
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.render.objects import workload
from kvpilot_operator.state.snapshot import ServiceKey
from support.operated import condition, create, engine, exists, placed, services, told
from support.services import manifest, spec_of

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Invalid service and the words that the message must have. `before` is created in the namespace first."""

    name: str
    reason: str
    words: tuple[str, ...]
    spec: Json = field(default_factory=dict)
    before: tuple[tuple[str, Json], ...] = ()


def quota(what: str, amount: str) -> tuple[tuple[str, Json], ...]:
    return (("resourcequotas", {"metadata": {"name": "team"}, "spec": {"hard": {what: amount}}}),)


def limit_range(**limits: Json) -> tuple[tuple[str, Json], ...]:
    spec = {"limits": [{"type": "Container", **limits}]}
    return (("limitranges", {"metadata": {"name": "team"}, "spec": spec}),)


CONTAINER = "spec.template.spec.containers[0]"
CASES = [
    Case(
        "requests-above-limits", "Invalid", (f"{CONTAINER}.resources.requests: ", "memory limit"),
        engine(resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}),
    ),
    Case("selector", "Invalid", ("spec.template.spec.nodeSelector: ", "a b"), placed(nodeSelector={"a b": "x"})),
    Case("service-account", "FailedCreate", ('serviceaccount "nope" not found',), placed(serviceAccountName="nope")),
    Case(
        "oci", "Rejected", ('volumes[name="model"].image', "spec.model.source", "pvc://"),
        {"model": {"source": "oci://example.org/m:1"}},
    ),
    Case("quota-of-pods", "FailedCreate", ("exceeded quota: team",), {}, quota("pods", "0")),
    Case("quota-of-services", "Forbidden", ("exceeded quota: team", "(Service chat)"), {}, quota("services", "0")),
    Case(
        "mount-of-no-volume", "Invalid", (f"{CONTAINER}.volumeMounts[", "nowhere"),
        engine(podTemplate={"spec": {"containers": [
            {"name": "engine", "volumeMounts": [{"name": "nowhere", "mountPath": "/a"}]}]}}),
    ),
    Case(
        "limit-range", "FailedCreate", ("maximum memory usage per Container is 1Gi",),
        engine(resources={"limits": {"cpu": "1", "memory": "4Gi"}}), limit_range(max={"memory": "1Gi"}),
    ),
    Case(
        "limit-range-below-our-requests", "FailedCreate", ("less than or equal to cpu limit", "spec.engine.resources"),
        engine(resources={"limits": {"nvidia.com/gpu": 1}}), limit_range(default={"cpu": "2"}),
    ),
    Case(
        "quota-of-cpu", "FailedCreate", ("exceeded quota: team", "requested: requests.cpu=3"),
        engine(resources={"limits": {"nvidia.com/gpu": 1}}), quota("requests.cpu", "2"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_refused_object_is_reported_with_the_servers_field_and_message(
    rest: Rest, namespace: str, case: Case
) -> None:
    for collection, body in case.before:
        rest.create(f"/api/v1/namespaces/{namespace}/{collection}", body)
        if collection == "resourcequotas":
            path = f"/api/v1/namespaces/{namespace}/{collection}/team"
            until(lambda path=path: rest.get(path)["status"].get("hard"), "the quota is in force")
    create(rest, namespace, **case.spec)
    found = told(rest, namespace, "Stalled", case.reason)
    assert found["status"] == "True"
    for words in case.words:
        assert words in found["message"]
    if "(Deployment " in found["message"]:
        # No engine exists, so the condition has no reason from an engine.
        ready = told(rest, namespace, "Ready", case.reason)
        assert ready["status"] == "False"
        assert case.words[0] in ready["message"]


def missing_class(rest: Rest, namespace: str) -> None:
    rest.create(
        "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": f"late-{namespace}"}, "value": 1}
    )  # fmt: skip


def raised_quota(rest: Rest, namespace: str) -> None:
    rest.merge(f"/api/v1/namespaces/{namespace}/resourcequotas/team", {"spec": {"hard": {"services": "5"}}})


@pytest.mark.parametrize("late", [missing_class, raised_quota])
def test_the_condition_clears_once_the_cause_is_gone(
    rest: Rest, namespace: str, late: Callable[[Rest, str], None]
) -> None:
    if late is raised_quota:
        rest.create(
            f"/api/v1/namespaces/{namespace}/resourcequotas",
            {"metadata": {"name": "team"}, "spec": {"hard": {"services": "0"}}},
        )
        path = f"/api/v1/namespaces/{namespace}/resourcequotas/team"
        until(lambda: rest.get(path)["status"].get("hard"), "the quota is in force")
    create(rest, namespace, **placed(priorityClassName=f"late-{namespace}") if late is missing_class else {})
    until(lambda: condition(rest, namespace, "Stalled").get("status") == "True", "refused")
    late(rest, namespace)
    until(lambda: condition(rest, namespace, "Stalled").get("status") == "False", "accepted", seconds=600)


def users_service(rest: Rest, namespace: str) -> Json:
    spec = {"selector": {"app": "shop"}, "ports": [{"port": 8080}]}
    made: Json = rest.create(f"/api/v1/namespaces/{namespace}/services", {"metadata": {"name": "chat"}, "spec": spec})
    return made


def test_a_users_service_with_our_name_is_never_changed(rest: Rest, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/services/chat"
    theirs = users_service(rest, namespace)
    create(rest, namespace)
    assert "rename the QuantizedLLMService" in told(rest, namespace, "Stalled", "NameTaken")["message"]
    assert rest.get(path)["spec"] == theirs["spec"]
    rest.delete(path)
    until(lambda: exists(rest, path), "our Service takes the name", seconds=600)
    until(lambda: rest.get(path)["spec"].get("selector"), "it selects our engines")
    theirs = replaced(rest, namespace, path)
    told(rest, namespace, "Stalled", "NameTaken")
    rest.delete(f"{services(namespace)}/chat")
    until(lambda: not exists(rest, f"{services(namespace)}/chat"), "the service is gone")
    found = rest.get(path)
    assert found["spec"] == theirs["spec"]
    assert not found["metadata"].get("labels")
    assert not found["metadata"].get("ownerReferences")


def replaced(rest: Rest, namespace: str, path: str) -> Json:
    """Replace the operator's Service with a user's Service, faster than the operator recreates its own."""
    made: list[Json] = []

    def quicker() -> bool:
        rest.delete(path)
        try:
            made.append(users_service(rest, namespace))
        except ApiError as error:
            assert error.status == 409
            return False
        return True

    until(quicker, "the user is quicker than the operator", seconds=600)
    return made[0]


def test_the_server_itself_refuses_to_merge_our_deployment_into_another_one(rest: Rest, namespace: str) -> None:
    """Check that server-side apply cannot change the immutable selector of another owner's Deployment."""
    key, spec = ServiceKey(namespace, "chat"), spec_of(manifest())
    ours = workload(key, "u-1", pod_template("chat", spec, "auto"), 1, 600)
    about = {"name": ours["metadata"]["name"], "namespace": namespace}
    labels = {"app": "shop"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "python:3.11"}]}}
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    theirs = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    rest.create(path, {"metadata": about, "spec": theirs})
    query = "fieldManager=kvpilot&force=true"
    with pytest.raises(ApiError) as caught:
        rest.call("PATCH", f"{path}/{about['name']}?{query}", ours, content="application/apply-patch+yaml")
    assert caught.value.status == 422
    causes = json.loads(caught.value.body)["details"]["causes"]
    assert "spec.selector" in [cause["field"] for cause in causes]
