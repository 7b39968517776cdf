"""The captured baselines of a service in the cluster: find the one of an identity, and keep their number small."""

from __future__ import annotations

import base64
import binascii
import logging

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.probes import codec
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.probes.errors import MalformedBaseline
from kvpilot_operator.render.names import SERVICE_LABEL, baseline_name
from kvpilot_operator.state.snapshot import ServiceKey

log = logging.getLogger(__name__)

# Baselines that a service keeps, so that going back to a model or to probe sets finds the answers of then.
MAX_KEPT = 4


async def read(cluster: Cluster, key: ServiceKey, config_map: str) -> Baseline:
    """The baseline in a ConfigMap; raises `MalformedBaseline` where there is none that can be read."""
    kept = await cluster.find("v1", "ConfigMap", key.namespace, config_map)
    try:
        content = base64.b64decode((kept or {})["binaryData"]["baseline"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise MalformedBaseline(f"ConfigMap {config_map} holds no baseline: {type(error).__name__}: {error}") from error
    return codec.decode(content)


async def find(cluster: Cluster, key: ServiceKey, config_map: str, identity: str) -> Baseline | None:
    """The kept baseline of this identity, or None where it is missing, damaged, another's or without its control."""
    try:
        kept = await read(cluster, key, config_map)
    except MalformedBaseline as error:
        log.debug("no baseline to adopt: %s", error, extra={"service": str(key)})
        return None
    return kept if kept.identity == identity and kept.control is not None else None


async def prune(cluster: Cluster, key: ServiceKey, keep: str) -> None:
    """Delete the oldest baselines beyond `MAX_KEPT`, of which `keep`, the one to be written or in use, is one.

    Where the API server refuses, one too many is kept: no reason to throw away a capture.
    """
    try:
        await _prune(cluster, key, keep)
    except ClusterError as error:
        log.warning("old baselines are not deleted: %s", error, extra={"service": str(key)})


async def _prune(cluster: Cluster, key: ServiceKey, keep: str) -> None:
    labelled = await cluster.list("v1", "ConfigMap", key.namespace, f"{SERVICE_LABEL}={key.name}")
    ours = [
        one["metadata"]
        for one in labelled
        if one["metadata"]["name"].startswith(baseline_name(key.name, "")) and one["metadata"]["name"] != keep
    ]
    ours.sort(key=lambda metadata: (metadata.get("creationTimestamp") or "", metadata["name"]), reverse=True)
    for metadata in ours[MAX_KEPT - 1 :]:
        await cluster.delete("v1", "ConfigMap", key.namespace, metadata["name"])
