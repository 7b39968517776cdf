"""Run probes in the background, at most one for each service. All services share permits. Users' requests go first."""

import asyncio
import base64
import binascii
import logging
import math
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from kvpilot_formats.untrusted import KvpilotError
from kvpilot_operator.act.ownership import is_owned
from kvpilot_operator.api.pods import Engine
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.api.words import Reason, Verdict
from kvpilot_operator.backoff import Backoff
from kvpilot_operator.budget import CANARY_PROBE, CHECK, Permits
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.decide import allowed, control_fault, described, judge
from kvpilot_operator.errors import PermitLost
from kvpilot_operator.observe.probe_packs import PackTexts, probe_prompts
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.decision import (
    Capture,
    Captured,
    Find,
    Found,
    Measure,
    NothingKept,
    ProbeFailed,
    ProbeResult,
    Request,
)
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes import codec, loaded, pressure, run
from kvpilot_probes.codec import Baseline
from kvpilot_probes.errors import ContextNotHeld, MalformedBaseline
from kvpilot_probes.loaded import Connector
from kvpilot_probes.pressure import Pool
from kvpilot_probes.sequential import Allowed
from kvpilot_probes.session import GiveWay, Settings
from kvpilot_probes.stats import Measurement

log = logging.getLogger(__name__)

# Pause before the same probe runs again. It doubles with each failure. For probes whose failures no decision counts,
# such as the early capture of a baseline, only this pause limits the retries.
BACKOFF = Backoff(15.0, 900.0)

Run = Callable[[ServiceKey, Spec, Request], Awaitable[Found]]


