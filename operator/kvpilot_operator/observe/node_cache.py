"""What is remembered of the nodes that engines run on: nodes are many and their labels hardly ever change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.observe.nodes import node_facts
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.snapshot import NodeFacts

# What is known of a node with GPUs holds for so long, and of one that shows none: its labels may still come.
NODE_SECONDS = 600.0
BARE_NODE_SECONDS = 30.0
# A node with engines is read again long before; one that an autoscaler has taken away never is.
FORGET_SECONDS = 2 * NODE_SECONDS


class NodeCache:
    """Reads each node once in a while, and watches none."""

    def __init__(self, cluster: Cluster, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._read: dict[str, tuple[datetime, NodeFacts]] = {}

    async def facts(self, pods: Sequence[PodView]) -> NodeFacts:
        """The accelerator of the first of the pods' nodes that has one.

        Raises:
            ClusterError: a node could not be read.
        """
        await asyncio.gather(*(self._read_again(name) for name in _nodes_of(pods)))
        return self.known(pods)

    def known(self, pods: Sequence[PodView]) -> NodeFacts:
        """The same from what has been read already."""
        known = (self._read[name][1] for name in _nodes_of(pods) if name in self._read)
        return next((facts for facts in known if facts.gpu != "cpu"), NodeFacts())

    def gpus(self, pods: Sequence[PodView]) -> dict[str, str]:
        """The accelerator by pod, for pods on nodes that have been read."""
        return {pod.name: self._read[pod.node][1].gpu for pod in pods if pod.node in self._read}

    async def _read_again(self, name: str) -> None:
        known, now = self._read.get(name), self._clock()
        keep = NODE_SECONDS if known is not None and known[1].gpu != "cpu" else BARE_NODE_SECONDS
        if known is not None and 0 <= (now - known[0]).total_seconds() < keep:
            return
        found = await self._cluster.find("v1", "Node", "", name)
        if found is None:
            self._read.pop(name, None)
        else:
            self._read[name] = (now, node_facts(found))
            self._forget(now)

    def _forget(self, now: datetime) -> None:
        """Drop nodes that nobody has asked for in a long time."""
        for name in [name for name, (read, _) in self._read.items() if (now - read).total_seconds() > FORGET_SECONDS]:
            del self._read[name]


def _nodes_of(pods: Sequence[PodView]) -> list[str]:
    return sorted({pod.node for pod in pods if pod.node})
