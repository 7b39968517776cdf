"""Delete old baselines, so that a service keeps only a few."""

from __future__ import annotations

import logging

from kvpilot_operator.act.ownership import is_owned
from kvpilot_operator.api.names import SERVICE_LABEL, baseline_name
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Object, Ref
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.state.snapshot import Snapshot

log = logging.getLogger(__name__)

# Keep some old baselines: a service that returns to an earlier model or probe set can use them again.
MAX_KEPT = 4
# Read at most this many ConfigMaps, because anyone may put our label on any number of them.
MAX_SEEN = 64


async def prune(cluster: Cluster, s: Snapshot, but: Baseline) -> None:
    """Delete the service's oldest baselines, other than this one, beyond `MAX_KEPT` with it.

    If the API server refuses to delete one, keep it and go on: the new capture is worth more.
    """
    kept = baseline_name(s.key.name, but.identity)
    selector, beginning = f"{SERVICE_LABEL}={s.key.name}", baseline_name(s.key.name, "")
    ours: list[Object] = []
    try:
        async for metadata in cluster.metadata("v1", "ConfigMap", s.key.namespace, selector, most=MAX_SEEN):
            name = metadata["name"]
            if name.startswith(beginning) and name != kept and is_owned({"metadata": metadata}, s.uid):
                ours.append(metadata)
        ours.sort(key=lambda metadata: (metadata.get("creationTimestamp") or "", metadata["name"]), reverse=True)
        for metadata in ours[MAX_KEPT - 1 :]:
            await cluster.delete(Ref("v1", "ConfigMap", s.key.namespace, metadata["name"]), uid=metadata["uid"])
    except ClusterError as error:
        log.warning("old baselines are not deleted: %s", error, extra={"service": str(s.key)})
