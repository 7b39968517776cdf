"""Runs probes beside the passes: at most one a service, its result kept until a pass has taken it in."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.errors import KvpilotError
from kvpilot_operator.observe.gather import probe_config_maps
from kvpilot_operator.observe.probe_plan import probe_prompts
from kvpilot_operator.probes import codec, run
from kvpilot_operator.probes.errors import MalformedBaseline
from kvpilot_operator.state.decision import Capture, Measure
from kvpilot_operator.state.snapshot import Captured, ProbeFailed, ProbeResult, ServiceKey

log = logging.getLogger(__name__)

# Probes of the whole fleet at once: each costs its engine two requests in flight.
MAX_PROBES = 16
# A probe that failed and that nobody counts (a baseline captured ahead of need) is tried again after this long.
RETRY_SECONDS = 15.0

Request = Capture | Measure


class Prober:
    """`ensure` starts what a decision asks for; `on_result` is called with the service when something was found."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running: dict[ServiceKey, tuple[str, asyncio.Task[None]]] = {}
        self._results: dict[ServiceKey, ProbeResult] = {}
        self._gate = asyncio.Semaphore(MAX_PROBES)
        self.on_result: Callable[[ServiceKey], None] = lambda _: None

    def result(self, key: ServiceKey) -> ProbeResult | None:
        """The service's last finished probe, if it is still of interest."""
        return self._results.get(key)

    def ensure(self, key: ServiceKey, spec: Spec, request: Request | None) -> None:
        """Make `request` the service's only probe: start it unless it runs or is done, cancel what is not asked for."""
        running = self._running.get(key)
        wanted = request.identity if request is not None else None
        if running is not None and running[0] != wanted:
            running[1].cancel()
            del self._running[key]
            running = None
        done = self._results.get(key)
        if done is not None and done.identity != wanted:
            del self._results[key]
            done = None
        if request is not None and running is None and done is None:
            task = asyncio.create_task(self._probe(key, spec, request))
            self._running[key] = (request.identity, task)

    def forget(self, key: ServiceKey) -> None:
        """Stop probing a deleted service."""
        running = self._running.pop(key, None)
        if running is not None:
            running[1].cancel()
        self._results.pop(key, None)

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
            async with self._gate:
                outcome = await self._run(key, spec, request)
        except KvpilotError as error:
            outcome = ProbeFailed(_reason(error), str(error))
            log.warning("probe failed: %s", error, extra=extra)
        except Exception as error:
            outcome = ProbeFailed("ProbeCrashed", f"{type(error).__name__}: {error}")
            log.exception("probe crashed", extra=extra)
        else:
            log.info("probe is done", extra=extra)
        self._running.pop(key, None)
        self._results[key] = ProbeResult(request.identity, outcome)
        self.on_result(key)
        if isinstance(outcome, ProbeFailed):
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._drop, key, request.identity)

    def _drop(self, key: ServiceKey, identity: str) -> None:
        kept = self._results.get(key)
        if kept is not None and kept.identity == identity:
            del self._results[key]
            self.on_result(key)

    async def _run(self, key: ServiceKey, spec: Spec, request: Request) -> Captured | run.Measurement | ProbeFailed:
        if isinstance(request, Capture):
            maps = await probe_config_maps(self._cluster, key, spec)
            prompts = probe_prompts(spec, maps)
            baseline = await run.capture(
                request.url,
                request.model,
                prompts,
                identity=request.baseline,
                dtype=spec.kv_cache.baseline,
            )
            return Captured(baseline, await run.control(request.url, request.model, baseline))
        kept = await self._cluster.find("v1", "ConfigMap", key.namespace, request.config_map)
        try:
            content = base64.b64decode((kept or {})["binaryData"]["baseline"])
            baseline = codec.decode(content)
        except (KeyError, binascii.Error, MalformedBaseline) as error:
            return ProbeFailed("BaselineLost", f"ConfigMap {request.config_map} holds no baseline: {error}")
        return await run.measure(request.url, request.model, baseline)


def _reason(error: KvpilotError) -> str:
    return type(error).__name__
