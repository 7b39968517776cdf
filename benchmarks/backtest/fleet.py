"""Simulate a fleet of services over days or weeks, minute by minute, under each policy.

python -m benchmarks.backtest.fleet --services 1000 --days 3
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.backtest.crew import Crew
from benchmarks.backtest.hpa import Hpa
from benchmarks.backtest.interval import SUBSTEP, Fleet, Minute
from benchmarks.backtest.moments import Array, measure
from benchmarks.backtest.rivals import HPA_TARGET
from kvpilot_cli.backtest.buckets import FINE
from kvpilot_cli.backtest.compare import START_SECONDS, TIMEOUT
from kvpilot_cli.backtest.costs import Profile, load_profile
from kvpilot_cli.backtest.loads import NAMES, STEP, Load, synthetic
from kvpilot_cli.backtest.pilot import Pilot, load_spec, node_of
from kvpilot_cli.backtest.policies import PROBE_SECONDS
from kvpilot_cli.backtest.service import Objective
from kvpilot_cli.text_tables import render
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.histogram import Histogram

PROCESSES = 2
POLICIES = ("pilot", "bf16-hpa", "fp8-hpa", "max")
_START = round(START_SECONDS / STEP)


@dataclass(frozen=True, slots=True)
class FleetRow:
    """Result of one policy over all services with one kind of load. Times are in seconds."""

    load: str
    policy: str
    services: int
    gpu_hours: float
    finished: float
    good: float
    lost: float
    ttft: Histogram
    itl: Histogram
    preemptions: float
    flips: int
    scalings: int
    asked: int = 0
    """Number of decisions that pilots made."""


def services(count: int, days: float, seed: int, first: int = 0) -> list[Load]:
    """Return loads of `count` services from number `first` on: four kinds in turn, with random sizes and zones."""
    loads = []
    for i in range(first, first + count):
        chance = np.random.default_rng((seed, i))
        name = NAMES[i % len(NAMES)]
        loads.append(
            synthetic(name, days, int(chance.integers(1 << 31)), chance.uniform(0.2, 1.2), chance.uniform(0, 24))
        )
    return loads


class Pods:
    """Replicas of each service: the number of ready ones, and the number of starting ones by minutes until ready."""

    def __init__(self, replicas: NDArray[np.int64]) -> None:
        self.ready = replicas.copy()
        self._starting = np.zeros((_START, len(replicas)), dtype=np.int64)

    @property
    def asked(self) -> NDArray[np.int64]:
        """Return the number of replicas of each service, whether ready or starting."""
        return np.asarray(self.ready + self._starting.sum(axis=0))

    def pass_minute(self) -> None:
        """Advance by one minute. Replicas whose start time is over become ready."""
        self.ready = self.ready + self._starting[0]
        self._starting = np.roll(self._starting, -1, axis=0)
        self._starting[-1] = 0

    def scale(self, wanted: NDArray[np.int64]) -> None:
        """Start or stop replicas, so that each service has the `wanted` number. Stop the youngest first."""
        more = wanted - self.asked
        self._starting[-1] += np.maximum(more, 0)
        fewer = np.maximum(-more, 0)
        for row in self._starting[::-1]:
            given = np.minimum(row, fewer)
            row -= given
            fewer = fewer - given
        self.ready = self.ready - fewer


def run_fleet(
    loads: Sequence[Load], policy: str, spec: Spec, profile: Profile, objective: Objective, seed: int,
    *, hpa_target: float = HPA_TARGET,
) -> list[FleetRow]:  # fmt: skip
    """Simulate all loads under one policy. Return one row for each kind of load.

    Args:
        policy: one of `POLICIES`.
        spec: spec of every service.
        profile: costs of engines.
        objective: latencies of a good request.
        seed: seed of the arrivals.
        hpa_target: target of the HorizontalPodAutoscaler for mean KV use, 0 to 1.
    """
    size = len(loads)
    dtypes = tuple(dict.fromkeys((spec.kv_cache.baseline, "fp8", *spec.kv_cache.ladder)))
    costs = profile.of(spec.kv_cache.baseline)
    known = {load.shape: load for load in loads}
    measured = {shape: measure(load, costs) for shape, load in known.items()}
    moments = [measured[load.shape] for load in loads]
    fleet = Fleet(profile, moments, dtypes, TIMEOUT, seed, objective.ttft, objective.itl, FINE)
    begin = {"max": spec.scaling.max_replicas}.get(policy, spec.scaling.clamp(spec.replicas))
    pods = Pods(np.full(size, begin, dtype=np.int64))
    first = "fp8" if policy == "fp8-hpa" else spec.kv_cache.baseline
    dtype = np.full(size, dtypes.index(first), dtype=np.int64)
    pilots = [Pilot(spec, node_of(profile), profile.model, first) for _ in loads]
    crew = Crew(pilots, moments)
    hpa = Hpa(pods.ready, target=hpa_target, minimum=max(1, spec.scaling.min_replicas),
              maximum=spec.scaling.max_replicas, sync_seconds=STEP)  # fmt: skip
    rates = np.stack([load.rate for load in loads])
    gpu, flips, scalings = np.zeros(size), np.zeros(size, dtype=int), np.zeros(size, dtype=int)
    rolls: dict[int, tuple[int, str]] = {}
    busy = np.zeros(size, dtype=bool)
    for minute in range(rates.shape[1]):
        pods.pass_minute()
        seen = fleet.step(rates[:, minute], pods.ready.astype(float), dtype, round(STEP / SUBSTEP))
        gpu += (pods.asked + busy) * profile.gpus_per_replica
        if policy == "pilot":
            _pilot(crew, seen, pods, minute, rolls, busy, dtype, dtypes, flips, scalings)
        elif policy != "max":
            wanted = hpa.judge(seen.usage, pods.ready, pods.asked)
            scalings += wanted != pods.asked
            pods.scale(wanted)
    return _rows(loads, policy, fleet, gpu, flips, scalings, crew.asked)


def _pilot(
    crew: Crew, seen: Minute, pods: Pods, minute: int, rolls: dict[int, tuple[int, str]], busy: NDArray[np.bool_],
    dtype: NDArray[np.int64], dtypes: tuple[str, ...], flips: NDArray[np.int64], scalings: NDArray[np.int64],
) -> None:  # fmt: skip
    """Run every pilot for one minute, and carry out its decisions.

    A change of dtype takes time: while a service is `busy`, its canary costs one more replica.

    Args:
        rolls: for each service whose dtype changes, the minute when the change ends, and the new dtype.
        dtype: each service's index in `dtypes`.
        flips: number of dtype changes of each service.
        scalings: number of changes of the replicas of each service.
    """
    crew.take(seen, pods.ready.astype(float))
    for i in [i for i, (end, _) in rolls.items() if minute >= end]:
        _, new = rolls.pop(i)
        dtype[i] = dtypes.index(new)
        busy[i] = False
        flips[i] += 1
        crew.flipped(i, new)
    wanted = pods.asked
    for i, decision in crew.judge(pods.asked.astype(float), pods.ready.astype(float), busy):
        step = decision.chosen
        if step.dtype != crew.pilots[i].dtype:
            # The canary starts and is probed. Then the other replicas are replaced one by one.
            rolls[i] = (minute + _START + round(PROBE_SECONDS / STEP) + _START * (step.replicas - 1), step.dtype)
            busy[i] = True
        else:
            wanted[i] = step.replicas
            scalings[i] += 1
            crew.scaled(i)
    pods.scale(wanted)


def _rows(
    loads: Sequence[Load], policy: str, fleet: Fleet, gpu: Array, flips: NDArray[np.int64],
    scalings: NDArray[np.int64], asked: int,
) -> list[FleetRow]:  # fmt: skip
    rows = []
    for name in dict.fromkeys(load.name for load in loads):
        mine = np.array([load.name == name for load in loads])
        total = {k: float(v[mine].sum()) for k, v in fleet.total.items()}
        rows.append(
            FleetRow(
                name, policy, int(mine.sum()), float(gpu[mine].sum() * STEP / 3600), total["finished"], total["good"],
                total["lost"], Histogram(FINE, tuple(map(float, fleet.ttft[mine].sum(axis=0)))),
                Histogram(FINE, tuple(map(float, fleet.itl[mine].sum(axis=0)))), total["preemptions"],
                int(flips[mine].sum()), int(scalings[mine].sum()), asked,
            )
        )  # fmt: skip
    return rows


def part(
    count: int, first: int, days: float, seed: int, policy: str, spec: Spec, profile: Profile, objective: Objective
) -> list[FleetRow]:
    """Simulate `count` services from number `first` on, which are the share of one process."""
    return run_fleet(services(count, days, seed, first), policy, spec, profile, objective, seed + first)


def main() -> None:
    """Simulate the fleet under each policy, and print a table. With `--json`, write the figures after each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=100, metavar="N", help="at least 4, one of each kind of load")
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    a = parser.parse_args()
    if a.services < 4:
        parser.error(f"--services {a.services}: give at least 4, one of each kind of load")
    spec, profile, objective = load_spec(None), load_profile(), Objective()
    figures: list[dict[str, Any]] = []
    half = a.services // 2 // 4 * 4
    shares = [(half, 0), (a.services - half, half)] if half else [(a.services, 0)]
    for number, policy in enumerate(a.policies, start=1):
        # Report progress, because even a small fleet takes half a minute for each policy.
        print(f"{policy}: policy {number} of {len(a.policies)} runs", file=sys.stderr, flush=True)
        began = time.monotonic()
        jobs = [(n, first, a.days, a.seed, policy, spec, profile, objective) for n, first in shares]
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            rows = _joined(pool.starmap(part, jobs, chunksize=1))
        took = time.monotonic() - began
        figures += [figures_of(row) | {"days": a.days, "seconds_of_policy": round(took, 1)} for row in rows]
        if a.json is not None:
            a.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(render(list(figures[0]), [[str(value) for value in one.values()] for one in figures], left=(0, 1)))


