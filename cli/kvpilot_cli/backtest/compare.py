"""Simulate loads request by request under each policy. Each result is one row of the report."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from msgspec.structs import replace

from kvpilot_cli.backtest.costs import Profile
from kvpilot_cli.backtest.loads import Asked
from kvpilot_cli.backtest.pilot import Pilot, node_of
from kvpilot_cli.backtest.policies import SCRAPE, Fixed, Piloted, Policy
from kvpilot_cli.backtest.service import Objective, Service
from kvpilot_operator.api.scaling import Objective as LatencyObjective
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.histogram import Histogram

START_SECONDS = 240.0
"""Seconds from the request for a replica to its first answer. Weights, compilation and CUDA graphs usually take 2 to 7
minutes.
"""
TIMEOUT = 120.0
PROCESSES = 2
WARM_UP = 3600.0
"""Seconds at the beginning that do not count in loads of more than four hours, because every policy begins with the
same replicas.
"""


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


Start = tuple[Policy, str, int]
"""(policy, initial dtype, initial number of replicas) of a simulated run."""
Starter = Callable[[Spec, Profile, Objective], Start]


def by_pilot(spec: Spec, profile: Profile, _objective: Objective) -> Start:
    """Start with the spec's replicas and the baseline dtype, controlled by the pilot."""
    replicas, baseline = spec.scaling.clamp(spec.replicas), spec.kv_cache.baseline
    return Piloted(Pilot(spec, node_of(profile), profile.model, baseline), replicas), baseline, replicas


def by_objectives(spec: Spec, profile: Profile, objective: Objective) -> Start:
    """Start as `by_pilot` does, and give the pilot the limits of a good request as its latency objectives."""
    return by_pilot(with_objectives(spec, objective), profile, objective)


def by_most_replicas(spec: Spec, _profile: Profile, _objective: Objective) -> Start:
    """Start with maxReplicas and the model's own dtype, and keep both."""
    return Fixed(), spec.kv_cache.baseline, spec.scaling.max_replicas


POLICIES: Mapping[str, Starter] = {"pilot": by_pilot, "objectives": by_objectives, "max": by_most_replicas}


def with_objectives(spec: Spec, objective: Objective) -> Spec:
    """Return the spec with the limits of `objective` as its latency objectives: TTFT at p99 and ITL at p95."""
    asked = (
        LatencyObjective("TTFT", 99, round(objective.ttft * 1000)),
        LatencyObjective("ITL", 95, round(objective.itl * 1000)),
    )
    return replace(spec, scaling=replace(spec.scaling, objectives=asked))


Job = tuple[Asked, str, Starter, Spec, Profile, Objective]
"""Arguments of `run`."""


def run_all(jobs: Sequence[Job]) -> list[Row]:
    """Return a row for each job, in their order. Run PROCESSES jobs at a time, and report on stderr how many ended."""
    if len(jobs) == 1:
        return [run(*jobs[0])]
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        runs = [pool.submit(run, *job) for job in jobs]
        for ended, _ in enumerate(as_completed(runs), 1):
            print(f"backtest: {ended} of {len(jobs)} runs have ended", file=sys.stderr, flush=True)
        return [one.result() for one in runs]


def run(load: Asked, name: str, start: Starter, spec: Spec, profile: Profile, objective: Objective) -> Row:
    """Simulate the load on a service under the policy that `start` returns. `name` is the policy's name."""
    who, dtype, replicas = start(spec, profile, objective)
    service = Service(profile, load, dtype, replicas, objective=objective, start_seconds=START_SECONDS, timeout=TIMEOUT)
    warm = load.seconds <= 4 * WARM_UP
    while service.now < load.seconds:
        if not warm and service.now >= WARM_UP:
            service.forget()
            warm = True
        service.advance(service.now + SCRAPE)
        serving = who.pilot.dtype if isinstance(who, Piloted) else dtype
        who.judge(service, service.scrape(serving))
    o = service.outcome
    ttft, itl, latency = o.ttft.take(), o.itl.take(), o.latency.take()

    def at(histogram: Histogram, q: float) -> float:
        return round(histogram.quantile(q), 4) if histogram.count else math.nan

    return Row(
        load.name, name, round(o.gpu_seconds / 3600, 2), o.finished, o.good, o.lost, at(ttft, 0.95), at(ttft, 0.99),
        at(itl, 0.95), at(itl, 0.99), at(latency, 0.95), o.preemptions, o.flips, o.scalings,
        tuple(who.journal) if isinstance(who, Piloted) else (),
    )  # fmt: skip
