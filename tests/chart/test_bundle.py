"""The OLM bundle passes the checks of catalogs, and installs the same objects as the chart."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.manifests import objects
from kvpilot_localcluster.toolbox.courier import courier
from kvpilot_localcluster.toolbox.hadolint import hadolint
from kvpilot_operator.api.faults import faults
from support.catalogs import Bundle, bundle_faults, read_bundle

OPENSHIFT = ["--api-versions", "security.openshift.io/v1"]


@pytest.fixture
def bundle(root: Path) -> Bundle:
    return read_bundle(root / "bundle")


def courier_says(folder: Path, manifests: Path, package: str) -> tuple[int, list[str]]:
    """Return operator-courier's exit status and errors for these manifests, in the old layout that it supports."""
    flat = folder / "flat"
    flat.mkdir()
    for kind in ("clusterserviceversion", "quantizedllmservices"):
        (file,) = manifests.glob(f"*{kind}.yaml")
        shutil.copy(file, flat)
    channels = [{"name": "candidate", "currentCSV": package}]
    (flat / "kvpilot.package.yaml").write_text(yaml.safe_dump({"packageName": "kvpilot", "channels": channels}))
    done = subprocess.run(
        [courier(), "verify", "--ui_validate_io", flat], capture_output=True, text=True, check=False, timeout=600
    )
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("ERROR")]


def test_the_operator_frameworks_own_checks_find_no_error(root: Path, tmp_path: Path, bundle: Bundle) -> None:
    assert courier_says(tmp_path, root / "bundle/manifests", bundle.csv["metadata"]["name"]) == (0, [])


def test_the_operator_frameworks_own_checks_find_mistakes(root: Path, tmp_path: Path, bundle: Bundle) -> None:
    manifests = tmp_path / "manifests"
    shutil.copytree(root / "bundle/manifests", manifests)
    (file,) = manifests.glob("*clusterserviceversion.yaml")
    file.write_text(file.read_text().replace("capabilities: Auto Pilot", "capabilities: Perpetual Motion"))
    status, errors = courier_says(tmp_path, manifests, bundle.csv["metadata"]["name"])
    assert status == 1
    assert any("Perpetual Motion" in line for line in errors)


def test_the_checks_of_catalogs_find_no_fault(bundle: Bundle) -> None:
    assert bundle_faults(bundle) == []


