"""Build one service's Snapshot from the fleet's cache, and scrape the fleet's engines."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from kvpilot_operator.api.names import (
    API_VERSION,
    HTTP_ROUTE_API,
    INFERENCE_POOL_API,
    KIND,
    canary_service,
    deployment_name,
    engine_url,
)
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ClusterError, ScrapeError, Throttled
from kvpilot_operator.observe.api_reads import ApiReads, not_served
from kvpilot_operator.observe.informers import InformerCache, ServiceView
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.observe.probe_packs import PackTexts, PlanRead
from kvpilot_operator.observe.scrape import Scraper, ScrapeThrottle
from kvpilot_operator.observe.views import pool_view, route_view, together
from kvpilot_operator.observe.windows import Windows, retention_of
from kvpilot_operator.state.decision import ProbeResult
from kvpilot_operator.state.objects import ObjectView, PodView, RouteView
from kvpilot_operator.state.questions import Question, Unanswered, unanswered
from kvpilot_operator.state.snapshot import ProbePlan, ServerFacts, ServiceKey, Snapshot

log = logging.getLogger(__name__)

T = TypeVar("T")
Objects = dict[tuple[str, str], ObjectView]


class Observations:
    """The observer's memory of one service: scrape windows and probe packs."""

    def __init__(self, key: ServiceKey, uid: str) -> None:
        self.key, self.uid = key, uid
        self.windows, self.throttle = Windows(key), ScrapeThrottle()
        self.plan: PlanRead | None = None


