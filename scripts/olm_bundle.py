"""Render the bundle for the Operator Lifecycle Manager from the chart, the CRD and the icon.

It leaves out objects that OLM makes: the ServiceAccount, the bindings of listed rights, and the roles aggregated to
`view` and `edit`. It also leaves out the NetworkPolicy, which OLM only accepts since 2025.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import kustomize
import yaml
from kustomize import Manifest

CHANNEL = "candidate"
PACKED = ("Service", "PodDisruptionBudget")
"""Kinds that the bundle keeps unchanged beside the ClusterServiceVersion."""

_OPENSHIFT = ("--api-versions", "security.openshift.io/v1")
"""Helm flags for pods without a fixed user, because OpenShift refuses one. On other clusters the image names a user."""

_CATEGORIES = {"ai-machine-learning": "AI/Machine Learning"}
"""OperatorHub's name of each Artifact Hub category."""


def files(root: Path) -> dict[str, str]:
    """Return the files of bundle/ by their path in it."""
    chart = root / "charts" / "kvpilot"
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    objects = kustomize.rendered(chart, {}, *_OPENSHIFT)
    (definition,) = (one for one in objects if one["kind"] == "CustomResourceDefinition")
    icon = (root / "docs" / "images" / "icon.svg").read_bytes()
    manifests = {
        f"{about['name']}.clusterserviceversion.yaml": _csv(about, objects, definition, icon),
        f"{definition['spec']['group']}_{definition['spec']['names']['plural']}.yaml": definition,
        **{
            f"{one['metadata']['name']}.{one['kind'].lower()}.yaml": _anywhere(one)
            for one in objects
            if one["kind"] in PACKED
        },
    }
    labels = _labels(about)
    return {
        **{f"manifests/{name}": kustomize.dump([one]) for name, one in manifests.items()},
        "metadata/annotations.yaml": kustomize.dump([{"annotations": labels}]),
        "Dockerfile": _dockerfile(labels),
    }


def _labels(about: Manifest) -> dict[str, str]:
    prefix = "operators.operatorframework.io.bundle"
    return {
        f"{prefix}.mediatype.v1": "registry+v1",
        f"{prefix}.manifests.v1": "manifests/",
        f"{prefix}.metadata.v1": "metadata/",
        f"{prefix}.package.v1": about["name"],
        f"{prefix}.channels.v1": CHANNEL,
        f"{prefix}.channel.default.v1": CHANNEL,
    }


def _dockerfile(labels: Mapping[str, str]) -> str:
    lines = [kustomize.HEADER.rstrip(), "FROM scratch"]
    lines += [f'LABEL {name}="{value}"' for name, value in labels.items()]
    return "\n".join([*lines, "COPY manifests /manifests/", "COPY metadata /metadata/", ""])


def _anywhere(one: Manifest) -> Manifest:
    """Remove the namespace, which OLM chooses."""
    return {**one, "metadata": {name: value for name, value in one["metadata"].items() if name != "namespace"}}


def _csv(about: Manifest, objects: Sequence[Manifest], definition: Manifest, icon: bytes) -> Manifest:
    hub = {name.partition("/")[2]: value for name, value in about["annotations"].items()}
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (known,) = yaml.safe_load(hub["crds"])
    return {
        "apiVersion": "operators.coreos.com/v1alpha1",
        "kind": "ClusterServiceVersion",
        "metadata": {
            "name": f"{about['name']}.v{about['version']}",
            "annotations": {
                "alm-examples": json.dumps(yaml.safe_load(hub["crdsExamples"]), indent=2),
                "capabilities": hub["operatorCapabilities"],
                "categories": _CATEGORIES[hub["category"]],
                "certified": "false",
                "containerImage": container["image"],
                "description": about["description"],
                "operatorframework.io/suggested-namespace": kustomize.NAMESPACE,
                "repository": about["sources"][0],
                "support": about["home"],
            },
            "labels": {
                "operatorframework.io/arch.amd64": "supported",
                "operatorframework.io/arch.arm64": "supported",
                "operatorframework.io/os.linux": "supported",
            },
        },
        "spec": {
            "displayName": about["name"],
            "description": f"{about['description']}\n\n{known['description']}",
            "version": about["version"],
            "maturity": re.search("alpha|beta|$", definition["spec"]["versions"][0]["name"])[0] or "stable",
            "minKubeVersion": re.fullmatch(r">=([0-9.]+)-0", about["kubeVersion"])[1],
            "provider": {"name": about["maintainers"][0]["name"]},
            "keywords": about["keywords"],
            "links": yaml.safe_load(hub["links"]),
            "icon": [{"base64data": base64.b64encode(icon).decode(), "mediatype": "image/svg+xml"}],
            "relatedImages": yaml.safe_load(hub["images"]),
            "installModes": [
                {"type": mode, "supported": mode == "AllNamespaces"}
                for mode in ("OwnNamespace", "SingleNamespace", "MultiNamespace", "AllNamespaces")
            ],
            "install": {"strategy": "deployment", "spec": _strategy(deployment, objects)},
            "customresourcedefinitions": {"owned": [_owned(definition, known)]},
        },
    }


def _strategy(deployment: Manifest, objects: Sequence[Manifest]) -> Manifest:
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    metadata = deployment["metadata"]
    return {
        "clusterPermissions": _permissions(account, objects, "ClusterRole"),
        "permissions": _permissions(account, objects, "Role"),
        "deployments": [{"name": metadata["name"], "label": metadata["labels"], "spec": deployment["spec"]}],
    }


def _permissions(account: str, objects: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Return the rules of all roles of a kind that are bound to the account."""
    bound = {
        one["roleRef"]["name"]
        for one in objects
        if one["kind"] == f"{kind}Binding" and any(subject["name"] == account for subject in one["subjects"])
    }
    rules = [
        rule for one in objects if one["kind"] == kind and one["metadata"]["name"] in bound for rule in one["rules"]
    ]
    return [{"serviceAccountName": account, "rules": rules}]


def _owned(definition: Manifest, known: Manifest) -> Manifest:
    spec = definition["spec"]
    (version,) = spec["versions"]
    parts = version["schema"]["openAPIV3Schema"]["properties"]
    return {
        "name": definition["metadata"]["name"],
        "kind": spec["names"]["kind"],
        "version": version["name"],
        "displayName": known["displayName"],
        "description": known["description"],
        "specDescriptors": list(_descriptors(parts["spec"], "")),
        "statusDescriptors": list(_descriptors(parts["status"], "")),
    }


def _descriptors(schema: Manifest, prefix: str) -> Iterator[Manifest]:
    """Yield the description of each field for a console. A map or a list is one field."""
    for name, child in schema["properties"].items():
        path = f"{prefix}{name}"
        if "properties" in child:
            yield from _descriptors(child, f"{path}.")
        elif "description" in child:  # a Pod's own fields have no description
            words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", path)
            title = " ".join(word[0].upper() + word[1:] for word in words)
            yield {"path": path, "displayName": title, "description": child["description"]}