class Probe:
    """The probe of one service. `ensure` starts the requested probe. `on_result` is called when the probe ends."""

    __slots__ = ("_closed", "_failures", "_key", "_on_result", "_result", "_retry_at", "_run", "_running", "_task")

    def __init__(self, key: ServiceKey, run: Run, on_result: Callable[[ServiceKey], None]) -> None:
        self._key = key
        self._run = run
        self._on_result = on_result
        self._running: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._result: ProbeResult | None = None
        self._failures = 0
        self._retry_at = math.inf
        self._closed = False

    @property
    def result(self) -> ProbeResult | None:
        """Result of a completed probe that is still requested, or the running probe without an outcome."""
        return self._result or (ProbeResult(self._running, None) if self._running is not None else None)

    def ensure(self, spec: Spec, request: Request | None) -> None:
        """Make `request` the only probe: start it unless it runs or is done, and cancel any other probe."""
        wanted = request.identity if request is not None else None
        if self._running is not None and self._running.identity != wanted:
            self._cancel()
        over = asyncio.get_running_loop().time() >= self._retry_at
        if self._result is not None and (over or self._result.request.identity != wanted):
            self._result = None
        if request is not None and self.result is None and not self._closed:
            self._running = request
            self._task = asyncio.create_task(self._probe(spec, request))

    def close(self) -> None:
        """Cancel the probe and start no other: the service is gone."""
        self._closed, self._result = True, None
        self._cancel()

    async def ended(self) -> None:
        """Wait until the cancelled probe has stopped."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _cancel(self) -> None:
        self._running = None
        if self._task is not None:
            self._task.cancel()

    async def _probe(self, spec: Spec, request: Request) -> None:
        extra = {"service": str(self._key), "probe": request.identity}
        log.info("probe starts", extra=extra)
        outcome: Found
        try:
            outcome = await self._run(self._key, spec, request)
        except KvpilotError as error:
            outcome = ProbeFailed(type(error).__name__, str(error))
            log.warning("probe failed: %s", error, extra=extra)
        except Exception as error:
            outcome = ProbeFailed(Reason.PROBE_ERRORS, f"{type(error).__name__}: {error}")
            log.exception("probe crashed", extra=extra)
        else:
            log.info("probe is done", extra=extra)
        if self._running is not request:
            return  # the probe was cancelled at the moment when it ended
        self._running, self._result = None, ProbeResult(request, outcome)
        self._retry_at = math.inf
        if isinstance(outcome, ProbeFailed):
            self._retry_at = asyncio.get_running_loop().time() + BACKOFF.pause(self._failures)
            self._failures += 1
        else:
            self._failures = 0
        self._on_result(self._key)


# A probe loses its permit if its engine is silent for this long while other probes wait. It then restarts with twice
# the patience, so that a probe of a slow engine can finish.
PATIENCE_SECONDS = 5.0
MAX_PATIENCE_SECONDS = 80.0
# Longest total time that a probe waits for queued user requests.
GIVE_WAY_SECONDS = 120.0
# Smallest time budget of a run on a serving replica, if accuracy.periodSeconds is shorter. A run starts no prompt after
# its budget.
SHORTEST_BUDGET_SECONDS = 900
# The priority of probes: an engine that schedules by priority serves them after all other requests (priority 0).
LOW_PRIORITY = 1_000_000


class Prober:
    """The worker that runs the probes that decisions request."""

    def __init__(self, cluster: Cluster, scraper: Scraper) -> None:
        self._cluster = cluster
        self._scraper = scraper
        self._texts = PackTexts(cluster)
        self._probes = Permits(CANARY_PROBE)
        self._checks = Permits(CHECK)

    async def probe(self, key: ServiceKey, spec: Spec, request: Request, *, uid: str) -> Found:
        """Wait for a permit, and run the probe that `request` asks for.

        Use a baseline only if its ConfigMap has the service, identified by `uid`, as an owner.
        """
        permits = self._checks if isinstance(request, Measure) and request.serving else self._probes
        patience = PATIENCE_SECONDS
        while True:
            try:
                async with permits.of(key.namespace, patience) as progress:
                    tls = None if isinstance(request, Find) else self._scraper.tls(request.url)
                    settings = replace(self._settings(key, spec, request), progress=progress, tls=tls)
                    return await self._run(key, uid, spec, request, settings)
            except PermitLost as lost:
                log.info("probe begins anew: %s", lost, extra={"service": str(key), "probe": request.identity})
                patience = min(2 * patience, MAX_PATIENCE_SECONDS)

    async def _run(self, key: ServiceKey, uid: str, spec: Spec, request: Request, settings: Settings) -> Found:
        if isinstance(request, Measure):
            try:
                baseline = await self._kept(key, uid, request.config_map)
            except MalformedBaseline as error:
                return ProbeFailed(Reason.BASELINE_LOST, str(error))
            control = described(baseline)
            limits = allowed(control, spec.accuracy)
            connector = Connector(spec.connector, partial(self._scraper.loaded, key, request.url))

            def passes(found: Measurement) -> bool:
                return judge(found, control, spec.accuracy).verdict == Verdict.PASSED

            found = await loaded.measure(
                request.url, request.model, baseline, connector, passes, allowed=limits, settings=settings
            )
            if not request.serving and passes(found):
                return await self._filled(key, request, baseline, found, limits, settings)
            return found
        try:
            kept = await self._kept(key, uid, request.config_map)
        except MalformedBaseline as error:
            log.debug("no baseline to adopt: %s", error, extra={"service": str(key)})
        else:
            if kept.identity == request.baseline:
                fault = control_fault(described(kept), spec.accuracy)
                if fault is None:
                    return Captured(kept, adopted=True)
                log.info("the kept baseline is captured anew: %s", fault.message, extra={"service": str(key)})
        if isinstance(request, Find):
            return NothingKept()
        return await self._capture(key, spec, request, settings)

    async def _kept(self, key: ServiceKey, uid: str, config_map: str) -> Baseline:
        """Read the baseline in a ConfigMap. Raise `MalformedBaseline` if it is missing, broken or not the service's."""
        found = await self._cluster.find(Ref("v1", "ConfigMap", key.namespace, config_map))
        if found is not None and not is_owned(found, uid):
            # Check the owner. Otherwise anyone who can write ConfigMaps could define the correct answers.
            raise MalformedBaseline(f"ConfigMap {config_map} is not the service's own: delete it to capture a baseline")
        try:
            content = base64.b64decode((found or {})["binaryData"]["baseline"], validate=True)
        except (KeyError, TypeError, binascii.Error) as error:
            words = f"ConfigMap {config_map} holds no baseline: {type(error).__name__}: {error}"
            raise MalformedBaseline(words) from error
        baseline = codec.decode(content)
        if baseline.control is None:
            raise MalformedBaseline(f"ConfigMap {config_map} has no control run: delete it to capture a baseline")
        return baseline

    async def _capture(self, key: ServiceKey, spec: Spec, request: Capture, settings: Settings) -> Found:
        prompts, dtype = probe_prompts(spec, await self._texts.of(key, spec)), spec.kv_cache.baseline
        url, model = request.url, request.model
        baseline = await run.capture(url, model, prompts, identity=request.baseline, dtype=dtype, settings=settings)
        noise = await run.control(url, model, baseline, settings=settings)
        captured = codec.with_control(baseline, noise, datetime.now(UTC).replace(microsecond=0))
        fault = control_fault(described(captured), spec.accuracy)
        if fault is not None:
            return ProbeFailed(fault.reason, f"pod {request.pod}: {fault.message}")
        return Captured(captured)

    async def _filled(
        self,
        key: ServiceKey,
        request: Measure,
        baseline: Baseline,
        found: Measurement,
        limits: Allowed,
        settings: Settings,
    ) -> Found:
        """Fill the canary's longest context and its KV blocks with probes, before users' requests can (decision 76).

        Return a failure if the engine crashes or stops answering. Otherwise return the measurement `found`, extended by
        the answers that the engine gave with full memory.
        """
        extra = {"service": str(key), "probe": request.identity}

        async def look() -> Pool:
            page = await self._scraper.find(key, request.url)
            return Pool(0, 0.0) if page is None else Pool(page.capacity_tokens, page.usage)

        try:
            filled = await pressure.fill(
                request.url, request.model, baseline, look=look, allowed=limits, settings=settings
            )
        except ContextNotHeld as error:
            log.warning("the canary does not answer a prompt of its longest context: %s", error, extra=extra)
            return ProbeFailed(Reason.ENGINE_CRASHED, f"pod {request.pod}: {error}")
        log.info("the canary has answered a prompt of %d tokens", filled.context, extra=extra)
        return filled.added_to(found)

    def _settings(self, key: ServiceKey, spec: Spec, request: Request) -> Settings:
        """Return settings that make a probe yield to users' requests.

        A serving replica gets one probe request at a time, but two during the capture of the baseline, and four during
        the control run.
        """
        priority = LOW_PRIORITY if schedules_by_priority(spec.engine) else None
        if isinstance(request, Find) or not request.serving:
            # A measurement gets half of the progress deadline. The capture of the baseline and the filling of the cache
            # get the other half.
            usual = Settings(priority=priority)
            if not isinstance(request, Measure):
                return usual
            adapters = tuple(one.name for one in spec.model.adapters)
            return replace(usual, budget_seconds=spec.canary.progress_deadline_seconds / 2, adapters=adapters)
        # A capture does not pause for users' requests, because a canary waits for the baseline.
        rests, load = isinstance(request, Measure), partial(self._scraper.load, key, request.url)
        give_way = GiveWay(load, GIVE_WAY_SECONDS, rests)
        if isinstance(request, Capture):
            return Settings(concurrency=2, priority=priority, give_way=give_way)
        usual = Settings(concurrency=1, priority=priority, give_way=give_way, tasks=False)
        budget = max(spec.accuracy.period_seconds, SHORTEST_BUDGET_SECONDS)
        return replace(usual, brief=True, turn=zlib.crc32(request.identity.encode()), budget_seconds=budget)


def schedules_by_priority(engine: Engine) -> bool:
    """Return True if the engine schedules by priority. Under its default policy, vLLM rejects a `priority`."""
    return engine.arguments.value("--scheduling-policy") == "priority"
