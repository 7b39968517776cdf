"""Keeps a captured baseline in the cluster, and the number of those that a service has small."""

from __future__ import annotations

import logging

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.probes import codec
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.render.names import SERVICE_LABEL, baseline_name
from kvpilot_operator.render.objects import baseline_config_map
from kvpilot_operator.state.snapshot import ServiceKey, Snapshot

log = logging.getLogger(__name__)

# Baselines that a service keeps, so that going back to a model or to probe sets finds the answers of then.
MAX_KEPT = 4


async def keep(cluster: Cluster, s: Snapshot, baseline: Baseline) -> None:
    """Write a baseline, and delete the oldest others beyond `MAX_KEPT`.

    Where the API server refuses to delete, one too many is kept: no reason to throw away a capture.
    """
    try:
        await _prune(cluster, s.key, baseline_name(s.key.name, baseline.identity))
    except ClusterError as error:
        log.warning("old baselines are not deleted: %s", error, extra={"service": str(s.key)})
    await cluster.apply(baseline_config_map(s.key, s.uid, baseline.identity, codec.encode(baseline)))


async def _prune(cluster: Cluster, key: ServiceKey, but: str) -> None:
    labelled = await cluster.list("v1", "ConfigMap", key.namespace, f"{SERVICE_LABEL}={key.name}")
    ours = [
        one["metadata"]
        for one in labelled
        if one["metadata"]["name"].startswith(baseline_name(key.name, "")) and one["metadata"]["name"] != but
    ]
    ours.sort(key=lambda metadata: (metadata.get("creationTimestamp") or "", metadata["name"]), reverse=True)
    for metadata in ours[MAX_KEPT - 1 :]:
        await cluster.delete("v1", "ConfigMap", key.namespace, metadata["name"])
