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
# Whoever writes ConfigMaps in the namespace may give any number of them our label: so many are looked at.
MAX_SEEN = 64


async def keep(cluster: Cluster, s: Snapshot, baseline: Baseline) -> None:
    """Write a baseline, and delete the service's oldest others beyond `MAX_KEPT`.

    Where the API server refuses to delete, one too many is kept: no reason to throw away a capture.
    """
    try:
        await _prune(cluster, s.key, s.uid, baseline_name(s.key.name, baseline.identity))
    except ClusterError as error:
        log.warning("old baselines are not deleted: %s", error, extra={"service": str(s.key)})
    await cluster.apply(baseline_config_map(s.key, s.uid, baseline.identity, codec.encode(baseline)))


async def _prune(cluster: Cluster, key: ServiceKey, uid: str, but: str) -> None:
    selector, beginning = f"{SERVICE_LABEL}={key.name}", baseline_name(key.name, "")
    ours: list[tuple[str, str]] = []
    async for metadata in cluster.metadata("v1", "ConfigMap", key.namespace, selector, most=MAX_SEEN):
        owners = metadata.get("ownerReferences") or ()
        name = metadata["name"]
        if name.startswith(beginning) and name != but and any(owner.get("uid") == uid for owner in owners):
            ours.append((metadata.get("creationTimestamp") or "", name))
    for _, name in sorted(ours, reverse=True)[MAX_KEPT - 1 :]:
        await cluster.delete("v1", "ConfigMap", key.namespace, name)