@dataclass(eq=False)
class Observer:
    """A builder of Snapshots from the fleet's cache. `on_scrape` is called after each scrape, with True for success."""

    cluster: Cluster
    cache: InformerCache
    scraper: Scraper
    server: ServerFacts
    clock: Callable[[], datetime]
    on_scrape: Callable[[bool], None]
    elapsed: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._texts = PackTexts(self.cluster)
        self._reads = ApiReads(self.cluster, self.server, lambda: self.elapsed())

    async def snapshot(self, known: Observations, probe_result: ProbeResult | None) -> Snapshot | None:
        """Return the current Snapshot of one service. Return None if the service does not exist or is being deleted."""
        key, windows = known.key, known.windows
        service = self.cache.services.get(*key)
        if service is None or service.uid != known.uid:
            return None
        spec = service.spec
        # Wait for all requests first, so that everything read from the cache afterwards has the same age.
        failed: list[Unanswered] = []
        server = await _observed(Question.ROUTE, self._reads.server(spec), self.server, failed)
        route = await _observed(Question.ROUTE, self._route(key, spec, server), None, failed)
        pools = await _observed(Question.POOLS, self._pools(known, service, server), {}, failed)
        probes = await _observed(Question.PROBE_SETS, self._probe_plan(known, spec), ProbePlan(), failed)
        pods = self.cache.pods.of(key)
        node = await _observed(Question.NODE, self._reads.node(pods), self._reads.known_node(pods), failed)
        autoscaler = await _observed(Question.REPLICAS, self._reads.autoscaler(key, spec), None, failed)
        views = [placed.view for placed in self.cache.workloads(key)]
        told = self._reads.refusals(key, views, self.cache.replicas(key))
        refusals = await _observed(Question.GROUPS, told, {}, failed)
        service = self.cache.services.get(*key)
        if service is None or service.spec is not spec:
            return await self.snapshot(known, probe_result)
        objects = self.cache.objects(key, service.uid)
        revisions = {
            placed.view.revision: replace(placed.view, failure=refusals.get(placed.view.revision, placed.view.failure))
            for placed in self.cache.workloads(key)
            if objects[placed.kind, placed.name].owned
            and placed.name == deployment_name(key.name, placed.view.revision)
        }
        objects.update(pools)
        service_view, pool = objects.get(("Service", key.name)), pools.get(("InferencePool", key.name))
        selects = service_view.selects if service_view is not None and service_view.owned else None
        # A pool that could not be read may select any revision.
        unread = selects is not None and any(one.question == Question.POOLS for one in failed)
        windows.keep_only(revisions.keys())
        faults = service.faults or not_served(spec, self.cache.serves_groups(key.namespace))
        if spec is not None:
            windows.retention = retention_of(spec, trial=service.status.canary is not None)
        return Snapshot(
            now=self.clock().replace(microsecond=0),
            key=key,
            uid=service.uid,
            generation=service.generation,
            resource_version=service.version,
            faults=faults,
            spec=None if faults else spec,
            status=service.status,
            canary_annotation=service.canary_annotation,
            deployments=revisions,
            pods=self.cache.replicas(key),
            traffic="" if unread else together(selects, pool),
            objects=objects,
            samples=windows.samples(),
            node=node,
            model=windows.model(),
            route=route,
            autoscaler=autoscaler,
            server=server,
            probes=probes,
            probe_result=probe_result,
            unanswered=tuple(failed),
            backed_off=known.throttle.backed_off,
        )

    async def refresh(self, key: ServiceKey) -> None:
        """Read a service from the API server, because the cache was out of date."""
        found = await self.cluster.find(Ref(API_VERSION, KIND, key.namespace, key.name))
        self.cache.wrote(KIND, key.namespace, key.name, found)

    async def scrape(self, known: Observations) -> None:
        """Scrape the answering engines whose scrape is due. The sample leaves out pods whose scrape fails."""
        key, throttle = known.key, known.throttle
        service = self.cache.services.get(*key)
        if service is None or service.uid != known.uid:
            return
        answering = {view.name: view for view in self.cache.pods.of(key) if view.answers}
        due = throttle.due(answering.keys(), self.elapsed())
        if not due:
            return
        by_revision: dict[str, list[PodView]] = {}
        for view in answering.values():
            by_revision.setdefault(view.revision, []).append(view)
        for revision, views in by_revision.items():
            asked = [view for view in views if view.name in due]
            answers = await asyncio.gather(*(self._scrape_pod(key, view, throttle) for view in asked))
            pages = {view.name: page for view, page in zip(asked, answers, strict=True) if page is not None}
            if pages:
                gpus, unanswered = self._reads.gpus(views), len(views) - len(pages)
                known.windows.add(revision, self.clock(), pages, unanswered=unanswered, gpus=gpus)

    async def _scrape_pod(self, key: ServiceKey, pod: PodView, throttle: ScrapeThrottle) -> PodMetrics | None:
        try:
            url = engine_url(pod.ip, pod.mesh)
            page = await self.scraper.scrape(key, url, lambda work: throttle.spend(work, self.elapsed()))
        except ScrapeError as error:
            log.warning("scrape failed: %s", error, extra={"service": str(key), "pod": pod.name})
            self.on_scrape(False)
            throttle.failed(pod.name, self.elapsed(), str(error))
            return None
        self.on_scrape(True)
        throttle.answered(pod.name)
        return page

    async def _pools(self, known: Observations, service: ServiceView, server: ServerFacts) -> Objects:
        """Return the service's InferencePools, including former ones until they are deleted."""
        if not server.inference_pools and service.status.inference_pool is None:
            return {}
        names = (known.key.name, canary_service(known.key.name))
        pools = [Ref(INFERENCE_POOL_API, "InferencePool", known.key.namespace, name) for name in names]
        found = {(pool.kind, pool.name): await self.cluster.find(pool) for pool in pools}
        return {what: pool_view(one, known.uid) for what, one in found.items() if one is not None}

    async def _route(self, key: ServiceKey, spec: Spec | None, server: ServerFacts) -> RouteView | None:
        """Return the user's route that sends a canary its share. Return None if there is none."""
        ref = spec.canary.route_ref if spec is not None else None
        if ref is None or not server.http_routes:
            return None
        found = await self.cluster.find(Ref(HTTP_ROUTE_API, "HTTPRoute", key.namespace, ref.name))
        return route_view(found) if found is not None else None

    async def _probe_plan(self, known: Observations, spec: Spec | None) -> ProbePlan:
        if spec is None:
            return ProbePlan()
        known.plan = await self._texts.plan(known.key, spec, known.plan, self.clock())
        return known.plan.plan


async def _observed(question: Question, reading: Awaitable[T], otherwise: T, failed: list[Unanswered]) -> T:
    """Return the reading. If it fails, add the question to `failed` and return `otherwise`.

    Re-raise the error if the whole API server is unavailable or throttles.
    """
    try:
        return await reading
    except Exception as error:
        # These errors may concern the whole API server. All others concern only this request.
        asked = type(error) is ClusterError and (error.away or error.status == 429)
        if isinstance(error, Throttled) or asked:
            raise
        failed.append(unanswered(question, error))
        return otherwise
