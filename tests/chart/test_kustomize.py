"""Plain manifests equal the chart: kustomize renders each folder as Helm renders the matching values."""

import subprocess

import pytest
import yaml

from kvpilot_localcluster.manifests import objects
from kvpilot_localcluster.toolbox.helm import render
from kvpilot_localcluster.toolbox.kubectl import kubectl

HELMS_OWN = {"helm.sh/chart", "app.kubernetes.io/managed-by"}
MONITORING = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
FOLDERS = {
    "base": {},
    "overlays/namespaced": {"watchNamespaces": ["kvpilot-system"]},
    "overlays/monitoring": {"monitoring": {part: {"enabled": True} for part in MONITORING}},
}


def plain(one):
    """Drop the parts of a manifest that only Helm reads."""
    metadata = one["metadata"]
    template = one.get("spec", {}).get("template", {}).get("metadata", {})
    for part in (metadata, template):
        for label in HELMS_OWN & part.get("labels", {}).keys():
            del part["labels"][label]
    metadata.get("annotations", {}).pop("helm.sh/resource-policy", None)
    if not metadata.get("annotations", True):
        del metadata["annotations"]
    return one


def by_identity(objects):
    return {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]): one for one in objects}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_equals_helms_output_for_its_values(root, chart, folder):
    done = subprocess.run(
        [kubectl(), "kustomize", root / "config" / folder], capture_output=True, text=True, check=True
    )
    made = by_identity(objects(done.stdout))
    wanted = by_identity(plain(one) for one in render(chart, FOLDERS[folder], "--skip-tests"))
    namespace = made.pop(("Namespace", None, "kvpilot-system"))
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert made.keys() == wanted.keys()
    for identity, one in wanted.items():
        assert made[identity] == one, identity


def test_overlays_are_patches_and_not_copies(root):
    for folder in FOLDERS.keys() - {"base"}:
        kustomization = yaml.safe_load((root / "config" / folder / "kustomization.yaml").read_text())
        assert "../../base" in kustomization["resources"]
        added = yaml.safe_load_all((root / "config" / folder / "added.yaml").read_text())
        base = by_identity(objects((root / "config/base/operator.yaml").read_text()))
        assert not by_identity(added).keys() & base.keys()
