"""Chart values that depend on the cluster: each value changes the fields that it names, and nothing else."""

import json
import re

import pytest

from kvpilot_localcluster.toolbox.helm import HelmRefused, render
from kvpilot_operator.control.leader import DRAIN_SECONDS
from kvpilot_operator.options import parse_arguments


def only(objects, kind):
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def pod(objects):
    return only(objects, "Deployment")["spec"]["template"]["spec"]


IN_THE_DEPLOYMENT = [
    ({"strategy": {"type": "Recreate"}}, {"strategy": {"type": "Recreate"}}),
    ({"revisionHistoryLimit": 0}, {"revisionHistoryLimit": 0}),
]
MOUNT = {"name": "ca", "mountPath": "/etc/ssl/company", "readOnly": True}
IN_THE_POD = [
    ({"terminationGracePeriodSeconds": 60}, {"terminationGracePeriodSeconds": 60}),
    ({"dnsPolicy": "None"}, {"dnsPolicy": "None"}),
    ({"dnsConfig": {"nameservers": ["10.0.0.10"]}}, {"dnsConfig": {"nameservers": ["10.0.0.10"]}}),
    (
        {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a.internal"]}]},
        {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a.internal"]}]},
    ),
    (
        {"extraVolumes": [{"name": "ca", "configMap": {"name": "company-ca"}}]},
        {"volumes": [{"name": "ca", "configMap": {"name": "company-ca"}}]},
    ),
]
IN_THE_CONTAINER = [
    ({"extraVolumeMounts": [MOUNT]}, {"volumeMounts": [MOUNT]}),
    ({"envFrom": [{"configMapRef": {"name": "proxy"}}]}, {"envFrom": [{"configMapRef": {"name": "proxy"}}]}),
]


@pytest.mark.parametrize(
    ("values", "fields", "where"),
    [
        *((*one, "spec") for one in IN_THE_DEPLOYMENT),
        *((*one, "spec.template.spec") for one in IN_THE_POD),
        *((*one, "spec.template.spec.containers.0") for one in IN_THE_CONTAINER),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else one,
)
def test_a_value_sets_its_field_of_the_deployment_and_no_other(chart, values, fields, where):
    before, after = (only(render(chart, given), "Deployment") for given in ({}, values))
    for step in where.split("."):
        at = int(step) if step.isdigit() else step
        rest = [{**one, at: None} for one in (before, after)] if isinstance(before, dict) else [before[1:], after[1:]]
        assert rest[0] == rest[1]
        before, after = before[at], after[at]
    assert {key for key in before | after if before.get(key) != after.get(key)} == fields.keys()
    assert {key: after[key] for key in fields} == fields


def test_the_pod_has_the_charts_volumes_and_those_of_the_values(chart):
    values = {
        "istio": {"certificates": True},
        "extraVolumes": [{"name": "ca", "emptyDir": {}}],
        "extraVolumeMounts": [MOUNT],
    }
    found = pod(render(chart, values))
    assert [one["name"] for one in found["volumes"]] == ["mesh", "ca"]
    assert [one["name"] for one in found["containers"][0]["volumeMounts"]] == ["mesh", "ca"]


def test_the_grace_period_is_long_enough_to_hand_over_the_lease(chart):
    assert pod(render(chart, {}))["terminationGracePeriodSeconds"] > DRAIN_SECONDS


@pytest.mark.parametrize(
    ("budget", "field"),
    [
        ({}, {"maxUnavailable": 1}),
        ({"maxUnavailable": "50%"}, {"maxUnavailable": "50%"}),
        ({"maxUnavailable": 0}, {"maxUnavailable": 0}),
        ({"minAvailable": 2}, {"minAvailable": 2}),
        ({"minAvailable": 0}, {"minAvailable": 0}),
        ({"minAvailable": "34%", "maxUnavailable": 2}, {"minAvailable": "34%"}),
    ],
)
def test_the_values_set_the_operators_disruption_budget(chart, budget, field):
    spec = only(render(chart, {"podDisruptionBudget": budget}), "PodDisruptionBudget")["spec"]
    assert {key: value for key, value in spec.items() if key != "selector"} == field


def test_on_the_host_network_a_new_pod_waits_until_the_old_one_frees_the_port(chart):
    objects = render(chart, {"hostNetwork": True, "httpPort": 18080})
    found, spec = pod(objects), only(objects, "Deployment")["spec"]
    assert found["hostNetwork"] is True
    assert found["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    (container,) = found["containers"]
    assert [one["containerPort"] for one in container["ports"]] == [18080]
    assert parse_arguments([one for one in container["args"] if "port" in one]).http_port == 18080
    assert only(objects, "Service")["spec"]["ports"] == [
        {"name": "http", "port": 8080, "targetPort": "http", "protocol": "TCP"}
    ]
    # The Lease has the pod's name as its holder, because two pods of a node share a host name.
    assert {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in container["env"]
    assert pod(render(chart, {"hostNetwork": True, "dnsPolicy": "Default"}))["dnsPolicy"] == "Default"
    recreated = render(chart, {"hostNetwork": True, "strategy": {"type": "Recreate"}})
    assert only(recreated, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


IMAGES = [
    ({"image": {"registry": "registry.internal:5000"}}, "registry.internal:5000/kvpilot/operator"),
    ({"global": {"imageRegistry": "mirror.internal/hub"}}, "mirror.internal/hub/kvpilot/operator"),
    ({"global": {"imageRegistry": "a.internal"}, "image": {"registry": "b.internal"}}, "b.internal/kvpilot/operator"),
    ({"image": {"registry": "a.internal/", "repository": "localhost/team/operator"}}, "a.internal/team/operator"),
    ({"image": {"registry": "a.internal", "repository": "team/operator"}}, "a.internal/team/operator"),
    ({"image": {"repository": "c.internal:5000/operator"}}, "c.internal:5000/operator"),
]


@pytest.mark.parametrize(("values", "repository"), IMAGES)
def test_every_image_comes_from_the_registry_of_the_values(chart, values, repository):
    objects = render(chart, values)
    test = only(objects, "Pod")["spec"]
    assert {one["image"] for one in (*pod(objects)["containers"], *test["containers"])} == {f"{repository}:0.1.0"}


def monitoring(**parts):
    return {"monitoring": {part: {"enabled": True, **values} for part, values in parts.items()}}


RELABEL = [{"targetLabel": "cluster", "replacement": "east"}]
DROP = [{"sourceLabels": ["__name__"], "regex": "python_.*", "action": "drop"}]
SETTINGS = {"namespace": "monitoring", "scrapeTimeout": "10s", "relabelings": RELABEL, "metricRelabelings": DROP}


@pytest.mark.parametrize(
    ("part", "kind", "endpoints"),
    [
        ("serviceMonitor", "ServiceMonitor", "endpoints"),
        ("podMonitor", "PodMonitor", "podMetricsEndpoints"),
    ],
)
def test_the_values_set_the_namespace_and_relabelings_of_a_monitor(chart, part, kind, endpoints):
    plain = only(render(chart, monitoring(**{part: {}})), kind)
    assert plain["metadata"]["namespace"] == "kvpilot-system"
    token = {"credentials": {"name": "prometheus-token", "key": "token"}}
    made = only(render(chart, monitoring(**{part: {**SETTINGS, "authorization": token}})), kind)
    assert made["metadata"]["namespace"] == "monitoring"
    assert made["spec"]["namespaceSelector"] == plain["spec"]["namespaceSelector"]
    ((before,), (after,)) = (one["spec"][endpoints] for one in (plain, made))
    own = before.get("metricRelabelings", [])
    assert after == before | {
        "scrapeTimeout": "10s", "relabelings": RELABEL, "metricRelabelings": [*own, *DROP], "authorization": token,
    }  # fmt: skip


def test_a_service_monitor_in_another_namespace_selects_the_releases_namespace(chart):
    objects = render(chart, monitoring(serviceMonitor=SETTINGS), namespace="somewhere")
    assert only(objects, "ServiceMonitor")["spec"]["namespaceSelector"] == {"matchNames": ["somewhere"]}
    assert only(objects, "Service")["metadata"]["namespace"] == "somewhere"


def test_no_monitor_reads_a_token_from_prometheus_own_file(chart):
    values = {**monitoring(serviceMonitor={}), "metrics": {"authentication": True}}
    with pytest.raises(HelmRefused, match=r"serviceMonitor\.authorization is empty.*name a Secret"):
        render(chart, values)
    values["monitoring"]["serviceMonitor"]["authorization"] = {"credentials": {"name": "token", "key": "token"}}
    assert "bearerToken" not in json.dumps(render(chart, values))


def test_host_network_and_istios_sidecar_are_refused_together(chart):
    with pytest.raises(HelmRefused, match=r"hostNetwork and istio\.certificates are both true.*set one of them"):
        render(chart, {"hostNetwork": True, "istio": {"certificates": True}})


def rules(objects):
    groups = only(objects, "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_alerts_are_left_out_labelled_and_linked_as_the_values_say(chart):
    every = rules(render(chart, monitoring(prometheusRule={})))
    values = {
        "namespace": "monitoring", "disabled": ["KvpilotCanaryRolledBack", "KvpilotOperatorDown"],
        "alertLabels": {"team": "serving"}, "runbookUrl": "https://wiki.internal/kvpilot/",
    }  # fmt: skip
    objects = render(chart, monitoring(prometheusRule=values))
    assert only(objects, "PrometheusRule")["metadata"]["namespace"] == "monitoring"
    made = rules(objects)
    assert every.keys() - made.keys() == {"KvpilotCanaryRolledBack", "KvpilotOperatorDown"}
    for name, rule in made.items():
        assert rule["labels"] == every[name]["labels"] | {"team": "serving"}
        assert rule["annotations"]["runbook_url"] == f"https://wiki.internal/kvpilot/{name}.md"
        assert rule["expr"] == every[name]["expr"]


def test_without_any_alert_of_a_group_there_is_no_group(chart):
    every = only(render(chart, monitoring(prometheusRule={})), "PrometheusRule")["spec"]["groups"]
    disabled = [rule["alert"] for rule in every[0]["rules"]]
    made = only(render(chart, monitoring(prometheusRule={"disabled": disabled})), "PrometheusRule")
    assert made["spec"]["groups"] == every[1:]


def test_the_schema_knows_the_name_of_every_alert(chart):
    schema = json.loads((chart / "values.schema.json").read_text())["properties"]["monitoring"]["properties"]
    known = schema["prometheusRule"]["properties"]["disabled"]["items"]["enum"]
    assert known == [*rules(render(chart, monitoring(prometheusRule={})))]


def queries(chart, label):
    """Return every query of rules and dashboards, and every legend."""
    values = monitoring(prometheusRule={}, dashboards={})
    values["monitoring"]["clusterLabel"] = label
    objects = render(chart, values)
    texts = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    shown = [json.loads(text) for data in texts for text in data.values()]
    targets = [target for one in shown for panel in one["panels"] for target in panel.get("targets", ())]
    notes = [note for one in shown for note in one["annotations"]["list"] if "expr" in note]
    variables = [
        one["definition"] for dashboard in shown for one in dashboard["templating"]["list"] if "definition" in one
    ]
    found = [rule["expr"] for rule in rules(objects).values()] + variables
    return found + [
        one[key] for one in (*targets, *notes) for key in ("expr", "legendFormat", "textFormat") if key in one
    ]


def test_rules_and_dashboards_group_by_the_cluster_label_of_the_values(chart):
    of_the_files = queries(chart, "cluster")
    assert len(of_the_files) > 200
    assert queries(chart, "k8s_cluster") == [re.sub(r"(?<!\$)\bcluster\b", "k8s_cluster", one) for one in of_the_files]