WRONG: dict[str, tuple[str, Any]] = {
    "PACKAGE.vVERSION": ("metadata.name", "kvpilot-0.1.0"),
    "spec.version": ("spec.version", "v0.1"),
    "spec.minKubeVersion": ("spec.minKubeVersion", ">=1.29"),
    "spec.displayName": ("spec.displayName", ""),
    "spec.provider": ("spec.provider", {"name": "kvpilot", "url": "https://example.com"}),
    "maintainer": ("spec.maintainers", [{"name": "somebody"}]),
    "capability": ("metadata.annotations.capabilities", "Perpetual Motion"),
    "category": ("metadata.annotations.categories", "Security, Astrology"),
    "link": ("spec.links", [{"name": "docs", "url": "docs/install.md"}]),
    "one icon": ("spec.icon", []),
    "image reference": ("spec.relatedImages", [{"name": "operator", "image": "Kvpilot Operator"}]),
    "alm-examples": ("metadata.annotations.alm-examples", "[{]"),
    "provided are": ("metadata.annotations.alm-examples", '[{"apiVersion": "v1", "kind": "Pod"}]'),
    "named once": ("spec.installModes", [{"type": "AllNamespaces", "supported": True}]),
    "no install mode": ("spec.installModes", []),
    "no deployment": ("spec.install.spec.deployments", []),
    "select its own": ("spec.install.spec.deployments.0.spec.selector.matchLabels", {"app": "another"}),
    "requests no CPU": ("spec.install.spec.deployments.0.spec.template.spec.containers.0.resources", {}),
    "OLM's to do": (
        "spec.install.spec.clusterPermissions.0.rules",
        [{"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["create"]}],
    ),
    "defined are": ("spec.customresourcedefinitions.owned.0.version", "v1"),
    "no description": ("spec.customresourcedefinitions.owned.0.description", ""),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_report_of_a_wrong_cluster_service_version_names_the_wrong_field(bundle: Bundle, fault: str) -> None:
    path, value = WRONG[fault]
    csv = copy.deepcopy(bundle.csv)
    *parents, last = ["metadata", "annotations", path.split(".")[-1]] if "annotations" in path else path.split(".")
    at = csv
    for part in parents:
        at = at[int(part)] if part.isdigit() else at[part]
    at[last] = value
    others = [one for one in bundle.objects if one is not bundle.csv]
    assert fault in "\n".join(bundle_faults(Bundle([*others, csv], bundle.annotations, bundle.image_labels)))


@pytest.mark.parametrize(
    ("fault", "one"),
    [
        ("no kind that OLM unpacks", {"kind": "CronJob", "metadata": {"name": "extra"}}),
        ("names a namespace", {"kind": "Service", "metadata": {"name": "extra", "namespace": "kvpilot-system"}}),
        ("OLM's to make", {"kind": "ServiceAccount", "metadata": {"name": "kvpilot-operator"}}),
        ("be drained", {"kind": "PodDisruptionBudget", "metadata": {"name": "a"}, "spec": {"maxUnavailable": 0}}),
    ],
)
def test_an_object_that_does_not_belong_in_a_bundle_is_a_fault(bundle: Bundle, fault: str, one: Any) -> None:
    assert fault in "\n".join(bundle_faults(Bundle([*bundle.objects, one], bundle.annotations, bundle.image_labels)))


def test_metadata_that_do_not_match_the_bundle_are_faults(bundle: Bundle) -> None:
    prefix = "operators.operatorframework.io.bundle"
    wrong = bundle.annotations | {f"{prefix}.channels.v1": "edge", f"{prefix}.package.v1": "other"}
    found = "\n".join(bundle_faults(Bundle(bundle.objects, wrong, bundle.image_labels, 1 << 21)))
    for said in ("more than", "recommends", "no channel", "the package is not", "labels are not"):
        assert said in found


def test_the_bundle_runs_the_charts_deployment_with_the_charts_rights(root: Path, bundle: Bundle) -> None:
    base = objects((root / "config/base/operator.yaml").read_text())
    strategy = bundle.csv["spec"]["install"]["spec"]
    (installed,) = strategy["deployments"]
    (plain,) = (one for one in base if one["kind"] == "Deployment")
    # OpenShift assigns users by namespace. The image names the user for other clusters.
    security = plain["spec"]["template"]["spec"]["securityContext"]
    assert (security.pop("runAsUser"), security.pop("runAsGroup")) == (65532, 65532)
    assert "USER 65532:65532" in (root / "docker/operator.Dockerfile").read_text()
    assert (installed["name"], installed["spec"]) == (plain["metadata"]["name"], plain["spec"])
    for kind, granted in (("ClusterRole", strategy["clusterPermissions"]), ("Role", strategy["permissions"])):
        (one,) = granted
        (binding,) = (two for two in base if two["kind"] == f"{kind}Binding")
        (role,) = (two for two in base if two["kind"] == kind and two["metadata"]["name"] == binding["roleRef"]["name"])
        (subject,) = binding["subjects"]
        assert one == {"serviceAccountName": subject["name"], "rules": role["rules"]}


def test_the_bundles_crd_is_the_one_in_crds(root: Path, bundle: Bundle) -> None:
    (definition,) = bundle.definitions
    (source,) = objects((root / "crds/kvpilot.io_quantizedllmservices.yaml").read_text())
    assert definition["spec"] == source["spec"]


def test_every_example_is_a_service_that_the_operator_accepts(bundle: Bundle) -> None:
    examples = json.loads(bundle.csv["metadata"]["annotations"]["alm-examples"])
    assert examples
    assert [faults(one) for one in examples] == [()] * len(examples)


def test_every_field_outside_lists_is_described_once(bundle: Bundle) -> None:
    (owned,) = bundle.csv["spec"]["customresourcedefinitions"]["owned"]
    for part, known in (("specDescriptors", "kvCache.mode"), ("statusDescriptors", "kvCache.activeDtype")):
        paths = [one["path"] for one in owned[part]]
        assert known in paths
        assert len(paths) == len(set(paths))
        assert all(one["displayName"] and one["description"] for one in owned[part])


def test_hadolint_finds_nothing_in_the_bundles_dockerfile(root: Path) -> None:
    done = subprocess.run(
        [hadolint(), "--no-color", root / "bundle/Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
