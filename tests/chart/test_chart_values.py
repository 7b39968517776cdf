"""Values are validated before rendering: errors name the wrong value, and every known value is documented."""

import copy
import json
import re
import sys
import textwrap
import tomllib

import msgspec
import pytest
import yaml

from kvpilot_localcluster.toolbox.helm import HelmRefused, render, run_helm
from kvpilot_operator.api.engine_defaults import EngineDefaults
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.names import ENGINE_PORT, SERVICE_LABEL
from kvpilot_operator.api.pod_template import KINDS
from kvpilot_operator.options import parse_arguments

REFUSED = {
    "an unknown value": ({"replicas": 3}, "replicas"),
    "an unknown value in a section": ({"image": {"tga": "0.1.0"}}, "image: Additional property tga"),
    "an unknown kind of monitoring": ({"monitoring": {"dashboard": {}}}, "monitoring: Additional property dashboard"),
    "a text for a number": ({"replicaCount": "two"}, "replicaCount"),
    "a negative number of replicas": ({"replicaCount": -1}, "replicaCount"),
    "a number for a text": ({"image": {"tag": 1.0}}, "image.tag"),
    "a digest that is none": ({"image": {"digest": "9f86d081"}}, "image.digest"),
    "a digest in the repository": ({"image": {"repository": "kvpilot@sha256:1"}}, "image.repository"),
    "a policy that is none": ({"image": {"pullPolicy": "Sometimes"}}, "image.pullPolicy"),
    "a log level that is none": ({"logLevel": "loud"}, "logLevel"),
    "a pause of nothing": ({"scrapeSeconds": 0}, "scrapeSeconds"),
    "an access to nodes that is none": ({"engines": {"hostAccess": ["root"]}}, "engines.hostAccess.0"),
    "a pull secret of engines as a text": ({"engines": {"imagePullSecrets": ["mine"]}}, "engines.imagePullSecrets.0"),
    "a namespace that is none": ({"watchNamespaces": ["team-a", "Team_B"]}, "watchNamespaces.1"),
    "a namespace twice": ({"watchNamespaces": ["team-a", "team-a"]}, "watchNamespaces"),
    "namespaces in one text": ({"watchNamespaces": "team-a,team-b"}, "watchNamespaces"),
    "an argument that is none": ({"extraArgs": ["debug"]}, "extraArgs.0"),
    "a variable without a name": ({"extraEnv": [{"value": "1"}]}, "extraEnv.0: name is required"),
    "a variable that is a number": ({"extraEnv": [{"name": "A", "value": 1}]}, "extraEnv.0.value"),
    "a label that is a number": ({"commonLabels": {"team": 7}}, "commonLabels.team"),
    "a pull secret as a text": ({"imagePullSecrets": ["mine"]}, "imagePullSecrets.0"),
    "a port that is none": ({"networkPolicy": {"apiServerPorts": [70000]}}, "networkPolicy.apiServerPorts.0"),
    "an interval that is none": (
        {"monitoring": {"serviceMonitor": {"interval": "often"}}},
        "monitoring.serviceMonitor.interval",
    ),
    "a registry with a scheme": ({"image": {"registry": "https://a.internal"}}, "image.registry"),
    "a global registry that is a number": ({"global": {"imageRegistry": 5000}}, "global.imageRegistry"),
    "a budget of more than all": (
        {"podDisruptionBudget": {"maxUnavailable": "101%"}},
        "podDisruptionBudget.maxUnavail",
    ),
    "a budget in words": ({"podDisruptionBudget": {"minAvailable": "most"}}, "podDisruptionBudget.minAvailable"),
    "an unknown strategy": ({"strategy": {"type": "Canary"}}, "strategy.type"),
    "an unknown field of a strategy": ({"strategy": {"maxSurge": 1}}, "strategy: Additional property maxSurge"),
    "fewer revisions than none": ({"revisionHistoryLimit": -1}, "revisionHistoryLimit"),
    "no time to end": ({"terminationGracePeriodSeconds": 0}, "terminationGracePeriodSeconds"),
    "a port that needs root": ({"httpPort": 80}, "httpPort"),
    "a network in words": ({"hostNetwork": "yes"}, "hostNetwork"),
    "an unknown DNS policy": ({"dnsPolicy": "First"}, "dnsPolicy"),
    "an unknown field of DNS": ({"dnsConfig": {"nameserver": []}}, "dnsConfig: Additional property nameserver"),
    "an alias without names": ({"hostAliases": [{"ip": "10.0.0.1"}]}, "hostAliases.0: hostnames is required"),
    "variables of nothing": ({"envFrom": [{"secret": "a"}]}, "envFrom.0: Additional property secret"),
    "a volume without a name": ({"extraVolumes": [{"emptyDir": {}}]}, "extraVolumes.0: name is required"),
    "a mount without a path": ({"extraVolumeMounts": [{"name": "a"}]}, "extraVolumeMounts.0: mountPath is required"),
    "a mount below nothing": (
        {"extraVolumeMounts": [{"name": "a", "mountPath": "b"}]},
        "extraVolumeMounts.0.mountPath",
    ),
    "an unknown alert": ({"monitoring": {"prometheusRule": {"disabled": ["Down"]}}}, "prometheusRule.disabled.0"),
    "a severity for all alerts": (
        {"monitoring": {"prometheusRule": {"alertLabels": {"severity": "page"}}}},
        "monitoring.prometheusRule.alertLabels",
    ),
    "a runbook without a scheme": (
        {"monitoring": {"prometheusRule": {"runbookUrl": "wiki/kvpilot"}}},
        "monitoring.prometheusRule.runbookUrl",
    ),
    "a label that is none": ({"monitoring": {"clusterLabel": "k8s-cluster"}}, "monitoring.clusterLabel"),
    "a timeout in words": ({"monitoring": {"podMonitor": {"scrapeTimeout": "soon"}}}, "podMonitor.scrapeTimeout"),
    "a monitor in no namespace": ({"monitoring": {"podMonitor": {"namespace": "A_B"}}}, "podMonitor.namespace"),
    "a token without a key": (
        {"monitoring": {"serviceMonitor": {"authorization": {"credentials": {"name": "a"}}}}},
        "monitoring.serviceMonitor.authorization.credentials: key is required",
    ),
    "a token in a file": (
        {"monitoring": {"serviceMonitor": {"bearerTokenFile": "/token"}}},
        "monitoring.serviceMonitor: Additional property bearerTokenFile",
    ),
    "resources of another kind": ({"resources": {"limit": {}}}, "resources: Additional property limit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_and_the_error_names_it(chart, case):
    values, named = REFUSED[case]
    with pytest.raises(HelmRefused) as caught:
        render(chart, values)
    assert named in str(caught.value)
    assert "schema" in str(caught.value)


def test_the_schema_allows_exactly_the_kinds_of_host_access_that_the_operator_knows(chart):
    def arguments(values):
        (deployment,) = (one for one in render(chart, values) if one["kind"] == "Deployment")
        return deployment["spec"]["template"]["spec"]["containers"][0]["args"]

    assert not any("host-access" in one for one in arguments({}))
    given = [one for one in arguments({"engines": {"hostAccess": list(KINDS)}}) if "host-access" in one]
    assert parse_arguments(given).allow_host_access == list(KINDS)


def test_the_operator_reads_the_defaults_of_engines_that_the_chart_writes(chart):
    def arguments(values):
        (deployment,) = (one for one in render(chart, values) if one["kind"] == "Deployment")
        args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        return [one for one in args if one.startswith("--engine-defaults")]

    assert arguments({"engines": {"hostAccess": ["hostIPC"]}}) == []
    toleration = {"key": "gpu", "operator": "Equal", "value": 'a"b', "tolerationSeconds": 30}
    engines = {"image": "team/runtime:2", "imagePullSecrets": [{"name": "registry"}], "tolerations": [toleration]}
    found = parse_arguments(arguments({"engines": {"hostAccess": ["hostIPC"], **engines}})).engine_defaults
    assert msgspec.to_builtins(found) == engines
    assert parse_arguments(arguments({"engines": {"image": "a:1"}})).engine_defaults == EngineDefaults("a:1")


def test_a_restricted_operator_reaches_every_pod_whose_metrics_it_reads(chart):
    objects = render(chart, {"networkPolicy": {"restrictEgress": True}})
    (policy,) = (one for one in objects if one["kind"] == "NetworkPolicy")
    to = [
        one
        for rule in policy["spec"]["egress"]
        if rule["ports"] == [{"port": ENGINE_PORT, "protocol": "TCP"}]
        for one in rule["to"]
    ]
    assert {one["podSelector"]["matchExpressions"][0]["key"] for one in to} == {SERVICE_LABEL}


def test_the_operator_reads_its_sidecars_certificates_and_no_traffic_is_intercepted(chart):
    (deployment,) = (one for one in render(chart, {"istio": {"certificates": True}}) if one["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    annotations, pod = template["metadata"]["annotations"], template["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    assert f"--mesh-certificates={mount['mountPath']}" in container["args"]
    assert [v["emptyDir"]["medium"] for v in pod["volumes"] if v["name"] == mount["name"]] == ["Memory"]
    (written,) = json.loads(annotations["sidecar.istio.io/userVolumeMount"])
    assert written["name"] == mount["name"]
    assert yaml.safe_load(annotations["proxy.istio.io/config"]) == {
        "proxyMetadata": {"OUTPUT_CERTS": written["mountPath"]}
    }
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "true"
    for intercepted in ("includeInboundPorts", "includeOutboundIPRanges"):
        assert annotations[f"traffic.sidecar.istio.io/{intercepted}"] == ""
    (without,) = (one for one in render(chart, {}) if one["kind"] == "Deployment")
    assert "istio" not in json.dumps(without)


def parent_of(chart, folder, **dependency):
    """Return a chart that has kvpilot's chart as a dependency."""
    about = {"apiVersion": "v2", "name": "platform", "version": "1.0.0"}
    needed = {"name": "kvpilot", "version": "0.1.0", "repository": f"file://{chart}", **dependency}
    folder.mkdir()
    (folder / "Chart.yaml").write_text(yaml.safe_dump({**about, "dependencies": [needed]}))
    run_helm("dependency", "update", folder)
    return folder


def test_a_parent_chart_turns_the_chart_on_and_off(chart, tmp_path):
    alone = render(chart, {"replicaCount": 3})
    parent = parent_of(chart, tmp_path / "platform", condition="kvpilot.enabled")
    # Helm passes the parent's `global` to every subchart, with any content.
    everywhere = {"global": {"anything": {"at": "all"}}}
    assert render(parent, {**everywhere, "kvpilot": {"enabled": True, "replicaCount": 3}}) == alone
    assert render(parent, {**everywhere, "kvpilot": {"enabled": False}}) == []
    with pytest.raises(HelmRefused, match="Additional property replicas"):
        render(parent, {"kvpilot": {"enabled": True, "replicas": 3}})


def test_a_parent_chart_can_give_the_chart_another_name(chart, tmp_path):
    parent = parent_of(chart, tmp_path / "platform", alias="pilot", condition="pilot.enabled")
    made = render(parent, {"pilot": {"enabled": True}})
    assert [one["kind"] for one in made] == [one["kind"] for one in render(chart, {})]


def test_the_schema_knows_every_value_and_no_other(chart):
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())

    def compare(known, described, path):
        while "$ref" in described:
            described = schema["definitions"][described["$ref"].rpartition("/")[2]]
        if "properties" not in described or not isinstance(known, dict) or not known:
            return
        # A parent chart may put anything into `global`.
        assert described.get("additionalProperties", True) is (path == "values.global"), path
        # Helm defines `enabled`, and only some users set `claims`.
        optional = {*(["enabled"] if path == "values" else []), "claims"}
        assert known.keys() == described["properties"].keys() - optional, path
        for key, value in known.items():
            compare(value, described["properties"][key], f"{path}.{key}")

    compare(values, schema, "values")


@pytest.fixture
def chart_readme(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "scripts")
    import chart_readme

    yield chart_readme
    sys.modules.pop("chart_readme")


def test_a_chart_value_without_a_description_is_an_error(chart, chart_readme):
    text = (chart / "values.yaml").read_text()
    described = list(chart_readme.documented(text))
    assert {one.path.partition(".")[0] for one in described} == yaml.safe_load(text).keys()
    assert all(one.description for one in described)
    with pytest.raises(ValueError, match=r"values\.yaml: surprise\.inner has no description"):
        list(chart_readme.documented(text + "\nsurprise:\n  inner: 1\n"))


def test_a_description_of_several_lines_becomes_one_table_cell(chart_readme):
    table = chart_readme.table("# -- One\n# or | two.\nkey: [a]\n")
    assert table.splitlines()[-1] == r'| `key` | list | `["a"]` | One or \| two. |'


def test_the_values_of_the_chart_are_the_defaults_of_an_empty_file(chart):
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert render(chart, copy.deepcopy(values)) == render(chart, {})


def test_the_chart_names_one_version_everywhere(root, chart):
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert about["version"] == about["appVersion"] == version
    (image,) = yaml.safe_load(about["annotations"]["artifacthub.io/images"])
    assert image["image"] == f"ghcr.io/kvpilot/operator:{version}"
    (example,) = yaml.safe_load(about["annotations"]["artifacthub.io/crdsExamples"])
    assert example["spec"]["engine"]["image"] == f"ghcr.io/kvpilot/runtime:{version}"
    assert faults(example) == ()


def test_every_service_in_the_install_guide_is_valid(root):
    guide = (root / "docs/install.md").read_text()
    heredocs = re.findall(r"<<EOF\n(.*?)\n *EOF", guide, re.DOTALL)
    objects = [one for text in heredocs for one in yaml.safe_load_all(textwrap.dedent(text))]
    services = [one for one in objects if one["kind"] == "QuantizedLLMService"]
    assert services
    assert [faults(one) for one in services] == [()] * len(services)


@pytest.mark.parametrize("page", ["docs/install.md", "charts/kvpilot/README.md"])
def test_every_page_that_is_linked_to_exists(root, page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (root / page).read_text())
    assert links
    assert [link for link in links if not (root / page).parent.joinpath(link).exists()] == []
