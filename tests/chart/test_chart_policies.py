"""What checkov says of the rendered chart: nothing that exceptions.yaml does not explain."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from toolbox.checkov import checkov

HERE = Path(__file__).parent
SETS = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
# Neither an update check nor a download of policies: what is installed is what judges.
OFFLINE = {"CKV_SKIP_PACKAGE_UPDATE_CHECK": "true", "BC_SKIP_MAPPING": "TRUE"}


@pytest.fixture(scope="module")
def manifests(rendered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rendered")
    for name in SETS:
        # The definition is API, not workload, and would be most of what is read.
        objects = [one for one in rendered(name) if one["kind"] != "CustomResourceDefinition"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
    return folder


def unexplained(findings):
    """Findings (check, kind, what is said) without an exception, and exceptions without a finding."""
    exceptions = yaml.safe_load((HERE / "exceptions.yaml").read_text())
    assert all(one["reason"].strip() for one in exceptions)
    excused = {(one["check"], kind) for one in exceptions for kind in one["kinds"]}
    found = {(check, kind) for check, kind, _ in findings}
    return [said for check, kind, said in findings if (check, kind) not in excused], sorted(excused - found)


def test_checkov_finds_nothing_unexplained(manifests):
    command = [checkov(), "--directory", manifests, "--framework", "kubernetes", "--skip-download"]
    command += ["--output", "json", "--quiet", "--compact", "--soft-fail"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=250, env={**os.environ, **OFFLINE}
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["resource_count"] > 40
    assert report["summary"]["passed"] > 200
    findings = [
        (
            one["check_id"],
            one["resource"].partition(".")[0],
            f"{one['check_id']} {one['check_name']}: {one['resource']}",
        )
        for one in report["results"]["failed_checks"]
    ]
    assert unexplained(findings) == ([], [])
