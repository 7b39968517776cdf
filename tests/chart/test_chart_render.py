"""The chart renders exactly to the recorded snapshots, and copied content equals its source files.

After an intended change, renew the snapshots: RENEW=1 .venv/bin/pytest tests/chart/test_chart_render.py
"""

import copy
import json
import os
import re
import tarfile
from pathlib import Path

import pytest
import yaml

from kvpilot_localcluster.manifests import objects
from kvpilot_localcluster.toolbox.helm import render, run_helm

HERE = Path(__file__).parent
SETS = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
SECRET_READERS = {"secrets", "*"}


def find(objects, kind, name=None):
    return [one for one in objects if one["kind"] == kind and name in (None, one["metadata"]["name"])]


def pod_specs(objects):
    for one in objects:
        if one["kind"] == "Pod":
            yield one["metadata"], one["spec"]
        elif "template" in one.get("spec", {}):
            yield one["spec"]["template"]["metadata"], one["spec"]["template"]["spec"]


def without_copies(objects):
    """Leave out content that is copied from other files, because another test compares it."""
    objects = copy.deepcopy(objects)
    for one in find(objects, "CustomResourceDefinition"):
        one["spec"] = "as in crds/"
    for one in find(objects, "PrometheusRule"):
        one["spec"]["groups"] = "as in charts/kvpilot/files/rules"
    for one in find(objects, "ConfigMap"):
        one["data"] = dict.fromkeys(one["data"], "as in charts/kvpilot/files/dashboards")
    return objects


def test_there_are_five_value_sets_and_each_has_its_recorded_output():
    assert len(SETS) == 5
    assert sorted(path.stem for path in (HERE / "snapshots").glob("*.yaml")) == SETS


@pytest.mark.parametrize("name", SETS)
def test_the_chart_renders_as_recorded(rendered, name):
    made = yaml.safe_dump_all(without_copies(rendered(name)), sort_keys=False, width=120)
    record = HERE / "snapshots" / f"{name}.yaml"
    if os.environ.get("RENEW"):
        record.write_text(made)
    assert made == record.read_text(), "if the change is meant: RENEW=1 .venv/bin/pytest " + str(Path(__file__).name)


@pytest.mark.parametrize("name", SETS)
def test_the_chart_passes_helm_lint(chart, name):
    run_helm("lint", "--strict", chart, "--values", HERE / "values" / f"{name}.yaml")


