"""Periodic reads of the API server that replace a watch: APIs, nodes, autoscalers, and Events of pod groups."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from kvpilot_operator.api.faults import Fault
from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API, KIND, LEADER_WORKER_SET_API, deployment_name
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.observe.nodes import node_facts
from kvpilot_operator.observe.views import Object, without_pod_name
from kvpilot_operator.render.workloads import LEADER_WORKER_SET
from kvpilot_operator.state.objects import DeploymentView, PodView
from kvpilot_operator.state.snapshot import NodeFacts, ServerFacts, ServiceKey

T = TypeVar("T")

# Times until something is read again. An API may be installed later, and a new node may get its GPU's labels later.
API_SECONDS = EVENT_SECONDS = BARE_NODE_SECONDS = 30.0
AUTOSCALER_SECONDS = 300.0
NODE_SECONDS = 600.0
# Drop a cached answer that was not used for this long.
FORGET_SECONDS = 2 * NODE_SECONDS
# Most Events to read of one StatefulSet. Normally it has few, but anyone who may write Events can add any number.
_MOST = 50


@dataclass(eq=False)
class ApiReads:
    """A reader that caches each answer of the API server for some seconds. It does not cache errors.

    `always` has the facts about the server that do not depend on a spec.
    """

    cluster: Cluster
    always: ServerFacts
    elapsed: Callable[[], float]
    _known: dict[Hashable, tuple[float, Any]] = field(default_factory=dict)

    async def server(self, spec: Spec | None) -> ServerFacts:
        """Return the optional APIs that the spec needs and the server serves."""
        named = spec is not None and spec.canary.route_ref is not None
        routes = named and await self._serves(HTTP_ROUTE_API)
        pools = spec is not None and spec.inference_pool is not None and await self._serves(INFERENCE_POOL_API)
        return replace(self.always, http_routes=routes, inference_pools=pools)

    async def autoscaler(self, key: ServiceKey, spec: Spec | None) -> str | None:
        """Return kind and name of an autoscaler of this service; None if there is none, or kvpilot does not scale."""
        if spec is None or spec.scaling.mode != "Operator":
            return None
        scalers = partial(self._autoscalers, key.namespace)
        return (await self._read(("autoscalers", key.namespace), AUTOSCALER_SECONDS, scalers)).get(key.name)

    async def node(self, pods: Sequence[PodView]) -> NodeFacts:
        """Return the accelerator of the first of the pods' nodes that has one. Raise ClusterError if a read fails."""
        await asyncio.gather(*map(self._node, _nodes_of(pods)))
        return self.known_node(pods)

    def known_node(self, pods: Sequence[PodView]) -> NodeFacts:
        """Return the accelerator as `node` does, but only of a node that has been read already."""
        return next((facts for name in _nodes_of(pods) if (facts := self._facts(name)).gpu != "cpu"), NodeFacts())

    def gpus(self, pods: Sequence[PodView]) -> dict[str, str]:
        """Return the accelerator by pod name, for pods on nodes that have been read."""
        return {pod.name: self._facts(pod.node).gpu for pod in pods if ("node", pod.node) in self._known}

    async def refusals(
        self, key: ServiceKey, workloads: Iterable[DeploymentView], leaders: Sequence[PodView]
    ) -> dict[str, str]:
        """Return why pods of a LeaderWorkerSet cannot be created, by revision. Its StatefulSets say so only in Events.

        Events are read only of revisions that lack pods.
        """
        lacking = {view.revision: incomplete(key, view, leaders) for view in workloads}
        asked = {revision: (key.namespace, name) for revision, name in lacking.items() if name is not None}
        told = {
            revision: await self._read(("refusal", *name), EVENT_SECONDS, partial(self._refusal, *name))
            for revision, name in asked.items()
        }
        return {revision: words for revision, words in told.items() if words is not None}

    async def _read(self, what: Hashable, seconds: float, read: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a question (`what`). Read it again if the known answer is older than `seconds`."""
        asked, known = self._known.get(what, (-math.inf, None))
        if self.elapsed() - asked < seconds:
            answer: T = known
            return answer
        found, now = await read(), self.elapsed()
        self._known = {one: told for one, told in self._known.items() if now - told[0] < FORGET_SECONDS}
        self._known[what] = now, found
        return found

    async def _serves(self, api_version: str) -> bool:
        return await self._read(("api", api_version), API_SECONDS, partial(self.cluster.serves, api_version))

    async def _node(self, name: str) -> None:
        async def read() -> NodeFacts:
            return node_facts(await self.cluster.find(Ref("v1", "Node", "", name)) or {})

        await self._read(("node", name), BARE_NODE_SECONDS if self._facts(name).gpu == "cpu" else NODE_SECONDS, read)

    def _facts(self, node: str | None) -> NodeFacts:
        facts: NodeFacts = self._known.get(("node", node), (0.0, NodeFacts()))[1]
        return facts

    async def _refusal(self, namespace: str, name: str) -> str | None:
        about = f"involvedObject.kind=StatefulSet,involvedObject.name={name}"
        return refusal_of(await self.cluster.first("v1", "Event", namespace, fields=about, limit=_MOST))

    async def _autoscalers(self, namespace: str) -> dict[str, str]:
        found = await self.cluster.first("autoscaling/v1", "HorizontalPodAutoscaler", namespace, limit=500)
        targets = ((one, (one.get("spec") or {}).get("scaleTargetRef") or {}) for one in found)
        return {str(target.get("name")): _maker(one) for one, target in targets if target.get("kind") == KIND}


def _nodes_of(pods: Sequence[PodView]) -> list[str]:
    return sorted({pod.node for pod in pods if pod.node})


def not_served(spec: Spec | None, groups: bool) -> tuple[Fault, ...]:
    """Return the faults of a spec that needs a kind which the API server lacks.

    `groups` is True if the API server has LeaderWorkerSets.
    """
    if spec is None or spec.engine.nodes == 1 or groups:
        return ()
    text = (
        f"a replica over {spec.engine.nodes} nodes needs a LeaderWorkerSet, and this API server does not show the "
        f"operator {LEADER_WORKER_SET_API}: install LeaderWorkerSet, and set rbac.leaderWorkerSets of kvpilot's chart "
        "(the operator notices it within half a minute), or set nodes to 1 and use nodes with enough GPUs"
    )
    return (Fault("spec.engine.nodes", text),)


def _maker(autoscaler: Object) -> str:
    """Return kind and name of the object that a user must change: the ScaledObject if KEDA made the autoscaler."""
    about = autoscaler["metadata"]
    owners = (one for one in about.get("ownerReferences") or () if one.get("kind") == "ScaledObject")
    kind, name = next((("ScaledObject", one.get("name")) for one in owners), ("HorizontalPodAutoscaler", about["name"]))
    return f"{kind} {name}"


def incomplete(key: ServiceKey, view: DeploymentView, leaders: Sequence[PodView]) -> str | None:
    """Return the name of a StatefulSet (of leaders, or of one leader's workers) that lacks pods, or None."""
    if view.kind != LEADER_WORKER_SET.name:
        return None
    there = [one for one in leaders if one.revision == view.revision]
    if len(there) < view.replicas:
        return deployment_name(key.name, view.revision)
    return next((one.name for one in there if len(one.workers) < view.nodes - 1), None)


def refusal_of(events: Sequence[Object]) -> str | None:
    """Return why a pod was last refused, without the pod's name. Return None if a pod was created since then."""
    about = [one for one in events if one.get("reason") in ("FailedCreate", "SuccessfulCreate")]
    # Recorders use different fields for the time. As RFC 3339 text in UTC, it sorts by time.
    newest = max(about, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""), default=None)
    if newest is None or newest["reason"] == "SuccessfulCreate":
        return None
    message = str(newest.get("message") or "FailedCreate")
    return without_pod_name(message.partition(" failed error: ")[2] or message)
