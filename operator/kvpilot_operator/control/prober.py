"""Runs probes beside the reconciles: at most one a service, its result kept until a reconcile has taken it in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.backoff import Backoff
from kvpilot_operator.budget import CANARY_PROBE, CHECK, Places
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import KvpilotError, PlaceLost
from kvpilot_operator.observe import baselines
from kvpilot_operator.observe.pack_texts import PackTexts
from kvpilot_operator.observe.probe_plan import probe_prompts
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.probes import run
from kvpilot_operator.probes.codec import Control
from kvpilot_operator.probes.errors import MalformedBaseline
from kvpilot_operator.state.decision import Capture, Find, Measure, Request
from kvpilot_operator.state.snapshot import Captured, NothingKept, ProbeFailed, ProbeResult, ServiceKey

log = logging.getLogger(__name__)

# A probe that lost its place to others, because its engine said nothing for longer than the door's patience, begins
# anew with twice the patience: an engine that is only slow gets through in the end.
MAX_PATIENCE_SECONDS = 80.0
# A probe that failed and that nobody counts (a baseline captured ahead of need) is tried again after this long, twice
# as long each time it fails again.
BACKOFF = Backoff(15.0, 900.0)
# Beside users' requests a probe waits this long in all while requests are queued.
GIVE_WAY_SECONDS = 120.0
# Served after everybody else's requests (their default is 0) by an engine that schedules by priority.
LOW_PRIORITY = 1_000_000

Outcome = Captured | NothingKept | run.Measurement | ProbeFailed


class Prober:
    """`ensure` starts what a decision asks for; `on_result` is called with the service when something was found."""

    def __init__(self, cluster: Cluster, scraper: Scraper) -> None:
        self._cluster = cluster
        self._scraper = scraper
        self._texts = PackTexts(cluster)
        self._running: dict[ServiceKey, tuple[Request, asyncio.Task[None]]] = {}
        self._results: dict[ServiceKey, ProbeResult] = {}
        self._failures: dict[ServiceKey, int] = {}
        self._probes = Places(CANARY_PROBE)
        self._checks = Places(CHECK)
        self.on_result: Callable[[ServiceKey], None] = lambda _: None

    def result(self, key: ServiceKey) -> ProbeResult | None:
        """The service's probe: one that is done and still of interest, or the one that runs."""
        running = self._running.get(key)
        return self._results.get(key) or (ProbeResult(running[0], None) if running is not None else None)

    def ensure(self, key: ServiceKey, spec: Spec, request: Request | None) -> None:
        """Make `request` the service's only probe: start it unless it runs or is done, cancel what is not asked for."""
        running = self._running.get(key)
        wanted = request.identity if request is not None else None
        if running is not None and running[0].identity != wanted:
            running[1].cancel()
            del self._running[key]
            running = None
        done = self._results.get(key)
        if done is not None and done.request.identity != wanted:
            del self._results[key]
            done = None
        if request is not None and running is None and done is None:
            task = asyncio.create_task(self._probe(key, spec, request))
            self._running[key] = (request, task)

    def forget(self, key: ServiceKey) -> None:
        """Stop probing a deleted service."""
        running = self._running.pop(key, None)
        if running is not None:
            running[1].cancel()
        self._results.pop(key, None)
        self._failures.pop(key, None)

    async def close(self) -> None:
        """Cancel every probe."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, key: ServiceKey, spec: Spec, request: Request) -> None:
        extra = {"service": str(key), "probe": request.identity}
        log.info("probe starts", extra=extra)
        try:
            outcome = await self._placed(key, spec, request)
        except KvpilotError as error:
            outcome = ProbeFailed(_reason(error), str(error))
            log.warning("probe failed: %s", error, extra=extra)
        except Exception as error:
            outcome = ProbeFailed("ProbeCrashed", f"{type(error).__name__}: {error}")
            log.exception("probe crashed", extra=extra)
        else:
            log.info("probe is done", extra=extra)
        self._running.pop(key, None)
        self._results[key] = ProbeResult(request, outcome)
        self.on_result(key)
        if isinstance(outcome, ProbeFailed):
            failures = self._failures.get(key, 0)
            self._failures[key] = failures + 1
            asyncio.get_running_loop().call_later(BACKOFF.pause(failures), self._drop, key, request.identity)
        else:
            self._failures.pop(key, None)

    async def _placed(self, key: ServiceKey, spec: Spec, request: Request) -> Outcome:
        """Wait for a place, and again where it was lost, and probe."""
        places = self._checks if isinstance(request, Measure) and request.serving else self._probes
        patience = places.door.patience_seconds
        while True:
            try:
                async with places.of(key, key.namespace, patience) as place:
                    return await self._run(key, spec, request, place.progress)
            except PlaceLost as lost:
                log.info("probe begins anew: %s", lost, extra={"service": str(key), "probe": request.identity})
                patience = min(2 * patience, MAX_PATIENCE_SECONDS)

    def _drop(self, key: ServiceKey, identity: str) -> None:
        kept = self._results.get(key)
        if kept is not None and kept.request.identity == identity:
            del self._results[key]
            self.on_result(key)

    async def _run(self, key: ServiceKey, spec: Spec, request: Request, progress: run.Progress) -> Outcome:
        if isinstance(request, Measure):
            try:
                baseline = await baselines.read(self._cluster, key, request.config_map)
            except MalformedBaseline as error:
                return ProbeFailed("BaselineLost", str(error))
            settings = self._settings(key, spec, request)
            return await run.measure(request.url, request.model, baseline, settings=settings, progress=progress)
        kept = await baselines.find(self._cluster, key, request.config_map, request.baseline)
        if kept is not None:
            return Captured(kept, adopted=True)
        if isinstance(request, Find):
            return NothingKept()
        return await self._capture(key, spec, request, progress)

    async def _capture(self, key: ServiceKey, spec: Spec, request: Capture, progress: run.Progress) -> Captured:
        settings = self._settings(key, spec, request)
        prompts = probe_prompts(spec, await self._texts.of(key, spec))
        baseline = await run.capture(
            request.url,
            request.model,
            prompts,
            identity=request.baseline,
            dtype=spec.kv_cache.baseline,
            settings=settings,
            progress=progress,
        )
        noise = await run.control(request.url, request.model, baseline, settings=settings, progress=progress)
        control = Control(
            captured=datetime.now(UTC).replace(microsecond=0),
            prompts=noise.prompts,
            positions=noise.positions,
            mean_kl_micronats=noise.mean_kl_micronats,
            p99_kl_micronats=noise.p99_kl_micronats,
            top1_agreement_permille=noise.top1_agreement_permille,
        )
        return Captured(replace(baseline, control=control))

    def _settings(self, key: ServiceKey, spec: Spec, request: Capture | Measure) -> run.Settings:
        """Beside users a probe gives way. A capture goes on in the end: a service under pressure needs its relief."""
        priority = LOW_PRIORITY if schedules_by_priority(spec.engine.extra_args) else None
        if not request.serving:
            return run.Settings(priority=priority)
        insist = isinstance(request, Capture)
        give_way = run.GiveWay(partial(self._scraper.waiting, key, request.url), GIVE_WAY_SECONDS, insist)
        if insist:
            return run.Settings(priority=priority, give_way=give_way)
        return run.Settings(concurrency=1, priority=priority, give_way=give_way, token_budget=run.TOKEN_BUDGET)


def schedules_by_priority(extra_args: Sequence[str]) -> bool:
    """Whether the engine was started with vLLM's --scheduling-policy priority; the last one counts, as it does there.

    Under its default policy vLLM documents a `priority` as an error, so none is sent.
    """
    words = " ".join(extra_args).replace("=", " ").split()
    policies = [policy for name, policy in pairwise(words) if name.replace("_", "-") == "--scheduling-policy"]
    return policies[-1:] == ["priority"]


def _reason(error: KvpilotError) -> str:
    return type(error).__name__