def test_the_charts_crd_is_the_one_in_crds_with_labels(root, rendered):
    (source,) = objects((root / "crds/kvpilot.io_quantizedllmservices.yaml").read_text())
    (made,) = find(rendered("default"), "CustomResourceDefinition")
    assert made["spec"] == source["spec"]
    assert made["metadata"]["name"] == source["metadata"]["name"]
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (unkept,) = find(rendered("custom"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in unkept["metadata"].get("annotations", {})
    assert not find(rendered("namespaced"), "CustomResourceDefinition")


@pytest.mark.parametrize("namespace", ["kvpilot-system", "elsewhere"])
@pytest.mark.parametrize("name", ["kvpilot-operator", "another"])
def test_rules_and_dashboards_come_from_the_files_of_the_chart(chart, name, namespace):
    values = yaml.safe_load((HERE / "values/monitoring.yaml").read_text()) | {"fullnameOverride": name}
    objects = render(chart, values, namespace=namespace)

    def read(path):
        text = path.read_text()
        for quote in ('"', '\\"'):
            text = text.replace(f"{quote}kvpilot-operator{quote}", f"{quote}{name}{quote}")
            text = text.replace(f"{quote}kvpilot-system{quote}", f"{quote}{namespace}{quote}")
        return text

    (rule,) = find(objects, "PrometheusRule")
    groups = [
        g for path in sorted((chart / "files/rules").glob("*.yaml")) for g in yaml.safe_load(read(path))["groups"]
    ]
    assert groups
    assert rule["spec"]["groups"] == groups
    shown = {key: json.loads(text) for one in find(objects, "ConfigMap") for key, text in one["data"].items()}
    files = (chart / "files/dashboards").glob("*.json")
    assert shown == {f"kvpilot-{path.name}": json.loads(read(path)) for path in files}
    # Prometheus uses the Service's name as the ServiceMonitor's job.
    (service,) = find(objects, "Service")
    assert service["metadata"]["name"] == name
    assert f'job="{name}", namespace="{namespace}"' in str(groups)


def test_without_monitoring_there_is_nothing_for_prometheus(rendered):
    assert not find(rendered("default"), "PrometheusRule")
    assert not find(rendered("default"), "ServiceMonitor")


def test_the_engines_pod_monitor_drops_the_same_series_as_the_documented_scrape_configuration(root, rendered):
    guide = re.search(r"```yaml\n(scrape_configs:.*?)```", (root / "docs/metrics.md").read_text(), re.DOTALL)
    (engines,) = (one for one in yaml.safe_load(guide[1])["scrape_configs"] if one["job_name"] == "kvpilot-engines")
    camel = {"source_labels": "sourceLabels", "target_label": "targetLabel"}
    documented = [{camel.get(k, k): v for k, v in rule.items()} for rule in engines["metric_relabel_configs"]]
    (monitor,) = find(rendered("monitoring"), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["metricRelabelings"] == documented
    assert endpoint["honorLabels"] is False


@pytest.mark.parametrize("name", SETS)
def test_every_object_of_the_chart_has_the_standard_labels(rendered, name):
    for one in rendered(name):
        labels = one["metadata"]["labels"]
        for label in ("name", "instance", "version", "component", "part-of", "managed-by"):
            assert labels[f"app.kubernetes.io/{label}"], (one["kind"], label)


@pytest.mark.parametrize("name", SETS)
def test_every_pod_satisfies_the_restricted_pod_security_standard(rendered, name):
    for _, spec in pod_specs(rendered(name)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec.get("volumes", ()))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_on_openshift_the_operators_pods_name_no_user(chart):
    for flags, users in (((), {"runAsUser", "runAsGroup"}), (("--api-versions", "security.openshift.io/v1"), set())):
        contexts = [spec["securityContext"] for _, spec in pod_specs(render(chart, {}, *flags))]
        assert len(contexts) == 2
        for context in contexts:
            assert context.keys() & {"runAsUser", "runAsGroup", "fsGroup"} == users
            assert context["runAsNonRoot"] is True


@pytest.mark.parametrize("name", SETS)
def test_every_selector_selects_the_operators_pods_and_not_the_tests(rendered, name):
    objects = rendered(name)
    (deployment,) = find(objects, "Deployment")
    wanted = deployment["spec"]["selector"]["matchLabels"].items()
    for metadata, spec in pod_specs(objects):
        is_operator = spec["containers"][0]["name"] == "operator"
        assert (wanted <= metadata["labels"].items()) is is_operator
    for kind, path in (("Service", "selector"), ("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        for one in find(objects, kind):
            selector = one["spec"][path]
            assert selector.get("matchLabels", selector).items() == wanted


def test_no_role_reads_secrets_or_grants_everything(rendered):
    for name in SETS:
        for role in find(rendered(name), "ClusterRole") + find(rendered(name), "Role"):
            for rule in (one for one in role["rules"] if "resources" in one):
                assert not SECRET_READERS & {resource.partition("/")[0] for resource in rule["resources"]}
                assert "*" not in rule["verbs"]
                assert "*" not in rule["apiGroups"]


def test_a_namespaced_operator_gets_nothing_cluster_wide_but_nodes(rendered):
    objects = rendered("namespaced")
    (cluster_role,) = find(objects, "ClusterRole")
    assert [rule["resources"] for rule in cluster_role["rules"]] == [["nodes"]]
    watched = [one["metadata"]["namespace"] for one in find(objects, "Role", "kvpilot.io:operator")]
    assert watched == ["team-a", "team-b"]
    (deployment,) = find(objects, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [one for one in arguments if one.startswith("--namespace")] == ["--namespace=team-a", "--namespace=team-b"]


def test_the_network_policy_admits_only_the_named_namespaces_to_the_operator(chart, rendered):
    def peers(objects):
        (policy,) = find(objects, "NetworkPolicy")
        assert "Ingress" in policy["spec"]["policyTypes"]
        (rule,) = policy["spec"]["ingress"]
        assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
        return rule["from"]

    test = {
        "podSelector": {"matchLabels": {"app.kubernetes.io/instance": "kvpilot", "app.kubernetes.io/component": "test"}}
    }
    assert peers(rendered("default")) == [{"namespaceSelector": {"matchLabels": {"metrics": "enabled"}}}, test]
    # A rule without peers would admit all traffic.
    assert peers(render(chart, {"networkPolicy": {"ingressFrom": []}})) == [test]


def test_the_operator_may_review_tokens_only_if_metrics_need_authentication(rendered):
    for name in SETS:
        bindings = find(rendered(name), "ClusterRoleBinding")
        delegates = [one for one in bindings if one["roleRef"]["name"] == "system:auth-delegator"]
        (deployment,) = find(rendered(name), "Deployment")
        asks = "--metrics-authentication" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        assert len(delegates) == asks == (name == "hardened")


def rights(objects):
    """Return kind and namespace of each binding that gives the operator its rights."""
    bindings = find(objects, "ClusterRoleBinding", "kvpilot.io:operator")
    bindings += find(objects, "RoleBinding", "kvpilot.io:operator")
    return {(one["kind"], one["metadata"].get("namespace")) for one in bindings}


def test_releases_share_only_the_names_of_their_rbac_objects(chart):
    def cluster_wide(objects):
        return {o["metadata"]["name"] for o in objects if o["kind"] in ("ClusterRole", "ClusterRoleBinding")}

    one, two = render(chart, {}, namespace="one"), render(chart, {}, namespace="two")
    assert cluster_wide(one) & cluster_wide(two) == {"kvpilot.io:operator"}
    assert rights(one) == rights(two) == {("ClusterRoleBinding", None)}
    one, two = (render(chart, {"watchNamespaces": [f"team-{name}"]}, namespace=name) for name in ("a", "b"))
    assert not cluster_wide(one) & cluster_wide(two)
    assert (rights(one), rights(two)) == ({("RoleBinding", "team-a")}, {("RoleBinding", "team-b")})


def test_the_packaged_chart_has_the_files_of_its_folder(chart, rendered, tmp_path):
    run_helm("package", chart, "--destination", tmp_path)
    (package,) = tmp_path.glob("kvpilot-*.tgz")
    assert render(package, yaml.safe_load((HERE / "values/monitoring.yaml").read_text())) == rendered("monitoring")
    with tarfile.open(package) as packed:
        names = packed.getnames()
    assert {"kvpilot/LICENSE", "kvpilot/README.md", "kvpilot/values.schema.json"} <= set(names)
