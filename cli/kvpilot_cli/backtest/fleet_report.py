"""Figures of a fleet: sums over all services of a kind, and the time of the simulation."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpilot_cli.backtest.costs import BacktestError, Profile
from kvpilot_cli.backtest.fleet import FleetRow, run_fleet, services
from kvpilot_cli.backtest.service import Objective
from kvpilot_operator.api.spec import Spec

PROCESSES = 2


def part(
    count: int, first: int, days: float, seed: int, policy: str, spec: Spec, profile: Profile, objective: Objective
) -> list[FleetRow]:
    """Simulate one process' share of the fleet."""
    return run_fleet(services(count, days, seed, first), policy, spec, profile, objective, seed + first)


def show(
    count: int, days: float, seed: int, spec: Spec, profile: Profile, objective: Objective, policies: Sequence[str],
    out: Path | None,
) -> int:  # fmt: skip
    """Run the fleet under each policy in turn, print, and write JSON."""
    if count < 4:
        raise BacktestError(f"services: {count}; give at least 4, one of each kind of load")
    figures: list[dict[str, Any]] = []
    half = count // 2 // 4 * 4
    shares = [(half, 0), (count - half, half)] if half else [(count, 0)]
    for policy in policies:
        began = time.monotonic()
        jobs = [(n, first, days, seed, policy, spec, profile, objective) for n, first in shares]
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            rows = _joined(pool.starmap(part, jobs, chunksize=1))
        took = time.monotonic() - began
        for row in rows:
            told = figures_of(row)
            figures.append(told | {"days": days, "seconds_of_policy": round(took, 1)})
            print("  ".join(f"{k} {v}" for k, v in told.items()))
        print(f"{policy}: {count} services, {days:g} days in {took:.0f} s", flush=True)
        if out is not None:
            out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def figures_of(row: FleetRow) -> dict[str, Any]:
    """Return the figures of one kind of load under one policy."""
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