def figures_of(row: FleetRow) -> dict[str, Any]:
    """Return the figures of a row as JSON values."""
    return {
        "load": row.load, "policy": row.policy, "services": row.services, "gpu_hours": round(row.gpu_hours),
        "good_percent": round(100 * row.good / max(row.finished + row.lost, 1e-9), 2), "lost": round(row.lost),
        "ttft_p95": round(row.ttft.quantile(0.95), 3), "itl_p95": round(row.itl.quantile(0.95), 4),
        "preemptions": round(row.preemptions), "flips": row.flips, "scalings": row.scalings,
        "gpu_hours_per_million_good": round(row.gpu_hours * 1e6 / max(row.good, 1e-9), 2), "asked": row.asked,
    }  # fmt: skip


def _joined(shares: Sequence[Sequence[FleetRow]]) -> list[FleetRow]:
    rows: dict[str, FleetRow] = {}
    for row in (r for share in shares for r in share):
        before = rows.get(row.load)
        if before is None:
            rows[row.load] = row
            continue
        added = {name: getattr(before, name) + getattr(row, name) for name in
                 ("services", "gpu_hours", "finished", "good", "lost", "ttft", "itl", "preemptions", "flips",
                  "scalings", "asked")}  # fmt: skip
        rows[row.load] = replace(before, **added)
    return list(rows.values())


if __name__ == "__main__":
    main()
