"""The chart on a real API server: install, test, upgrade, uninstall. The operator has only the rights of its roles.

Pods use only the token of the chart's ServiceAccount (operator_image.py). If a role lacks a verb, the operator's log
has a rejection.
"""

import http.client
import re
import urllib.request
from pathlib import Path

import pytest
import yaml

from kvpilot_localcluster.pod import LOGS_ANNOTATION
from kvpilot_localcluster.rest import HANGS, ApiError, until
from kvpilot_localcluster.toolbox.helm import HelmRefused, render, run_helm
from kvpilot_operator.api.faults import faults

pytestmark = pytest.mark.timeout(1800)

HOME = "kvpilot-system"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/quantizedllmservices.kvpilot.io"

# The local API server (Kubernetes 1.20) publishes CRDs without CEL rules, so Helm must not validate against them.
UNCHECKED = "--disable-openapi-validation"

VERBS = {"GET": "get", "LIST": "list", "WATCH": "watch", "POST": "create", "PATCH": "patch", "PUT": "update"}
NOT_USED_HERE = {
    # The audit log records a watch only when it ends, after five minutes. Later checks fail if a watch is not allowed.
    *(("watch", kind) for kind in ("quantizedllmservices", "deployments", "pods", "services")),
    # The operator gets a service by name only after a conflict. It patches the status, which is a separate resource.
    ("get", "quantizedllmservices"),
    ("patch", "quantizedllmservices/status"),
    # This write opens a readiness gate. The audit log lists it as a write to the pod.
    ("patch", "pods/status"),
    # Only an admission plugin checks this right, and that plugin is off here.
    ("update", "quantizedllmservices/finalizers"),
    # This API server lacks the Gateway API, its extension and LeaderWorkerSet.
    *((verb, "httproutes") for verb in ("get", "patch")),
    *((verb, "inferencepools") for verb in ("get", "create", "patch", "delete")),
    *((verb, "leaderworkersets") for verb in ("get", "list", "watch", "create", "patch", "delete")),
    # Only the StatefulSet of a LeaderWorkerSet has Events that the operator reads.
    ("list", "events"),
    # The operator deletes Services and baselines only long after the installation, when they are no longer needed.
    ("delete", "services"),
    ("delete", "configmaps"),
    # The request is a PATCH, but server-side apply also needs the right to create.
    *(("create", kind) for kind in ("deployments", "services", "configmaps")),
}


class Install:
    """One cluster and the releases in it."""

    def __init__(self, cluster, chart):
        self.rest = cluster.rest
        self._chart = chart
        self._where = ("--kubeconfig", cluster.kubeconfig, "--namespace", HOME)

    def helm(self, *arguments, values=None):
        return run_helm(*arguments, *self._where, values=values)

    def put(self, verb, release, **values):
        flags = ("--create-namespace", "--wait", "--timeout=600s", UNCHECKED)
        return self.helm(verb, release, self._chart, *flags, values={"scrapeSeconds": 1} | values)

    def pods(self, namespace, selector):
        return self.rest.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]

    def operators(self):
        """Return the uids of operator pods that are not terminating."""
        pods = self.pods(HOME, "app.kubernetes.io/component=operator")
        return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}

    def operator_log(self):
        found = []
        for pod in self.pods(HOME, "app.kubernetes.io/component=operator"):
            folder = Path(pod["metadata"]["annotations"][LOGS_ANNOTATION])
            found += [log.read_text(errors="replace") for log in sorted(folder.rglob("*.log"))]
        return "\n".join(found)

    def requests(self):
        """Return the operators' requests to the API server: (HTTP method, LIST or WATCH, kind) and the status."""
        found = set()
        for pod in self.pods(HOME, "app.kubernetes.io/component=operator"):
            with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8080/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            for line in lines:
                if line.startswith("kvpilot_api_requests_total{"):
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                    found.add((labels["method"], labels["kind"], labels["code"]))
        return found

    def namespace(self, name):
        self.rest.create("/api/v1/namespaces", {"metadata": {"name": name}})

    def serve(self, namespace, name="chat", image="registry.example.com/kvpilot/runtime:0.1.0", **spec):
        """Create a service with a cheap engine, because the test checks only the operator's rights."""
        self.rest.create(
            f"/apis/kvpilot.io/v1alpha1/namespaces/{namespace}/quantizedllmservices",
            {
                "apiVersion": "kvpilot.io/v1alpha1",
                "kind": "QuantizedLLMService",
                "metadata": {"name": name},
                "spec": {
                    "model": {"source": "file:///models/tiny-llama", "maxModelLen": 512},
                    "engine": {"image": image, "resources": {"requests": {"memory": "1Gi"}}},
                    "kvCache": {"mode": "Fixed", "dtype": "auto"},
                    "drain": {"preStopSeconds": 1, "timeoutSeconds": 10},
                    **spec,
                },
            },
        )

    def service(self, namespace, name="chat"):
        return self.rest.get(f"/apis/kvpilot.io/v1alpha1/namespaces/{namespace}/quantizedllmservices/{name}")

    def ready(self, namespace, name="chat"):
        conditions = self.service(namespace, name).get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def may(self, user, verb, group, resource, namespace="", name=""):
        """Return True if the API server's own RBAC allows a user a request."""
        resource, _, subresource = resource.partition("/")
        asked = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        asked |= {"subresource": subresource, "name": name}
        review = self.rest.create(
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {"spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": asked}},
        )
        return review["status"]["allowed"]


