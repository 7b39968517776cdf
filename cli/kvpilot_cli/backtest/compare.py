"""Simulate one load request by request under each policy. The result is one row of the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from kvpilot_cli.backtest.costs import Profile
from kvpilot_cli.backtest.hpa import Hpa
from kvpilot_cli.backtest.loads import Asked
from kvpilot_cli.backtest.pilot import Pilot, model_of, node_of
from kvpilot_cli.backtest.policies import HPA_TARGET, REQUESTS_TARGET, SCRAPE, Fixed, Piloted, Policy, by_hpa, by_wva
from kvpilot_cli.backtest.service import Objective, Service
from kvpilot_cli.backtest.wva import Wva
from kvpilot_operator.api.scaling import Objective as LatencyObjective
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Sample

START_SECONDS = 240.0
"""Seconds from the request for a replica to its first answer. Weights, compilation and CUDA graphs usually take 2 to 7
minutes.
"""
TIMEOUT = 120.0
WARM_UP = 3600.0
"""Seconds at the beginning that do not count in loads of more than four hours, because every policy begins with the
same replicas.
"""
POLICIES = ("pilot", "objectives", "bf16-hpa", "bf16-requests", "fp8-hpa", "fp8-requests", "wva", "fp8-wva", "max")


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one policy on one load. Times are in seconds. ITL percentiles are over tokens, others over requests."""

    load: str
    policy: str
    gpu_hours: float
    finished: int
    good: int
    lost: int
    ttft_p95: float
    ttft_p99: float
    itl_p95: float
    itl_p99: float
    latency_p95: float
    preemptions: int
    flips: int
    scalings: int
    journal: tuple[str, ...] = ()

    @property
    def good_percent(self) -> float:
        """Return the percentage of requests within the objective. Lost requests count as outside it."""
        return 100 * self.good / max(self.finished + self.lost, 1)

    @property
    def price(self) -> float:
        """Return the GPU-hours for a million good requests; infinity if there are none."""
        return self.gpu_hours * 1e6 / self.good if self.good else math.inf


def policy(
    name: str, spec: Spec, profile: Profile, objective: Objective, requests_target: float = REQUESTS_TARGET
) -> tuple[Policy, str, int]:
    """Return the policy with this name, its initial dtype, and its initial replicas."""
    replicas = spec.scaling.clamp(spec.replicas)
    lowest, highest = max(1, spec.scaling.min_replicas), spec.scaling.max_replicas
    baseline = spec.kv_cache.baseline
    if name == "objectives":
        spec = with_objectives(spec, objective)
    if name in ("pilot", "objectives"):
        pilot = Pilot(spec, node_of(profile), model_of(profile), baseline)
        return Piloted(pilot, replicas), baseline, replicas
    if name == "max":
        return Fixed(baseline), baseline, highest
    dtype = "fp8" if name.startswith("fp8") else baseline
    if name.endswith("wva"):
        wva = Wva(minimum=lowest, maximum=highest, sync_seconds=SCRAPE)
        return Fixed(dtype, by_wva(wva, dtype)), dtype, replicas
    target, figure = (requests_target, in_hand) if name.endswith("requests") else (HPA_TARGET, use)
    hpa = Hpa(np.array([replicas]), target=target, minimum=lowest, maximum=highest, sync_seconds=SCRAPE)
    return Fixed(dtype, by_hpa(hpa, dtype, figure)), dtype, replicas


def use(sample: Sample) -> float:
    """Return the mean KV cache usage over replicas, from 0 to 1."""
    return sample.usage


def in_hand(sample: Sample) -> float:
    """Return the running and waiting requests per replica."""
    return (sample.running + sample.waiting) / sample.pods


def with_objectives(spec: Spec, objective: Objective) -> Spec:
    """Return the spec with the limits of a good request as its latency objectives: TTFT at p99 and ITL at p95."""
    asked = (
        LatencyObjective("TTFT", 99, round(objective.ttft * 1000)),
        LatencyObjective("ITL", 95, round(objective.itl * 1000)),
    )
    return replace(spec, scaling=replace(spec.scaling, objectives=asked))


def run(
    load: Asked, name: str, spec: Spec, profile: Profile, objective: Objective,
    progress: Callable[[float], None] = lambda _share: None, requests_target: float = REQUESTS_TARGET,
) -> Row:  # fmt: skip
    """Simulate the load on a service under the policy `name`."""
    who, dtype, replicas = policy(name, spec, profile, objective, requests_target)
    service = Service(profile, load, dtype, replicas, objective=objective, start_seconds=START_SECONDS, timeout=TIMEOUT)
    warm = load.seconds <= 4 * WARM_UP
    while service.now < load.seconds:
        if not warm and service.now >= WARM_UP:
            service.forget()
            warm = True
        service.advance(service.now + SCRAPE)
        serving = who.pilot.dtype if isinstance(who, Piloted) else dtype
        who.judge(service, service.scrape(serving))
        progress(service.now / load.seconds)
    o = service.outcome
    ttft, itl, latency = o.ttft.take(), o.itl.take(), o.latency.take()

    def at(histogram: Histogram, q: float) -> float:
        return round(histogram.quantile(q), 4) if histogram.count else math.nan

    return Row(
        load.name, name, round(o.gpu_seconds / 3600, 2), o.finished, o.good, o.lost, at(ttft, 0.95), at(ttft, 0.99),
        at(itl, 0.95), at(itl, 0.99), at(latency, 0.95), o.preemptions, o.flips, o.scalings,
        tuple(who.journal) if isinstance(who, Piloted) else (),
    )  # fmt: skip
