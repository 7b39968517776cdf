"""Environment variables and arguments of a container, as a kubelet computes them. This module does no I/O."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from kvpilot_localcluster.errors import InvalidPod

Data = Mapping[str, str]
Source = Callable[[str, str], Data | None]
"""Function that returns the decoded data of a ("ConfigMap" or "Secret", name), or None if it does not exist."""

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) with the variable's value, and $$ with one dollar sign. Keep an unknown $(NAME) as it is."""

    def one(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return _REFERENCE.sub(one, text)


def environment(
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
    *,
    source: Source,
    allocatable: Mapping[str, str],
    base: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment variables that the container's spec defines. A value may refer to earlier variables.

    Args:
        container: one container of the pod's spec.
        pod: the pod, with status.podIP filled in.
        source: function that returns ConfigMaps and Secrets.
        allocatable: the node's resources, which replace limits that are not set.
        base: variables that exist already, to which $(NAME) may refer; not part of the result.

    Raises:
        InvalidPod: a reference that is not optional has no target.
    """
    found: dict[str, str] = {}
    for entry in container.get("envFrom", []):
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if field in entry:
                found.update(_all_of(kind, entry[field], entry.get("prefix", ""), source))
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            value = _from(entry["valueFrom"], container, pod, source, allocatable)
            if value is not None:
                found[entry["name"]] = value
        else:
            found[entry["name"]] = expand(entry.get("value", ""), {**base, **found})
    return found


def _all_of(kind: str, reference: Mapping[str, Any], prefix: str, source: Source) -> dict[str, str]:
    data = source(kind, reference["name"])
    if data is None:
        if reference.get("optional"):
            return {}
        raise InvalidPod(f'{kind.lower()} "{reference["name"]}" not found')
    # Like a kubelet, skip keys that are not valid names of variables.
    return {prefix + key: value for key, value in data.items() if _NAME.fullmatch(prefix + key)}


def _from(
    origin: Mapping[str, Any],
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
    source: Source,
    allocatable: Mapping[str, str],
) -> str | None:
    for kind, field in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if field in origin:
            return _key_of(kind, origin[field], source)
    if "fieldRef" in origin:
        return field_value(pod, origin["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in origin:
        reference = origin["resourceFieldRef"]
        owner = container
        if named := reference.get("containerName"):
            owner = next((one for one in pod["spec"]["containers"] if one["name"] == named), container)
        return divided(limit_or_allocatable(owner, reference["resource"], allocatable), reference.get("divisor", "1"))
    raise InvalidPod(f"this node does not support valueFrom {sorted(origin)}")


def _key_of(kind: str, reference: Mapping[str, Any], source: Source) -> str | None:
    data = source(kind, reference["name"])
    if data is not None and reference["key"] in data:
        return data[reference["key"]]
    if reference.get("optional"):
        return None
    if data is None:
        raise InvalidPod(f'{kind.lower()} "{reference["name"]}" not found')
    raise InvalidPod(f"couldn't find key {reference['key']} in {kind} {reference['name']}")


def field_value(pod: Mapping[str, Any], path: str) -> str:
    """Return a field of the pod by its downward API path.

    Raises:
        InvalidPod: a kubelet does not support this path.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    plain = {
        "metadata.name": metadata.get("name"),
        "metadata.namespace": metadata.get("namespace"),
        "metadata.uid": metadata.get("uid"),
        "spec.nodeName": spec.get("nodeName"),
        "spec.serviceAccountName": spec.get("serviceAccountName"),
        "status.podIP": status.get("podIP"),
        "status.podIPs": status.get("podIP"),
        "status.hostIP": status.get("hostIP"),
    }
    if path in plain:
        return str(plain[path] or "")
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(metadata.get(found[1], {}).get(found[2], ""))
    if found := re.fullmatch(r"metadata\.(labels|annotations)", path):
        entries: Mapping[str, str] = metadata.get(found[1], {})
        return "\n".join(f'{key}="{value}"' for key, value in sorted(entries.items()))
    raise InvalidPod(f"this node does not support fieldRef {path}")


def service_variables(services: Sequence[Mapping[str, Any]], namespace: str) -> dict[str, str]:
    """Return NAME_SERVICE_HOST and NAME_SERVICE_PORT for Services of the namespace, and for `kubernetes`."""
    found: dict[str, str] = {}
    for service in services:
        name, home = service["metadata"]["name"], service["metadata"]["namespace"]
        spec = service["spec"]
        wanted = home == namespace or (home == "default" and name == "kubernetes")
        if not wanted or spec.get("clusterIP") in (None, "", "None") or not spec.get("ports"):
            continue
        stem = name.upper().replace("-", "_")
        found[f"{stem}_SERVICE_HOST"] = spec["clusterIP"]
        found[f"{stem}_SERVICE_PORT"] = str(spec["ports"][0]["port"])
    return found


def divided(quantity: str, divisor: str) -> str:
    """Return a quantity ("500m", "2Gi") divided by `divisor` and rounded up, as a resourceFieldRef does.

    Raises:
        ValueError: `quantity` or `divisor` is not a quantity.
    """
    return str(math.ceil(parse_quantity(quantity) / (parse_quantity(divisor) or 1)))


def limit_or_allocatable(container: Mapping[str, Any], resource: str, allocatable: Mapping[str, str]) -> str:
    """Return the quantity that a resourceFieldRef names: limits.X or requests.X of the container.

    If the container has no such limit, return the node's allocatable quantity.
    """
    part, _, name = resource.partition(".")
    value = container.get("resources", {}).get(part, {}).get(name)
    if value is not None:
        return str(value)
    return allocatable.get(name, "0") if part == "limits" else "0"
