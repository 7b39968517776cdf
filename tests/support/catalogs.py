"""Requirements of catalogs on an OLM bundle and on a chart's annotations, from their documentation and validators.

The validators themselves cannot be installed here: operator-sdk and opm for a bundle (default checks, OperatorHub, good
practices), and Artifact Hub for a chart. Each function returns the faults as texts.
"""

import gzip
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import yaml

from kvpilot_localcluster.manifests import objects

Json = Any

CAPABILITIES = ("Basic Install", "Seamless Upgrades", "Full Lifecycle", "Deep Insights", "Auto Pilot")
OPERATOR_HUB_CATEGORIES = {
    *("AI/Machine Learning", "Application Runtime", "Big Data", "Cloud Provider", "Developer Tools", "Database"),
    *("Integration & Delivery", "Logging & Tracing", "Monitoring", "Modernization & Migration", "Networking"),
    *("OpenShift Optional", "Security", "Storage", "Streaming & Messaging", "Observability"),
}
ARTIFACT_HUB_CATEGORIES = {
    *("ai-machine-learning", "database", "integration-delivery", "monitoring-logging", "networking", "security"),
    *("storage", "streaming-messaging", "skip-prediction"),
}
INSTALL_MODES = {"OwnNamespace", "SingleNamespace", "MultiNamespace", "AllNamespaces"}
KINDS = {
    *("ClusterServiceVersion", "CustomResourceDefinition", "Secret", "ConfigMap", "ServiceAccount", "Service"),
    *("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "PrometheusRule", "ServiceMonitor"),
    *("PodDisruptionBudget", "PriorityClass", "VerticalPodAutoscaler", "ConsoleYAMLSample"),
}
"""Kinds that every version of OLM accepts in a bundle."""
LARGEST = 1 << 20
"""Size limit of all files, gzipped and in base64, in bytes: OLM keeps a bundle in one ConfigMap."""

_SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_LABEL = re.compile(r"(?=.{1,63}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(
    r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?", re.ASCII
)
_MEDIA = {"image/gif", "image/jpeg", "image/png", "image/svg+xml"}


@dataclass(frozen=True)
class Bundle:
    """Manifests of a bundle, their annotations, the labels of the image, and the size as OLM computes it."""

    objects: list[Json]
    annotations: dict[str, str]
    image_labels: dict[str, str]
    bytes: int = 0
    csv: Json = field(init=False)

    def __post_init__(self) -> None:
        (csv,) = (one for one in self.objects if one["kind"] == "ClusterServiceVersion")
        object.__setattr__(self, "csv", csv)

    @property
    def definitions(self) -> list[Json]:
        return [one for one in self.objects if one["kind"] == "CustomResourceDefinition"]


def read_bundle(folder: Path) -> Bundle:
    """Read the bundle in a folder with manifests/, metadata/annotations.yaml and a Dockerfile."""
    files = sorted((folder / "manifests").iterdir())
    size = sum(len(gzip.compress(file.read_bytes())) * 4 // 3 for file in files)
    labels = re.findall(r'(?m)^LABEL (\S+?)="(.*)"$', (folder / "Dockerfile").read_text())
    annotations = yaml.safe_load((folder / "metadata/annotations.yaml").read_text())["annotations"]
    return Bundle([one for file in files for one in objects(file.read_text())], annotations, dict(labels), size)


def bundle_faults(bundle: Bundle) -> list[str]:
    """Return the faults for which a catalog would reject this bundle; empty if it accepts the bundle."""
    rules: tuple[Callable[[Bundle], Iterator[str]], ...] = (_parts, _about, _examples, _install, _owned, _metadata)
    return [fault for rule in rules for fault in rule(bundle)]


def _parts(bundle: Bundle) -> Iterator[str]:
    if bundle.bytes > LARGEST:
        yield f"{bundle.bytes} bytes are more than {LARGEST}"
    deployments = bundle.csv["spec"]["install"]["spec"]["deployments"]
    accounts = {one["spec"]["template"]["spec"]["serviceAccountName"] for one in deployments}
    for one in bundle.objects:
        if one["kind"] not in KINDS:
            yield f"{one['kind']} is no kind that OLM unpacks"
        if "namespace" in one["metadata"]:
            yield f"{one['kind']} names a namespace, which is OLM's to choose"
        if one["kind"] == "ServiceAccount" and one["metadata"]["name"] in accounts:
            yield "the ServiceAccount of a deployment is OLM's to make"
        budget = one.get("spec", {}) if one["kind"] == "PodDisruptionBudget" else {}
        if budget.get("maxUnavailable") in (0, "0%") or budget.get("minAvailable") == "100%":
            yield "the PodDisruptionBudget lets no node be drained"


def _about(bundle: Bundle) -> Iterator[str]:
    metadata, spec = bundle.csv["metadata"], bundle.csv["spec"]
    name, _, version = metadata["name"].partition(".v")
    if not _LABEL.fullmatch(metadata["name"]) or not name or version != spec["version"]:
        yield f"metadata.name {metadata['name']} is not PACKAGE.vVERSION of at most 63 characters"
    for path in ("version", "minKubeVersion"):
        if not _SEMVER.fullmatch(spec.get(path, "")):
            yield f"spec.{path} is no semantic version"
    for path in ("displayName", "description"):
        if not spec.get(path):
            yield f"spec.{path} is missing"
    if list(spec.get("provider", {})) != ["name"]:
        yield "spec.provider has to hold a name and nothing else"
    if any(not one.get("name") or not one.get("email") for one in spec.get("maintainers", ())):
        yield "a maintainer without name or email"
    if metadata["annotations"].get("capabilities") not in CAPABILITIES:
        yield "the capability level is none of the five"
    if not {one.strip() for one in metadata["annotations"]["categories"].split(",")} <= OPERATOR_HUB_CATEGORIES:
        yield "a category that OperatorHub does not have"
    yield from _links(spec.get("links", ()))
    icons = spec.get("icon", [])
    if len(icons) != 1 or icons[0].get("mediatype") not in _MEDIA or not b64decode(icons[0]["base64data"]):
        yield "there has to be one icon, with data and a media type of the web"
    if not all(_IMAGE.fullmatch(one["image"]) for one in spec.get("relatedImages", ())):
        yield "a related image is no image reference"


def _links(links: Json) -> Iterator[str]:
    for link in links:
        if not link.get("name") or urlsplit(link.get("url", "")).scheme not in ("http", "https"):
            yield f"link {link} needs a name and a URL"


def _examples(bundle: Bundle) -> Iterator[str]:
    try:
        examples = json.loads(bundle.csv["metadata"]["annotations"]["alm-examples"])
    except (KeyError, ValueError):
        yield "alm-examples is not there or no JSON"
        return
    shown = {(one["apiVersion"], one["kind"]) for one in examples}
    provided = {
        (f"{one['name'].partition('.')[2]}/{one['version']}", one["kind"])
        for one in bundle.csv["spec"]["customresourcedefinitions"]["owned"]
    }
    if shown != provided:
        yield f"examples are of {sorted(shown)}, and provided are {sorted(provided)}"


def _install(bundle: Bundle) -> Iterator[str]:
    modes = [one["type"] for one in bundle.csv["spec"].get("installModes", ())]
    if sorted(modes) != sorted(INSTALL_MODES):
        yield "each install mode has to be named once"
    if not any(one["supported"] for one in bundle.csv["spec"].get("installModes", ())):
        yield "no install mode is supported"
    install = bundle.csv["spec"]["install"]
    strategy = install["spec"]
    if install["strategy"] != "deployment" or not strategy["deployments"]:
        yield "there is no deployment to install"
    for one in strategy["deployments"]:
        template = one["spec"]["template"]
        if not one["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
            yield f"deployment {one['name']} does not select its own pods"
        for container in template["spec"]["containers"]:
            if not {"cpu", "memory"} <= container.get("resources", {}).get("requests", {}).keys():
                yield f"container {container['name']} requests no CPU or no memory"
    for rule in (
        rule for kind in ("permissions", "clusterPermissions") for one in strategy[kind] for rule in one["rules"]
    ):
        if "apiextensions.k8s.io" in rule.get("apiGroups", ()) and {"create", "patch", "*"} & set(rule["verbs"]):
            yield "the operator may make definitions, which is OLM's to do"


def _owned(bundle: Bundle) -> Iterator[str]:
    owned = bundle.csv["spec"]["customresourcedefinitions"]["owned"]
    listed = {(one["name"], one["version"], one["kind"]) for one in owned}
    served = {
        (one["metadata"]["name"], version["name"], one["spec"]["names"]["kind"])
        for one in bundle.definitions
        for version in one["spec"]["versions"]
    }
    if listed != served:
        yield f"owned are {sorted(listed)}, and defined are {sorted(served)}"
    for one in owned:
        if not one.get("displayName") or not one.get("description"):
            yield f"owned {one['name']} has no display name or no description"
    for one in bundle.definitions:
        if [version["storage"] for version in one["spec"]["versions"]].count(True) != 1:
            yield f"{one['metadata']['name']} has not one stored version"


def _metadata(bundle: Bundle) -> Iterator[str]:
    prefix = "operators.operatorframework.io.bundle"
    fixed = {"mediatype": "registry+v1", "manifests": "manifests/", "metadata": "metadata/"}
    for name, value in fixed.items():
        if bundle.annotations.get(f"{prefix}.{name}.v1") != value:
            yield f"annotation {prefix}.{name}.v1 is not {value}"
    channels = bundle.annotations.get(f"{prefix}.channels.v1", "").split(",")
    if not all(re.match("candidate|fast|stable", channel) for channel in channels):
        yield f"channels {channels} are not named as OLM recommends"
    if bundle.annotations.get(f"{prefix}.channel.default.v1") not in channels:
        yield "the default channel is no channel"
    if bundle.annotations.get(f"{prefix}.package.v1") != bundle.csv["metadata"]["name"].partition(".v")[0]:
        yield "the package is not the one that the ClusterServiceVersion is named by"
    if bundle.image_labels != bundle.annotations:
        yield "the image's labels are not the annotations"


def chart_faults(about: Json) -> list[str]:
    """Return Artifact Hub's objections to a Chart.yaml and its annotations, or an empty list if it accepts them."""
    hub = {
        name.removeprefix("artifacthub.io/"): value
        for name, value in about["annotations"].items()
        if name.startswith("artifacthub.io/")
    }
    return list(_chart(hub))


def _chart(hub: dict[str, str]) -> Iterator[str]:
    if any(not isinstance(value, str) for value in hub.values()):
        yield "an annotation is no text"
    if hub.get("category") not in ARTIFACT_HUB_CATEGORIES:
        yield f"category {hub.get('category')} is none of Artifact Hub's"
    if hub.get("operatorCapabilities", "").lower() not in {one.lower() for one in CAPABILITIES}:
        yield "operatorCapabilities is none of the five"
    for name in ("operator", "prerelease", "containsSecurityUpdates"):
        if hub.get(name) not in ("true", "false"):
            yield f"{name} is neither true nor false"
    for name in ("crds", "crdsExamples", "images", "links"):
        if not isinstance(yaml.safe_load(hub.get(name, "")), list):
            yield f"{name} is no list"
            return
    for image in yaml.safe_load(hub["images"]):
        if not _IMAGE.fullmatch(image["image"]):
            yield f"image {image['image']} is no reference"
    for one in yaml.safe_load(hub["crds"]):
        if one.keys() != {"kind", "version", "name", "displayName", "description"} or not all(one.values()):
            yield f"crds: {one} lacks a field or has one too many"
    yield from _links(yaml.safe_load(hub["links"]))


def repository_faults(repository: Json) -> list[str]:
    """Return Artifact Hub's objections to an artifacthub-repo.yml, or an empty list if it accepts the file."""
    return list(_repository(repository))


def _repository(repository: Json) -> Iterator[str]:
    if not isinstance(repository, dict) or not repository.keys() <= {"repositoryID", "owners", "ignore"}:
        yield "the file has other keys than repositoryID, owners and ignore, or none"
        return
    try:
        UUID(repository.get("repositoryID", "00000000-0000-0000-0000-000000000000"))
    except ValueError:
        yield "repositoryID is no UUID"
    if any(not one.get("email") for one in repository.get("owners", ())):
        yield "an owner without email"
    if any(not one.get("name") for one in repository.get("ignore", ())):
        yield "an ignored package without name"
