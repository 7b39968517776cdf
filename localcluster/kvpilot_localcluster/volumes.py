"""Volumes of a pod as folders of this machine."""

import base64
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kvpilot_localcluster.errors import InvalidPod
from kvpilot_localcluster.expand import field_value

Json = dict[str, Any]
Fetch = Callable[[str, str, str], Awaitable[Json | None]]
"""Function that returns the object (plural, namespace, name), e.g. ("configmaps", "default", "x"), or None if it does
not exist.
"""


def decoded(kind: str, thing: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the decoded data of a ConfigMap or Secret by key."""
    if kind == "Secret":
        return {key: base64.b64decode(value) for key, value in (thing.get("data") or {}).items()}
    plain = {key: value.encode() for key, value in (thing.get("data") or {}).items()}
    binary = {key: base64.b64decode(value) for key, value in (thing.get("binaryData") or {}).items()}
    return plain | binary


async def prepare(pod: Mapping[str, Any], folder: Path, fetch: Fetch) -> dict[str, Path]:
    """Create every volume of a pod below `folder`, and return the path of each volume by its name.

    ConfigMaps and Secrets are written once. Later changes have no effect.

    Raises:
        InvalidPod: this node does not support a kind of volume, or an object to which a volume refers does not exist.
    """
    found = {}
    for volume in pod["spec"].get("volumes") or []:
        found[volume["name"]] = await _one(volume, pod, folder / volume["name"], fetch)
    return found


async def _one(volume: Mapping[str, Any], pod: Mapping[str, Any], folder: Path, fetch: Fetch) -> Path:
    namespace = pod["metadata"]["namespace"]
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    if "persistentVolumeClaim" in volume:
        return await _claimed(volume["persistentVolumeClaim"]["claimName"], namespace, fetch)
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 (local and small, as all file access here)
    if "emptyDir" in volume:
        return folder
    if "projected" in volume:
        files: dict[str, bytes] = {}
        for source in volume["projected"].get("sources") or []:
            files |= await _files(source, pod, fetch)
    else:
        files = await _files(volume, pod, fetch)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


async def _files(source: Mapping[str, Any], pod: Mapping[str, Any], fetch: Fetch) -> dict[str, bytes]:
    namespace = pod["metadata"]["namespace"]
    # A volume names a Secret by `secretName`, and a projection by `name`.
    for kind, field, plural in (("ConfigMap", "configMap", "configmaps"), ("Secret", "secret", "secrets")):
        if field not in source:
            continue
        reference = source[field]
        name = reference.get("name") or reference.get("secretName")
        thing = await fetch(plural, namespace, name)
        if thing is None:
            if reference.get("optional"):
                return {}
            raise InvalidPod(f'{kind.lower()} "{name}" not found')
        data = decoded(kind, thing)
        if not reference.get("items"):
            return data
        try:
            return {item["path"]: data[item["key"]] for item in reference["items"]}
        except KeyError as error:
            raise InvalidPod(f'{kind.lower()} "{name}" has no key {error}') from None
    if "downwardAPI" in source:
        items = source["downwardAPI"].get("items") or []
        return {item["path"]: field_value(pod, item["fieldRef"]["fieldPath"]).encode() for item in items}
    kinds = sorted(set(source) - {"name"})
    raise InvalidPod(
        f"this node does not support volumes of kind {', '.join(kinds)}: use emptyDir, configMap, secret, hostPath"
    )


async def _claimed(name: str, namespace: str, fetch: Fetch) -> Path:
    claim = await fetch("persistentvolumeclaims", namespace, name)
    bound = (claim or {}).get("spec", {}).get("volumeName")
    if not bound:
        raise InvalidPod(f'persistentvolumeclaim "{name}" is not found or not bound')
    volume = await fetch("persistentvolumes", "", bound)
    place = (volume or {}).get("spec", {}).get("hostPath") or (volume or {}).get("spec", {}).get("local")
    if not place:
        raise InvalidPod(f'persistentvolume "{bound}" has neither hostPath nor local, and this node supports no other')
    path = Path(place["path"])
    path.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    return path


def mounts(container: Mapping[str, Any], volumes: Mapping[str, Path]) -> dict[str, str]:
    """Return the real path of each mount point of a container."""
    found = {}
    for mount in container.get("volumeMounts") or []:
        place = volumes[mount["name"]] / mount.get("subPath", "")
        found[mount["mountPath"].rstrip("/") or "/"] = str(place)
    return found


def remove(folder: Path) -> None:
    """Remove a pod's volumes, but not the folders behind hostPath volumes and PersistentVolumeClaims."""
    shutil.rmtree(folder, ignore_errors=True)
