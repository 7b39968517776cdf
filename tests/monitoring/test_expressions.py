"""Dashboards and alerts are valid PromQL, and use only existing metrics and labels."""

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitored import documented, without_discovery
from panels import DASHBOARDS, RULES, alerts, annotations, label_names, load, metric_names, panels
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvpilot_localcluster.engines import PAGE_EARLY, PAGE_LATER
from kvpilot_localcluster.toolbox.promtool import promtool
from kvpilot_operator.control.known_reasons import KNOWN, OTHER
from kvpilot_operator.control.service_metrics import FAMILIES, ServiceSeries
from kvpilot_operator.control.telemetry import Telemetry
from kvpilot_operator.decide import decide
from support.services import manifest, running, samples

HERE = Path(__file__).parent
RUNBOOKS = HERE.parents[1] / "docs" / "runbooks"
# Labels that Prometheus adds to every target, and labels that the PodMonitor adds to engines.
TARGET = {
    "cluster",
    "namespace",
    "pod",
    "job",
    "instance",
    "kvpilot_io_service",
    "kvpilot_io_revision",
    "kvpilot_io_dtype",
}
EXPRESSIONS = [(f"{p.dashboard}: {p.title}", p.filled("models", "chat")) for p in (*panels(), *annotations())]
EXPRESSIONS += [(rule["alert"], rule["expr"]) for rule in alerts()]


def page_of(text: str) -> dict[str, set[str]]:
    """Return the labels of each series of a page, by the series' name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def telemetry() -> Telemetry:
    """Return the registry after a real reconcile of a service."""
    made = Telemetry()
    observed = running(manifest(), "auto")
    observed = running(manifest(), "auto", samples={observed.traffic: samples(usage=0.95, waiting=3)})
    series = ServiceSeries()
    series.show(observed, decide(observed))
    made.services(lambda: [(observed.key, series)])
    return made


@pytest.fixture(scope="module")
def existing(telemetry) -> dict[str, set[str]]:
    """Return the labels of every series, by name. Our series come from registries, and vLLM's from its metrics page."""
    ours = page_of(generate_latest(telemetry.registry).decode())
    for family in FAMILIES:
        ours.setdefault(family.series, set()).update({"namespace", "name", *family.labels})
    for name, metric in telemetry.registry._names_to_collectors.items():
        labels = getattr(metric, "_labelnames", ())
        if labels:
            ours.setdefault(name, set()).update(labels)
    for page in (PAGE_EARLY, PAGE_LATER):
        for name, labels in page_of(page.read_text()).items():
            ours.setdefault(name, set()).update(labels)
    return ours


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_metric_and_label_in_a_query_exists(where, expression, existing):
    names = metric_names(expression)
    assert names, f"{where}: no metric found in {expression}"
    assert names <= existing.keys(), f"{where}: unknown metrics {sorted(names - existing.keys())}"
    for metric, label, _ in label_names(expression):
        assert label in existing[metric] | TARGET, f"{where}: {metric} has no {label}"


def words(label: str) -> set[str]:
    """Return all values of this label of `kvpilot_condition` for which a query asks."""
    return {
        word
        for _, expression in EXPRESSIONS
        for metric, name, value in label_names(expression)
        if (metric, name) == ("kvpilot_condition", label)
        for word in value.split("|")
    }


def test_every_condition_in_a_query_is_one_that_the_operator_sets(telemetry):
    text = generate_latest(telemetry.registry).decode()
    real = set(re.findall(r'kvpilot_condition\{[^}]*type="(\w+)"', text))
    asked = words("type")
    assert len(asked) >= 4
    assert asked <= real


def test_every_reason_in_a_query_is_one_that_a_condition_may_have():
    asked = words("reason")
    assert "RolloutPaused" in asked
    assert [word for word in asked if not any(re.fullmatch(word, reason) for reason in {*KNOWN, OTHER})] == []


