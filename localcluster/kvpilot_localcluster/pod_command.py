"""Command of a container: its arguments, environment and folders on a node that all pods share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiException

from kvpilot_localcluster import gpus, images, volumes
from kvpilot_localcluster.backoff import Backoff
from kvpilot_localcluster.container import Command
from kvpilot_localcluster.errors import InvalidPod, UnknownImage
from kvpilot_localcluster.expand import environment, expand, service_variables
from kvpilot_localcluster.kube import Json, Kube
from kvpilot_localcluster.paths import rewrite


@dataclass
class Node:
    """Facts that all pods of a node share.

    Attributes:
        folder: folder with pods/ (records and volumes) and logs/.
        images: the image table.
        host: the node's IP address.
        allocatable: the node's resources.
        devices: the node's GPUs.
        services: all Services of the cluster, which the forwarder keeps current.
    """

    kube: Kube
    name: str
    folder: Path
    images: list[images.Image]
    backoff: Backoff
    allocatable: Mapping[str, str]
    devices: gpus.Devices
    host: str = "127.0.0.1"
    services: dict[str, Json] = field(default_factory=dict)

    async def fetch(self, plural: str, namespace: str, name: str) -> Json | None:
        """Return an object of the core API, or None if it does not exist."""
        scope = f"/namespaces/{namespace}" if namespace else ""
        try:
            return await self.kube.call("GET", f"/api/v1{scope}/{plural}/{name}")
        except ApiException as error:
            if error.status == 404:
                return None
            raise


async def command(
    node: Node, pod: Json, home: Path, mounted: Mapping[str, Path], spec: Mapping[str, Any], message_file: Path
) -> Command:
    """Return the command that runs a container of a pod.

    Args:
        node: facts about the node.
        pod: the pod, with status.podIP filled in.
        home: folder for HOME, and the working folder if the container names none.
        mounted: folder of each volume of the pod, by the volume's name.
        spec: the container in the pod's spec.
        message_file: file for the container's termination message.

    Raises:
        UnknownImage: the image table has no such image.
        InvalidPod: the node agent cannot run the container as specified.
    """
    image = images.find(node.images, spec["image"])
    if image is None:
        raise UnknownImage(f'the image table has no entry for "{spec["image"]}": this node pulls no images, so add one')
    metadata = pod["metadata"]
    facts = {"POD_IP": pod["status"]["podIP"], "POD_NAME": metadata["name"], "POD_NAMESPACE": metadata["namespace"]}
    base = {
        "HOME": str(home),
        "HOSTNAME": metadata["name"],
        **service_variables(list(node.services.values()), metadata["namespace"]),
        **image.environment(facts),
    }
    data = await _data(node, pod, spec)
    wanted = environment(
        spec, pod, source=lambda kind, name: data.get((kind, name)), allocatable=node.allocatable, base=base
    )
    folders = dict(image.folders) | volumes.mounts(spec, mounted)
    folders[spec.get("terminationMessagePath") or "/dev/termination-log"] = str(message_file)
    # Rewrite only `wanted`: the image's own settings already have paths of this machine.
    variables = base | {name: rewrite(value, folders) for name, value in wanted.items()}
    variables |= node.devices.variables(metadata["uid"], spec)
    first = [*(spec.get("command") or image.entrypoint), *(spec.get("args") or [])]
    argv = [rewrite(expand(part, variables), folders) for part in first]
    if not argv:
        raise InvalidPod(f'container "{spec["name"]}" names no command and the image table has no entrypoint for it')
    cwd = rewrite(spec["workingDir"], folders) if spec.get("workingDir") else base["HOME"]
    return Command(argv, variables, cwd, folders)


async def _data(node: Node, pod: Json, spec: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """Return the data of ConfigMaps and Secrets to which the container's environment refers."""
    wanted = set()
    for kind, fields in (
        ("ConfigMap", ("configMapKeyRef", "configMapRef")),
        ("Secret", ("secretKeyRef", "secretRef")),
    ):
        origins = [entry.get("valueFrom") or {} for entry in spec.get("env") or []] + (spec.get("envFrom") or [])
        wanted |= {(kind, origin[one]["name"]) for origin in origins for one in fields if one in origin}
    found = {}
    for kind, name in wanted:
        thing = await node.fetch(f"{kind.lower()}s", pod["metadata"]["namespace"], name)
        if thing is not None:
            content = volumes.decoded(kind, thing).items()
            found[kind, name] = {key: value.decode(errors="replace") for key, value in content}
    return found
