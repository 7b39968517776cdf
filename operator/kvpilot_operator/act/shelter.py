"""Asks cluster autoscalers to leave pods where they are, and takes it back: annotations on the pods themselves.

They are applied under our field manager to single pods: a change of the pod template would roll them, and what a user
has annotated stays. What is not asked for any more is taken off in any later reconcile, of this process or of another.
"""

from __future__ import annotations

import logging

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import ClusterError
from kvpilot_operator.render.objects import pod_shelter
from kvpilot_operator.state.snapshot import Snapshot

log = logging.getLogger(__name__)


async def shelter(cluster: Cluster, s: Snapshot, wanted: frozenset[str]) -> None:
    """Make the annotations of the service's pods what they should be; a pod that cannot be annotated fails nothing."""
    for pod in s.pods:
        asked = pod.name in wanted
        if pod.terminating or pod.do_not_evict == asked:
            continue
        try:
            await cluster.apply(pod_shelter(s.key, pod, asked))
        except ClusterError as error:
            # Most often it has just gone: its uid keeps the server from taking the annotations for a new pod.
            log.info("pod not annotated: %s", error, extra={"service": str(s.key), "pod": pod.name})
