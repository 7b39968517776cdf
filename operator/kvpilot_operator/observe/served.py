"""Which kinds that a cluster may lack its API server has: definitions come and go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvpilot_operator.api.faults import Fault
from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API, LEADER_WORKER_SET_API
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.state.server import ServerFacts

API_SECONDS = 30.0
"""Whether an API is served is asked again after so long."""


@dataclass(eq=False)
class Served:
    """Asks for an API only where a spec names it; `always` is what this server has whatever a spec says."""

    cluster: Cluster
    always: ServerFacts
    elapsed: Callable[[], float]
    _apis: dict[str, tuple[float, bool]] = field(default_factory=dict)

    async def facts(self, spec: Spec | None) -> ServerFacts:
        """What the API server serves of what this spec names."""
        named = spec is not None and spec.route_of("") is not None
        routes = named and await self._serves(HTTP_ROUTE_API)
        pools = spec is not None and spec.inference_pool is not None and await self._serves(INFERENCE_POOL_API)
        return replace(self.always, http_routes=routes, inference_pools=pools)

    async def _serves(self, api_version: str) -> bool:
        asked, served = self._apis.get(api_version, (-math.inf, False))
        if self.elapsed() - asked >= API_SECONDS:
            served = await self.cluster.serves(api_version)
            self._apis[api_version] = (self.elapsed(), served)
        return served


def not_served(spec: Spec | None, groups: bool) -> tuple[Fault, ...]:
    """What a spec asks for without which nothing of it can be made here; `groups` says whether LeaderWorkerSets can."""
    if spec is None or spec.engine.nodes == 1 or groups:
        return ()
    text = (
        f"a replica over {spec.engine.nodes} nodes is a group of pods of a LeaderWorkerSet, and this API server does "
        f"not show the operator {LEADER_WORKER_SET_API}: install LeaderWorkerSet, which is noticed in half a minute "
        "(and let the chart have rbac.leaderWorkerSets), or set nodes to 1 and take nodes with as many GPUs"
    )
    return (Fault("spec.engine.nodes", text),)