@pytest.fixture(scope="module")
def install(cluster, installable):
    found = Install(cluster, installable)
    found.put("install", "kvpilot")
    found.namespace("models")
    found.serve("models")
    yield found
    # The next install in this cluster must not be refused.
    for release in ("kvpilot", "teams"):
        found.helm("uninstall", release, "--ignore-not-found", "--wait")


def test_two_operators_are_ready_and_one_leads(install):
    pods = install.pods(HOME, "app.kubernetes.io/component=operator")
    assert len(pods) == 2
    assert all(pod["status"]["containerStatuses"][0]["ready"] for pod in pods)
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/kvpilot-operator"
    holder = until(lambda: install.rest.get(lease)["spec"].get("holderIdentity"), "somebody leads")
    assert sum(pod["metadata"]["name"] in holder for pod in pods) == 1


def test_the_notes_say_how_to_continue_with_an_example_that_is_valid(install):
    notes = install.helm("get", "notes", "kvpilot")
    example = yaml.safe_load(notes.partition("<<EOF\n")[2].partition("\nEOF\n")[0])
    assert example["metadata"]["name"] == "chat"
    assert faults(example) == ()
    assert "every namespace" in notes
    assert f"kubectl -n {HOME} rollout status deployment/kvpilot-operator" in notes


def test_the_notes_name_the_runtime_beside_the_operators_image(install, installable):
    ours = "--set=image.repository=registry.example.com/kvpilot/operator"
    notes = install.helm("upgrade", "kvpilot", installable, "--dry-run", UNCHECKED, ours).partition("NOTES:")[2]
    example = yaml.safe_load(notes.partition("<<EOF\n")[2].partition("\nEOF\n")[0])
    assert example["spec"]["engine"]["image"].startswith("registry.example.com/kvpilot/runtime:")
    assert "No image is published yet" in notes


def test_helm_test_passes(install):
    assert "Succeeded" in install.helm("test", "kvpilot", "--timeout=600s")


def test_a_service_becomes_ready_with_the_charts_roles_alone(install):
    until(lambda: install.ready("models"), "the service is Ready", pause=0.5)
    events = install.rest.get("/api/v1/namespaces/models/events")["items"]
    assert any(event["involvedObject"]["kind"] == "QuantizedLLMService" for event in events)
    assert ("PATCH", "Deployment", "200") in install.requests()
    assert_nothing_was_refused(install)


@pytest.mark.long
def test_a_whole_canary_needs_all_of_the_charts_verbs_and_no_other(install, chart):
    until(lambda: install.ready("models"), "the service is Ready", pause=0.5)
    path = "/apis/kvpilot.io/v1alpha1/namespaces/models/quantizedllmservices/chat"
    lenient = {"probeSets": ["builtin/general"], "maxExcessKLMillinats": 100000, "minTop1AgreementPercent": 0}
    install.rest.merge(path, {"spec": {"kvCache": {"dtype": "k4v4"}, "accuracy": lenient}})

    def promoted():
        status = install.service("models")["status"]
        return status["kvCache"].get("activeDtype") == "k4v4" and "canary" not in status

    until(promoted, "the canary is promoted", pause=1)
    until(lambda: len(install.pods("models", "kvpilot.io/service=chat")) == 1, "the old engine is gone")
    # A claim only needs the name of a hub model, which cannot be downloaded here.
    stored = {"model": {"source": "hf://Qwen/Qwen3-8B"}, "cache": {"weights": {"size": "1Gi"}}}
    install.serve("models", "stored", "example.org/not-here:1", **stored)
    until(lambda: install.rest.get("/api/v1/namespaces/models/persistentvolumeclaims")["items"], "a claim is made")
    assert_nothing_was_refused(install)
    used = {(VERBS.get(method, method.lower()), kind.lower() + "s") for method, kind, _ in install.requests()}
    granted = {
        (verb, resource)
        for role in render(chart, {})
        if role["kind"] in ("ClusterRole", "Role") and "aggregate" not in str(role["metadata"]["labels"])
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert granted - used <= NOT_USED_HERE


def assert_nothing_was_refused(install):
    assert not {one for one in install.requests() if one[2] in ("401", "403")}
    log = install.operator_log()
    assert '"level"' in log
    assert "forbidden" not in log.lower()


def test_an_upgrade_replaces_the_operator_and_leaves_engines_alone(install):
    engine = install.pods("models", "kvpilot.io/service=chat")[0]["metadata"]["uid"]
    before = install.operators()
    install.put("upgrade", "kvpilot", metrics={"authentication": True})
    until(
        lambda: len(install.operators() - before) == len(install.operators()) == 2,
        "only two new operators remain",
    )
    assert [pod["metadata"]["uid"] for pod in install.pods("models", "kvpilot.io/service=chat")] == [engine]
    assert install.ready("models")


def test_metrics_with_authentication_need_the_token_of_a_permitted_user(install):
    account = f"/api/v1/namespaces/{HOME}/serviceaccounts/default/token"
    token = install.rest.create(account, {"spec": {}})["status"]["token"]
    pods = install.pods(HOME, "app.kubernetes.io/component=operator")
    pods = [pod for pod in pods if pod["metadata"]["uid"] in install.operators()]

    def statuses(*headers):
        found = set()
        for pod in pods:
            connection = http.client.HTTPConnection(pod["status"]["podIP"], 8080, timeout=HANGS)
            connection.request("GET", "/metrics", headers=dict(headers))
            found.add(connection.getresponse().status)
        return found

    # Ask both replicas: the standby replica has the API server check tokens, too.
    assert len(pods) == 2
    assert statuses() == {401}
    assert statuses(("Authorization", f"Bearer {token}")) == {403}
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": HOME}
    role = f"{HOME}:kvpilot-operator:metrics-reader"
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    install.rest.create(bindings, {"metadata": {"name": "reads-metrics"}, "roleRef": ref, "subjects": [subject]})
    until(lambda: statuses(("Authorization", f"Bearer {token}")) == {200}, "the account may read metrics")
    assert "Succeeded" in install.helm("test", "kvpilot", "--timeout=600s")
    assert "kubectl create clusterrolebinding" in install.helm("get", "notes", "kvpilot")


def test_people_with_the_clusters_roles_may_read_or_write_services(install):
    for role in ("view", "edit"):
        install.rest.create(
            "/apis/rbac.authorization.k8s.io/v1/namespaces/models/rolebindings",
            {
                "metadata": {"name": role},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"{role}er"}],
            },
        )

    def may(user, verb, resource="quantizedllmservices"):
        return install.may(user, verb, "kvpilot.io", resource, "models")

    until(lambda: may("viewer", "list"), "the view role has what is aggregated to it")
    until(lambda: may("editer", "create"), "the edit role has what is aggregated to it")
    assert may("editer", "patch", "quantizedllmservices/scale")
    assert not may("viewer", "create")
    assert not may("editer", "patch", "quantizedllmservices/status")


