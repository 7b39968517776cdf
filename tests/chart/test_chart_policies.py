"""checkov reports only documented exceptions for the rendered chart and for the objects of a service."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from kvpilot_localcluster.toolbox.checkov import checkov
from kvpilot_operator.api.spec import parse
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.objects import disruption_budget, service, workload
from kvpilot_operator.state.snapshot import ServiceKey
from support.crd import apply_defaults

HERE = Path(__file__).parent
SETS = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
# No update check and no downloaded policies: only the installed version decides.
OFFLINE = {"CKV_SKIP_PACKAGE_UPDATE_CHECK": "true", "BC_SKIP_MAPPING": "TRUE"}


@pytest.fixture(scope="module")
def chart_manifests(rendered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chart")
    for name in SETS:
        # Skip the CRD: it is not a workload, and it is most of the text.
        objects = [one for one in rendered(name) if one["kind"] != "CustomResourceDefinition"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
    return folder


@pytest.fixture(scope="module")
def engine_manifests(root, tmp_path_factory):
    folder, key = tmp_path_factory.mktemp("engines"), ServiceKey("models", "chat")
    for file in sorted((root / "examples").glob("*.yaml")):
        for one in yaml.safe_load_all(file.read_text()):
            if one["kind"] != "QuantizedLLMService":
                continue
            template = pod_template(key.name, parse(apply_defaults(one)), "k4v4")
            name = revision(template)
            objects = [
                workload(key, "u-1", template, 2, 600),
                service(key, "u-1", key.name, name),
                disruption_budget(key, "u-1", name, 1),
            ]
            (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
    return folder


def unexplained(findings, exceptions):
    """Return findings (check, kind, message) that have no exception, and exceptions that match no finding."""
    assert all(one["reason"].strip() for one in exceptions)
    excused = {(one["check"], kind) for one in exceptions for kind in one["kinds"]}
    found = {(check, kind) for check, kind, _ in findings}
    return [said for check, kind, said in findings if (check, kind) not in excused], sorted(excused - found)


def findings_of(manifests, resources, passed):
    """Return checkov's findings, and check that it saw enough objects and passed enough checks."""
    command = [checkov(), "--directory", manifests, "--framework", "kubernetes", "--skip-download"]
    command += ["--output", "json", "--quiet", "--compact", "--soft-fail"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env={**os.environ, **OFFLINE}
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["resource_count"] >= resources
    assert report["summary"]["passed"] >= passed
    return [
        (
            one["check_id"],
            one["resource"].partition(".")[0],
            f"{one['check_id']} {one['check_name']}: {one['resource']}",
        )
        for one in report["results"]["failed_checks"]
    ]


def explained(name):
    return yaml.safe_load((HERE / name).read_text())


def test_checkov_finds_nothing_unexplained_in_the_chart(chart_manifests):
    findings = findings_of(chart_manifests, resources=40, passed=200)
    assert unexplained(findings, explained("exceptions.yaml")) == ([], [])


def test_checkov_finds_nothing_unexplained_in_the_objects_of_a_service(engine_manifests):
    findings = findings_of(engine_manifests, resources=12, passed=240)
    assert unexplained(findings, explained("exceptions-engines.yaml")) == ([], [])
