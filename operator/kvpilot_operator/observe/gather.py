"""Reads one service with everything that belongs to it, and scrapes the fleet's engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import httpx

from kvpilot_operator.api.schema import Fault, apply_defaults, faults
from kvpilot_operator.api.spec import Spec, parse
from kvpilot_operator.cluster.client import Cluster, Object
from kvpilot_operator.errors import ClusterError, ScrapeError
from kvpilot_operator.observe.believe import Judged
from kvpilot_operator.observe.page import PodMetrics
from kvpilot_operator.observe.probe_plan import probe_plan
from kvpilot_operator.observe.scrape import scrape
from kvpilot_operator.observe.views import (
    deployment_view,
    gpu_of,
    is_ours,
    node_facts,
    pod_view,
    route_view,
    traffic_of,
)
from kvpilot_operator.observe.windows import Windows, need
from kvpilot_operator.render.names import API_VERSION, HTTP_ROUTE_API, KIND, SERVICE_LABEL, engine_url
from kvpilot_operator.state.snapshot import (
    NodeFacts,
    PodView,
    ProbePlan,
    ProbeResult,
    RouteView,
    ServerFacts,
    ServiceKey,
    Snapshot,
)
from kvpilot_operator.state.status import parse_status

log = logging.getLogger(__name__)

MAX_SCRAPES_AT_ONCE = 64


class Observer:
    """Builds Snapshots; `clock` gives the time in UTC."""

    def __init__(self, cluster: Cluster, windows: Windows, server: ServerFacts, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._windows = windows
        self._server = server
        self._clock = clock
        self._http = httpx.AsyncClient(timeout=5.0)
        self._scrapes = asyncio.Semaphore(MAX_SCRAPES_AT_ONCE)
        self._read: dict[ServiceKey, tuple[tuple[str, int], tuple[Fault, ...], Spec | None]] = {}
        self._gpus: dict[str, str] = {}
        self._told: dict[tuple[ServiceKey, str], frozenset[str]] = {}

    async def close(self) -> None:
        """Close the connections to engines."""
        await self._http.aclose()

    async def snapshot(self, key: ServiceKey, probe_result: ProbeResult | None) -> Snapshot | None:
        """Everything about one service now, or None where it does not exist or is being deleted."""
        raw = await self._cluster.find(API_VERSION, KIND, key.namespace, key.name)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            self._read.pop(key, None)
            self._told = {about: told for about, told in self._told.items() if about[0] != key}
            return None
        broken, spec = self._spec(key, raw)
        deployments, pods, service = await self._owned(key)
        views = tuple(pod_view(pod) for pod in pods)
        revisions = {view.revision: view for view in map(deployment_view, deployments)}
        self._windows.keep_only(key, set(revisions))
        if spec is not None:
            self._windows.keep(key, need(spec))
        return Snapshot(
            now=self._clock().replace(microsecond=0),
            key=key,
            uid=raw["metadata"]["uid"],
            generation=raw["metadata"].get("generation", 0),
            raw=raw,
            faults=broken,
            spec=spec,
            status=parse_status(raw.get("status")),
            deployments=revisions,
            pods=views,
            traffic=traffic_of(service),
            samples=self._windows.of(key),
            node=await self._node_facts(views),
            model=self._windows.model(key),
            route=await self._route(key, spec),
            server=self._server,
            probes=ProbePlan() if spec is None else await self._probe_plan(key, spec),
            probe_result=probe_result,
        )

    async def scrape(self, key: ServiceKey) -> None:
        """Scrape every ready engine of a service; a pod that does not answer is left out of this sample."""
        by_revision: dict[str, list[PodView]] = {}
        for view in map(pod_view, await self._pods(key)):
            if view.ready and view.ip and not view.terminating:
                by_revision.setdefault(view.revision, []).append(view)
        for revision, views in by_revision.items():
            answers = await asyncio.gather(*(self._scrape_pod(key, view) for view in views))
            pages = {view.name: page for view, page in zip(views, answers, strict=True) if page is not None}
            gpus = {view.name: self._gpus[view.node] for view in views if view.node in self._gpus}
            if pages:
                judged = self._windows.add(
                    key, revision, self._clock(), pages, unanswered=len(views) - len(pages), gpus=gpus
                )
                self._tell(key, revision, pages, judged)

    def _tell(self, key: ServiceKey, revision: str, pages: Mapping[str, PodMetrics], judged: Judged) -> None:
        """Log what is odd about a revision's pages, once for as long as it lasts."""
        odd = {
            f"{name} is read, the older name": f"vLLM's {name}" for page in pages.values() for name in page.older_names
        }
        odd |= {f"not believed: {words}": words.partition(":")[0] for words in judged.sample.doubted}
        odd |= {f"not taken as it is: {words}": words.partition(":")[0] for words in judged.cut}
        told = self._told.get((key, revision), frozenset())
        for words, about in odd.items():
            if about not in told:
                log.warning("metrics: %s", words, extra={"service": str(key)})
        if odd:
            self._told[key, revision] = frozenset(odd.values())
        elif told:
            del self._told[key, revision]

    def _spec(self, key: ServiceKey, raw: Object) -> tuple[tuple[Fault, ...], Spec | None]:
        """Check and parse the spec; the answer is kept until the object's generation moves."""
        version = (raw["metadata"]["uid"], raw["metadata"].get("generation", 0))
        known = self._read.get(key)
        if known is None or known[0] != version:
            broken = faults(raw)
            known = (version, broken, None if broken else parse(apply_defaults(raw)))
            self._read[key] = known
        return known[1], known[2]

    async def _scrape_pod(self, key: ServiceKey, pod: PodView) -> PodMetrics | None:
        try:
            async with self._scrapes:
                return await scrape(self._http, engine_url(pod.ip))
        except ScrapeError as error:
            log.warning("scrape failed: %s", error, extra={"service": str(key), "pod": pod.name})
            return None

    async def _pods(self, key: ServiceKey) -> list[Object]:
        pods = await self._cluster.list("v1", "Pod", key.namespace, f"{SERVICE_LABEL}={key.name}")
        return [pod for pod in pods if is_ours(pod, key.name)]

    async def _owned(self, key: ServiceKey) -> tuple[list[Object], list[Object], Object | None]:
        deployments, pods, service = await asyncio.gather(
            self._cluster.list("apps/v1", "Deployment", key.namespace, f"{SERVICE_LABEL}={key.name}"),
            self._pods(key),
            self._cluster.find("v1", "Service", key.namespace, key.name),
        )
        return deployments, pods, service

    async def _node_facts(self, pods: Sequence[PodView]) -> NodeFacts:
        names = sorted({pod.node for pod in pods if pod.node})
        found = await asyncio.gather(*(self._cluster.find("v1", "Node", "", name) for name in names))
        nodes = [node for node in found if node is not None]
        self._gpus |= {node["metadata"]["name"]: gpu_of(node) or "cpu" for node in nodes}
        return node_facts(nodes)

    async def _route(self, key: ServiceKey, spec: Spec | None) -> RouteView | None:
        name = spec.canary.route_ref if spec is not None else None
        if name is None or not self._server.http_routes:
            return None
        try:
            return route_view(await self._cluster.find(HTTP_ROUTE_API, "HTTPRoute", key.namespace, name), key)
        except ClusterError as error:
            # A route that may not be read keeps a canary from its steps, and nothing else from being served.
            log.warning("route not read: %s", error, extra={"service": str(key)})
            return None

    async def _probe_plan(self, key: ServiceKey, spec: Spec) -> ProbePlan:
        return probe_plan(spec, await probe_config_maps(self._cluster, key, spec))


async def probe_config_maps(cluster: Cluster, key: ServiceKey, spec: Spec) -> dict[str, Mapping[str, str]]:
    """The data of the ConfigMaps that `spec.accuracy.probeSets` names; one that does not exist is left out."""
    names = [name.partition("/")[2] for name in spec.accuracy.probe_sets if name.startswith("configmap/")]
    found = await asyncio.gather(*(cluster.find("v1", "ConfigMap", key.namespace, name) for name in names))
    return {name: one.get("data") or {} for name, one in zip(names, found, strict=True) if one is not None}
