"""Render a kustomize base and its overlays from the chart. An overlay holds the patches for other values."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

from kvpilot_localcluster.toolbox.helm import render

NAMESPACE = "kvpilot-system"
VALUES: dict[str, dict[str, Any]] = {
    "base": {},
    "overlays/namespaced": {"watchNamespaces": [NAMESPACE]},
    "overlays/monitoring": {
        "monitoring": {
            part: {"enabled": True} for part in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
        }
    },
}
"""Chart values for each folder of config/."""

_HELMS_OWN = ("helm.sh/chart", "app.kubernetes.io/managed-by")
HEADER = "# Written by `make generate` from charts/kvpilot: change the chart, not this file.\n"

Manifest = dict[str, Any]
Identity = tuple[str, str, str, str]


def rendered(chart: Path, values: Mapping[str, Any], *flags: str) -> list[Manifest]:
    """Return the chart's objects. Leave out Helm's own labels, the annotation that keeps CRDs, and tests."""
    plain = {**values, "crds": {"keep": False}}
    found = render(chart, plain, "--skip-tests", *flags, namespace=NAMESPACE)
    for labels in _labels(found):
        for label in _HELMS_OWN:
            labels.pop(label, None)
    return found


def _labels(node: Any) -> Iterator[dict[str, str]]:
    if isinstance(node, dict):
        if isinstance(node.get("labels"), dict):
            yield node["labels"]
        for key, child in node.items():
            # A CRD's schema may have a field named "labels", so skip `versions`.
            if key != "versions":
                yield from _labels(child)
    elif isinstance(node, list):
        for child in node:
            yield from _labels(child)


def folders(chart: Path) -> dict[str, str]:
    """Return the files of config/ by their path in it."""
    base = rendered(chart, VALUES["base"])
    definitions = [one for one in base if one["kind"] == "CustomResourceDefinition"]
    files = {
        "base/namespace.yaml": dump([_namespace()]),
        "base/crds.yaml": dump(definitions),
        "base/operator.yaml": dump([one for one in base if one not in definitions]),
        "base/kustomization.yaml": _kustomization(["namespace.yaml", "crds.yaml", "operator.yaml"], []),
    }
    for folder, values in VALUES.items():
        if folder != "base":
            files |= _overlay(folder, base, rendered(chart, values))
    return files


def _overlay(folder: str, base: Sequence[Manifest], wanted: Sequence[Manifest]) -> dict[str, str]:
    old, new = {_identity(one): one for one in base}, {_identity(one): one for one in wanted}
    added = [one for identity, one in new.items() if identity not in old]
    patches = [_removal(one) for identity, one in old.items() if identity not in new]
    for identity, one in new.items():
        if identity in old and (steps := jsonpatch.make_patch(old[identity], one).patch):
            patches.append({"target": _target(one), "patch": yaml.safe_dump(steps, sort_keys=False)})
    resources = ["../../base", *(["added.yaml"] if added else [])]
    files = {f"{folder}/kustomization.yaml": _kustomization(resources, patches)}
    return files | ({f"{folder}/added.yaml": dump(added)} if added else {})


def _identity(one: Manifest) -> Identity:
    metadata = one["metadata"]
    return one["apiVersion"], one["kind"], metadata.get("namespace", ""), metadata["name"]


def _target(one: Manifest) -> dict[str, str]:
    group, _, version = one["apiVersion"].rpartition("/")
    target = {"group": group, "version": version, "kind": one["kind"], "name": one["metadata"]["name"]}
    return {name: value for name, value in target.items() if value}


def _removal(one: Manifest) -> dict[str, Any]:
    about = {name: value for name, value in one["metadata"].items() if name in ("name", "namespace")}
    gone = {"apiVersion": one["apiVersion"], "kind": one["kind"], "metadata": about}
    return {"patch": yaml.safe_dump({"$patch": "delete", **gone}, sort_keys=False)}


def _namespace() -> Manifest:
    restricted = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": restricted}}


def _kustomization(resources: Sequence[str], patches: Sequence[Mapping[str, Any]]) -> str:
    content: Manifest = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    content |= {"resources": list(resources), **({"patches": list(patches)} if patches else {})}
    return dump([content])


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings as blocks, which are easier to read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump(objects: Sequence[Manifest]) -> str:
    """Return the objects as one YAML file that names its source."""
    return HEADER + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