def test_the_crd_and_its_services_outlive_the_release_and_a_new_release_adopts_them(install):
    engine = install.pods("models", "kvpilot.io/service=chat")[0]["metadata"]["uid"]
    install.helm("uninstall", "kvpilot", "--wait")
    with pytest.raises(ApiError, match="not found"):
        install.rest.get(f"/apis/apps/v1/namespaces/{HOME}/deployments/kvpilot-operator")
    assert install.rest.get(CRD)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert install.ready("models")
    install.put("install", "kvpilot")
    assert [pod["metadata"]["uid"] for pod in install.pods("models", "kvpilot.io/service=chat")] == [engine]


def test_another_release_does_not_take_over_the_crd(install):
    with pytest.raises(HelmRefused, match="cannot be imported into the current release"):
        install.put("install", "second", fullnameOverride="second", rbac={"create": False})
    install.helm("uninstall", "second", "--ignore-not-found")


def test_without_keep_uninstalling_deletes_the_crd_and_all_services(install):
    install.put("upgrade", "kvpilot", crds={"keep": False})
    install.helm("uninstall", "kvpilot", "--wait")

    def gone():
        try:
            install.rest.get(CRD)
        except ApiError as error:
            return error.status == 404
        return False

    until(gone, "the definition is deleted")
    until(lambda: not install.pods("models", "kvpilot.io/service=chat"), "the engines are deleted")


def test_a_namespaced_operator_has_rights_only_in_its_namespaces(install):
    for name in ("team-a", "team-b", "others"):
        install.namespace(name)
    install.put("install", "teams", watchNamespaces=["team-a", "team-b"], fullnameOverride="teams")
    for name in ("team-a", "team-b", "others"):
        install.serve(name, image="example.com/nobody/has/this:1")
    deployments = "/apis/apps/v1/namespaces/{}/deployments?labelSelector=kvpilot.io/service=chat"
    for name in ("team-a", "team-b"):
        until(lambda name=name: install.rest.get(deployments.format(name))["items"], f"{name} is served")
    assert install.service("others").get("status") is None
    assert not install.rest.get(deployments.format("others"))["items"]

    def may(verb, group, resource, namespace):
        return install.may(f"system:serviceaccount:{HOME}:teams", verb, group, resource, namespace)

    assert may("patch", "kvpilot.io", "quantizedllmservices/status", "team-a")
    assert not may("patch", "kvpilot.io", "quantizedllmservices/status", "others")
    assert not may("list", "kvpilot.io", "quantizedllmservices", "")
    assert not may("get", "", "pods", "others")
    assert not may("get", "", "secrets", "team-a")
    assert_nothing_was_refused(install)


@pytest.mark.parametrize("verb", ["get", "list", "watch", "create", "patch", "delete"])
def test_no_operator_may_touch_secrets(install, verb):
    assert not install.may(f"system:serviceaccount:{HOME}:teams", verb, "", "secrets", HOME)
