"""Runs probes beside the reconciles, in places that services and namespaces share, gently to the users of an engine."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.budget import CANARY_PROBE, CHECK, Places
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import PlaceLost
from kvpilot_operator.observe.probe_packs import PackTexts, probe_prompts
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.probes import codec, run
from kvpilot_operator.probes.codec import Baseline
from kvpilot_operator.probes.errors import MalformedBaseline
from kvpilot_operator.probes.session import TOKEN_BUDGET, Settings
from kvpilot_operator.probes.throttle import GiveWay
from kvpilot_operator.state.decision import Capture, Captured, Find, Found, Measure, NothingKept, ProbeFailed, Request
from kvpilot_operator.state.enums import Reason
from kvpilot_operator.state.snapshot import ServiceKey

log = logging.getLogger(__name__)

# A probe that lost its place to others, because its engine said nothing for longer than the door's patience, begins
# anew with twice the patience: an engine that is only slow gets through in the end.
MAX_PATIENCE_SECONDS = 80.0
# Beside users' requests a probe waits this long in all while requests are queued.
GIVE_WAY_SECONDS = 120.0
# Served after everybody else's requests (their default is 0) by an engine that schedules by priority.
LOW_PRIORITY = 1_000_000


class Prober:
    """Carries out what a decision asks of an engine."""

    def __init__(self, cluster: Cluster, scraper: Scraper) -> None:
        self._cluster = cluster
        self._scraper = scraper
        self._texts = PackTexts(cluster)
        self._probes = Places(CANARY_PROBE)
        self._checks = Places(CHECK)

    async def probe(self, key: ServiceKey, spec: Spec, request: Request) -> Found:
        """Wait for a place, and again where it was lost, and probe; raises a KvpilotError where it cannot."""
        places = self._checks if isinstance(request, Measure) and request.serving else self._probes
        patience = places.door.patience_seconds
        while True:
            try:
                async with places.of(key, key.namespace, patience) as place:
                    settings = replace(self._settings(key, spec, request), progress=place.progress)
                    return await self._run(key, spec, request, settings)
            except PlaceLost as lost:
                log.info("probe begins anew: %s", lost, extra={"service": str(key), "probe": request.identity})
                patience = min(2 * patience, MAX_PATIENCE_SECONDS)

    async def _run(self, key: ServiceKey, spec: Spec, request: Request, settings: Settings) -> Found:
        if isinstance(request, Measure):
            try:
                baseline = await self._kept(key, request.config_map)
            except MalformedBaseline as error:
                return ProbeFailed(Reason.BASELINE_LOST, str(error))
            return await run.measure(request.url, request.model, baseline, settings=settings)
        try:
            kept = await self._kept(key, request.config_map)
        except MalformedBaseline as error:
            log.debug("no baseline to adopt: %s", error, extra={"service": str(key)})
        else:
            if kept.identity == request.baseline and kept.control is not None:
                return Captured(kept, adopted=True)
        if isinstance(request, Find):
            return NothingKept()
        return await self._capture(key, spec, request, settings)

    async def _kept(self, key: ServiceKey, config_map: str) -> Baseline:
        """The baseline in a ConfigMap; raises `MalformedBaseline` where there is none that can be read."""
        found = await self._cluster.find("v1", "ConfigMap", key.namespace, config_map)
        try:
            content = base64.b64decode((found or {})["binaryData"]["baseline"], validate=True)
        except (KeyError, TypeError, binascii.Error) as error:
            words = f"ConfigMap {config_map} holds no baseline: {type(error).__name__}: {error}"
            raise MalformedBaseline(words) from error
        return codec.decode(content)

    async def _capture(self, key: ServiceKey, spec: Spec, request: Capture, settings: Settings) -> Captured:
        prompts, dtype = probe_prompts(spec, await self._texts.of(key, spec)), spec.kv_cache.baseline
        about = (request.url, request.model)
        baseline = await run.capture(*about, prompts, identity=request.baseline, dtype=dtype, settings=settings)
        noise = await run.control(*about, baseline, settings=settings)
        return Captured(codec.with_control(baseline, noise, datetime.now(UTC).replace(microsecond=0)))

    def _settings(self, key: ServiceKey, spec: Spec, request: Request) -> Settings:
        """Beside users a probe gives way. A capture goes on in the end: a service under pressure needs its relief."""
        priority = LOW_PRIORITY if schedules_by_priority(spec.engine.extra_args) else None
        if isinstance(request, Find) or not request.serving:
            return Settings(priority=priority)
        insist = isinstance(request, Capture)
        give_way = GiveWay(partial(self._scraper.waiting, key, request.url), GIVE_WAY_SECONDS, insist)
        if insist:
            return Settings(priority=priority, give_way=give_way)
        return Settings(concurrency=1, priority=priority, give_way=give_way, token_budget=TOKEN_BUDGET)


def schedules_by_priority(extra_args: Sequence[str]) -> bool:
    """Whether the engine was started with vLLM's --scheduling-policy priority; the last one counts, as it does there.

    Under its default policy vLLM documents a `priority` as an error, so none is sent.
    """
    words = " ".join(extra_args).replace("=", " ").split()
    policies = [policy for name, policy in pairwise(words) if name.replace("_", "-") == "--scheduling-policy"]
    return policies[-1:] == ["priority"]