def test_prometheus_itself_reads_every_expression_and_every_rule(tmp_path):
    records = [{"record": f"panel:{number}", "expr": text} for number, (_, text) in enumerate(EXPRESSIONS)]
    made = tmp_path / "panels.yaml"
    made.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    for path in (made, RULES):
        ended = subprocess.run([promtool(), "check", "rules", path], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "SUCCESS" in ended.stdout


@pytest.mark.parametrize("note", list(annotations()), ids=lambda note: f"{note.dashboard}: {note.title}")
def test_an_annotation_marks_a_change_once_and_at_its_time(note, tmp_path):
    labels = 'cluster="east", job="kvpilot-operator", namespace="models", name="chat"'
    series = [
        {"series": f'kvpilot_active_dtype{{{labels}, dtype="auto"}}', "values": "1x9 stale"},
        {"series": f'kvpilot_active_dtype{{{labels}, dtype="k4v4"}}', "values": "_x10 1x20"},
        {
            "series": f'kvpilot_decisions_total{{{labels}, action="Promoted", reason="WithinLimits"}}',
            "values": "_x10 1x20",
        },
        {"series": f'kvpilot_decisions_total{{{labels}, action="Hold", reason="Busy"}}', "values": "0+1x30"},
    ]
    expression = f"count({note.filled('models', 'chat')})"
    times = {"5m": [], "10m": [{"labels": "{}", "value": 1}], "12m": [], "25m": []}
    checks = [{"expr": expression, "eval_time": time, "exp_samples": found} for time, found in times.items()]
    made = tmp_path / "annotation.yaml"
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    made.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    ended = subprocess.run([promtool(), "test", "rules", made], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_each_dashboard_marks_changes_of_the_dtype_and_filters_by_cluster():
    assert {(one.dashboard, one.title) for one in annotations()} == {
        (path.stem, title) for path in DASHBOARDS for title in ("Changes of the dtype", "Decisions")
    }
    for where, expression in EXPRESSIONS:
        if ": " in where:
            selectors = re.findall(r"\{[^}]*\}", expression)
            assert selectors
            assert all('cluster=~".*"' in one for one in selectors), where


def test_the_check_finds_invalid_promql(tmp_path):
    made = tmp_path / "broken.yaml"
    made.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": [{"record": "a:b", "expr": "sum(by x)"}]}]}))
    assert subprocess.run([promtool(), "check", "rules", made], capture_output=True, check=False).returncode != 0
    assert metric_names('sum by (name) (rate(kvpilot_nonsense_total{a="b"}[5m])) > 0') == {"kvpilot_nonsense_total"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_dashboard_has_all_parts_that_grafana_needs(path):
    dashboard = load(path)
    assert dashboard["uid"] == f"kvpilot-{path.stem}"
    assert dashboard["schemaVersion"] >= 39
    assert dashboard["id"] is None
    variables = [one["name"] for one in dashboard["templating"]["list"]]
    assert variables[0] == "datasource"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"\$\{?([a-z_]\w*)", str([p.get("targets") for p in dashboard["panels"]])))
    assert used - {"__rate_interval"} == set(variables)
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        here = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not here & cells, f"{panel['title']} lies over another panel"
        cells |= here
        if panel["type"] != "row":
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_each_alert_fires_when_it_should_and_only_then():
    ended = subprocess.run(
        [promtool(), "test", "rules", HERE / "rules_test.yaml"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def own(name: str, existing: dict[str, set[str]]) -> bool:
    """Return True if a series is about the operator itself, so that it has the namespace of its target."""
    return "namespace" not in existing[name]


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_query_selects_the_operators_series_by_job_and_namespace(where, expression, existing):
    for name, inside in re.findall(r"\b((?:kvpilot|process)_\w+)\b(?:\{([^}]*)\})?", expression):
        if not name.startswith("kvpilot_io_"):
            assert 'job="kvpilot-operator"' in inside, f"{where}: {name} of any job"
            if own(name, existing):
                assert 'namespace="kvpilot-system"' in inside, f"{where}: {name} of any namespace"


def hostile(existing: dict[str, set[str]]) -> list[dict[str, str]]:
    """Return a page that a tenant could forge, with series for every selector of every alert.

    Values are low, high and growing. The chart's PodMonitor scrapes the forged engine series. A Service with the
    operator's name, in the tenant's namespace, serves forged operator series.
    """
    made = {}
    for rule in alerts():
        for name, inside in re.findall(r"(kvpilot_\w+)\{([^}]*)\}", rule["expr"]):
            wanted = dict(re.findall(r'(\w+)=~?"([^"]*)"', inside))
            labels = {"reason": "Wrong", "verdict": "Failed", "dtype": "k4v4", "name": "chat"}
            labels |= {label: value.partition("|")[0].replace("..", "00") for label, value in wanted.items()}
            jobs = ["kvpilot-system/kvpilot-operator-engines", "kubernetes-pods"]
            for job in [*jobs, "kvpilot-operator"] if own(name, existing) else jobs:
                for values in ("0x120", "1000000000000x120", "0+1000x120"):
                    text = {**labels, "job": job, "namespace": "models", "pod": f"evil {values}"}
                    series = f"{name}{{{', '.join(f'{label}={value!r}' for label, value in text.items())}}}"
                    made[series.replace("'", '"')] = values
    return [{"series": series, "values": values} for series, values in made.items()]


def test_a_tenants_series_neither_fire_nor_silence_an_alert(tmp_path, existing):
    cases = yaml.safe_load((HERE / "rules_test.yaml").read_text())
    cases["rule_files"] = [str(RULES)]
    forged = hostile(existing)
    for case in cases["tests"]:
        case["input_series"] += forged
    made = tmp_path / "hostile.yaml"
    made.write_text(json.dumps(cases))
    ended = subprocess.run([promtool(), "test", "rules", made], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def moved(case: dict[str, Any], cluster: str) -> dict[str, Any]:
    """Return a test case whose series, and the alerts that they raise, are those of another cluster."""

    def within(text: str) -> str:
        return re.sub(r"^(\w+)\{", rf'\1{{cluster="{cluster}", ', re.sub(r'cluster="\w+", ', "", text))

    series = [{**one, "series": within(one["series"])} for one in case["input_series"]]
    checks = copy.deepcopy(case["promql_expr_test"])
    for sample in (sample for check in checks for sample in check.get("exp_samples", ())):
        sample["labels"] = within(sample["labels"])
    return {**case, "input_series": series, "promql_expr_test": checks}


def test_another_cluster_in_the_same_ruler_neither_fires_nor_hides_an_alert(tmp_path):
    """Evaluate a test case together with the series of a second cluster, in which no alert fires."""
    cases = yaml.safe_load((HERE / "rules_test.yaml").read_text())
    # Skip cases that check only an alert's text, that already have two clusters, or in which no operator ever ran.
    alone = [
        case
        for case in cases["tests"]
        if "promql_expr_test" in case and 'cluster="' not in str(case) and "never" not in case["name"]
    ]
    by_alert: dict[str, list[dict[str, Any]]] = {}
    for case in alone:
        by_alert.setdefault(_alert(case["promql_expr_test"][0]), []).append(case)
    tests = []
    for alert, of_alert in by_alert.items():
        quiet = [case for case in of_alert if not _fires(case, alert)]
        for case in of_alert:
            east, west = moved(case, "east"), moved(quiet[0], "west")
            checks = [check for check in east["promql_expr_test"] if _alert(check) == alert]
            series = [*east["input_series"], *west["input_series"]]
            tests.append(
                {**case, "name": f"{alert}: {case['name']}", "input_series": series, "promql_expr_test": checks}
            )
    assert {alert for alert in by_alert if any(_fires(case, alert) for case in by_alert[alert])} >= {
        "KvpilotOperatorDown",
        "KvpilotSeveralLeaders",
        "KvpilotServiceDown",
    }
    made = tmp_path / "clusters.yaml"
    made.write_text(yaml.safe_dump({**cases, "rule_files": [str(RULES)], "tests": tests}))
    ended = subprocess.run([promtool(), "test", "rules", made], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _alert(check: dict[str, Any]) -> str:
    found = re.search(r'alertname="(\w+)"', check["expr"])
    assert found is not None
    return found[1]


def _fires(case: dict[str, Any], alert: str) -> bool:
    return any(check.get("exp_samples") for check in case["promql_expr_test"] if _alert(check) == alert)


def firing() -> dict[str, list[set[str]]]:
    """Return the labels with which each alert fires in each of its tests; an empty set means that it stays silent."""
    found: dict[str, list[set[str]]] = {}
    for case in yaml.safe_load((HERE / "rules_test.yaml").read_text())["tests"]:
        fired: dict[str, set[str]] = {}
        for check in case.get("promql_expr_test", ()):
            name = _alert(check)
            labels = {one for s in check.get("exp_samples", ()) for one in re.findall(r"(\w+)=", s["labels"])}
            fired[name] = fired.get(name, set()) | labels
        for name, labels in fired.items():
            found.setdefault(name, []).append(labels)
    return found


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_each_alert_has_a_firing_and_a_silent_test_a_runbook_and_only_existing_labels(rule):
    cases = firing()[rule["alert"]]
    assert any(cases), "no test in which it fires"
    assert not all(cases), "no test in which it stays silent"
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    words = rule["annotations"]
    assert set(words) == {"summary", "description", "runbook_url"}
    named = set(re.findall(r"\$labels\.(\w+)", words["summary"] + words["description"]))
    assert all(named <= labels for labels in cases if labels), f"{named} are not all labels of the alert"
    runbook = RUNBOOKS / f"{rule['alert']}.md"
    assert words["runbook_url"].endswith(f"/docs/runbooks/{runbook.name}")
    text = runbook.read_text()
    parts = [text.index(f"\n## {title}\n") for title in ("Meaning", "Impact", "Diagnosis", "Mitigation")]
    assert parts == sorted(parts)
    assert "kubectl " in text


def test_there_is_no_runbook_without_its_alert():
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == {rule["alert"] for rule in alerts()}


def test_prometheus_accepts_the_documented_scrape_configuration(tmp_path):
    made = tmp_path / "prometheus.yml"
    config = without_discovery(documented(), tmp_path / "targets.json")
    (tmp_path / "targets.json").write_text("[]")
    made.write_text(yaml.safe_dump(config))
    ended = subprocess.run([promtool(), "check", "config", made], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    labels = {rule.get("target_label") for job in config["scrape_configs"] for rule in job["relabel_configs"]}
    assert labels - {None} == TARGET - {"cluster", "job", "instance"}
