"""Periodic reads of the API server that replace a watch: served APIs, Events of pod groups, and autoscalers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvpilot_operator.api.faults import Fault
from kvpilot_operator.api.names import HTTP_ROUTE_API, INFERENCE_POOL_API, KIND, LEADER_WORKER_SET_API, deployment_name
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.observe.views import without_pod_name
from kvpilot_operator.render.workloads import LEADER_WORKER_SET
from kvpilot_operator.state.objects import DeploymentView, PodView
from kvpilot_operator.state.snapshot import ServerFacts, ServiceKey

Object = Mapping[str, Any]

API_SECONDS = 30.0
"""Time until the server is asked about an API again, because definitions may be installed later."""
READ_SECONDS = 30.0
"""Time until the Events of a StatefulSet are read again. They are read only while the StatefulSet lacks pods."""
AUTOSCALER_SECONDS = 300.0
"""Time until the autoscalers of a namespace are listed again."""
FORGET_SECONDS = 600.0
# Most Events to read of one StatefulSet. Normally it has few, but anyone who may write Events can add any number.
_MOST = 50


@dataclass(eq=False)
class Served:
    """A cache of the optional APIs that the server serves. It asks only about APIs that a spec needs.

    `always` has the facts that do not depend on a spec.
    """

    cluster: Cluster
    always: ServerFacts
    elapsed: Callable[[], float]
    _apis: dict[str, tuple[float, bool]] = field(default_factory=dict)

    async def facts(self, spec: Spec | None) -> ServerFacts:
        """Return the optional APIs that the spec needs and the server serves."""
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
    """Return faults of a spec that this API server cannot fulfil. `groups` is True if it serves LeaderWorkerSets."""
    if spec is None or spec.engine.nodes == 1 or groups:
        return ()
    text = (
        f"a replica over {spec.engine.nodes} nodes is a group of pods of a LeaderWorkerSet, and this API server does "
        f"not show the operator {LEADER_WORKER_SET_API}: install LeaderWorkerSet, which is noticed in half a minute "
        "(and let the chart have rbac.leaderWorkerSets), or set nodes to 1 and take nodes with as many GPUs"
    )
    return (Fault("spec.engine.nodes", text),)


@dataclass(eq=False)
class GroupEvents:
    """A reader of Events that say why a LeaderWorkerSet lacks pods. Its StatefulSets report that only in Events."""

    cluster: Cluster
    elapsed: Callable[[], float]
    _read: dict[tuple[str, str], tuple[float, str | None]] = field(default_factory=dict)

    async def refusals(
        self, key: ServiceKey, workloads: Iterable[DeploymentView], leaders: Sequence[PodView]
    ) -> dict[str, str]:
        """Return why pods cannot be created, for each revision that lacks pods and has a known reason."""
        lacking = {view.revision: incomplete(key, view, leaders) for view in workloads}
        asked = {revision: name for revision, name in lacking.items() if name is not None}
        told = {revision: await self._refusal(key.namespace, name) for revision, name in asked.items()}
        return {revision: words for revision, words in told.items() if words is not None}

    async def _refusal(self, namespace: str, name: str) -> str | None:
        read, known = self._read.get((namespace, name), (-math.inf, None))
        if self.elapsed() - read < READ_SECONDS:
            return known
        about = f"involvedObject.kind=StatefulSet,involvedObject.name={name}"
        found = refusal_of(await self.cluster.first("v1", "Event", namespace, fields=about, limit=_MOST))
        now = self.elapsed()
        self._read = {one: told for one, told in self._read.items() if now - told[0] < FORGET_SECONDS}
        self._read[namespace, name] = (now, found)
        return found


@dataclass(eq=False)
class Autoscalers:
    """A reader of HorizontalPodAutoscalers, one list a namespace for all of its services."""

    cluster: Cluster
    elapsed: Callable[[], float]
    _read: dict[str, tuple[float, Mapping[str, str]]] = field(default_factory=dict)

    async def of(self, key: ServiceKey, spec: Spec | None) -> str | None:
        """Return kind and name of an autoscaler of this service; None if there is none, or kvpilot does not scale."""
        if spec is None or spec.scaling.mode != "Operator":
            return None
        read, known = self._read.get(key.namespace, (-math.inf, {}))
        if self.elapsed() - read >= AUTOSCALER_SECONDS:
            now = self.elapsed()
            self._read = {one: told for one, told in self._read.items() if now - told[0] < FORGET_SECONDS}
            # Set the time before the read, so that reconciles of the namespace's other services do not list again
            # meanwhile.
            self._read[key.namespace] = (now, known)
            known = await self._by_service(key.namespace)
            self._read[key.namespace] = (now, known)
        return known.get(key.name)

    async def _by_service(self, namespace: str) -> dict[str, str]:
        found = await self.cluster.first("autoscaling/v1", "HorizontalPodAutoscaler", namespace, limit=500)
        targets = ((one, (one.get("spec") or {}).get("scaleTargetRef") or {}) for one in found)
        return {str(target.get("name")): _maker(one) for one, target in targets if target.get("kind") == KIND}


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
    """Return the newest refusal to create a pod, without the pod's name. Return None if a pod was created since."""
    about = [one for one in events if one.get("reason") in ("FailedCreate", "SuccessfulCreate")]
    newest = max(about, key=_time, default=None)
    if newest is None or newest["reason"] == "SuccessfulCreate":
        return None
    message = str(newest.get("message") or "FailedCreate")
    return without_pod_name(message.partition(" failed error: ")[2] or message)


def _time(event: Object) -> str:
    """Return the Event's time as RFC 3339 text in UTC, which sorts by time. Recorders use different fields for it."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
