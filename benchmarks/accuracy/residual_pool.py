"""Simulated engine whose block pool also holds residual pages.

    python -m benchmarks.accuracy.residual_pool --out FILE

Every new block gets a residual page if one is free, and residual pages are freed before a request is preempted. The
newest blocks of running requests always keep theirs. A cached prefix gives way to residuals after `idle` seconds: never
in `elastic`, as issues propose, at once in `elastic-0`. A step reads a share of its tokens at 8 bits, which costs as
much as `int8`. This share is that of all blocks, running or cached. Other rows are `kvpilot backtest`'s engines.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from kvpilot_cli.backtest.batch import Blocks, Limits
from kvpilot_cli.backtest.costs import Profile, load_profile
from kvpilot_cli.backtest.engine import Engine
from kvpilot_cli.backtest.loads import cut, synthetic
from kvpilot_cli.backtest.service import Objective, Service

ELASTIC = {"elastic": inf, "elastic-60": 60.0, "elastic-0": 0.0}
"""Seconds after which an idle prefix gives way to residuals, by row."""

WARM_UP, HOUR = 600.0, 13 * 3600


class Pool(Blocks):
    """Pool of the engine's pages, of which `fine` hold residuals. `_empty` counts these, since they can be freed."""

    def __init__(self, engine: Engine, idle: float) -> None:
        super().__init__(engine.blocks.total)
        self._engine, self._idle = engine, idle
        self._since: dict[int, float] = {}
        self.fine = 0.0

    @property
    def available(self) -> int:
        """Return the pages for base blocks: all but one residual page for each running request."""
        return max(0, super().available - len(self._engine.running))

    @property
    def share(self) -> float:
        """Return the share of blocks that have residuals."""
        return min(1.0, self.fine / max(self.total - self._empty, 1))

    def take(self, count: int) -> None:
        """Take base blocks, and as many residuals as pages are left."""
        newest = min(len(self._engine.running), super().available - count)
        super().take(count + newest)
        self._empty += newest
        while self._kept and self.fine + count > self._empty:
            session = next(iter(self._kept))
            if self._engine.now - self._since[session] < self._idle:
                break
            self.reuse(session, 0)
        self.fine = min(self.fine + count, self._empty)

    def give(self, count: int, session: int, keep: int) -> None:
        """Free base blocks with their share of the residuals."""
        held = self.total - self._empty
        super().give(count, session, keep)
        self._since[session] = self._engine.now
        self.fine *= (self.total - self._empty) / max(held, 1)

    def reuse(self, session: int, count: int) -> None:
        """Take a prefix. Its other blocks become empty, with their share of the residuals."""
        held = self.total - self._empty
        super().reuse(session, count)
        self.fine *= (self.total - self._empty) / max(held, 1)


class Elastic(Engine):
    """Engine with a `Pool`. It sums up the tokens that its steps read, and those of them that they read at 8 bits."""

    def __init__(self, profile: Profile, limits: Limits, idle: float) -> None:
        super().__init__(profile.of("k4v4"), limits, "k4v4")
        self.pool = self.blocks = Pool(self, idle)
        self._range = [profile.of(dtype).per_kv_token for dtype in ("k4v4", "int8")]
        self.read = self.fine = 0.0

    def _step(self) -> None:
        self._steps(0)

    def _steps(self, count: int) -> None:
        share, tokens = self.pool.share, max(count, 1) * self.decoding.tokens
        low, high = self._range
        self.costs = replace(self.costs, per_kv_token=low + share * (high - low))
        self.read += tokens
        self.fine += share * tokens
        if count:
            super()._steps(count)
        else:
            super()._step()


def simulate(profile: Profile, name: str, size: float, row: str, seconds: float) -> dict[str, Any]:
    """Return the figures of one engine under a load of the day's busiest hour."""
    load, dtype = cut(synthetic(name, 1.0, 0, size), HOUR, seconds), "k4v4" if row in ELASTIC else row
    service = Service(profile, load, dtype, 1, objective=Objective(), start_seconds=60, timeout=120)
    if row in ELASTIC:
        service.replicas[0].engine = Elastic(profile, service.limits, ELASTIC[row])
    engine = service.replicas[0].engine
    service.advance(WARM_UP)
    service.forget()
    engine.scrape()
    service.advance(seconds)
    outcome, flows = service.outcome, engine.scrape().flows
    ttft, itl, elastic = outcome.ttft.take(), outcome.itl.take(), isinstance(engine, Elastic)
    return {
        "load": name, "size": size, "row": row, "good": outcome.good, "asked": outcome.finished + outcome.lost,
        "ttft_p95": round(ttft.quantile(0.95), 3), "itl_p95": round(itl.quantile(0.95), 4),
        "preemptions": outcome.preemptions, "hits": round(flows.prefix_hits / max(flows.prefix_queries, 1), 3),
        "at_8_bits": round(engine.fine / max(engine.read, 1), 3) if elastic else None,
    }  # fmt: skip


def main() -> None:
    """Write a row for each load, size and engine, and the tokens at full pressure over bf16 by length and floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loads", nargs="+", default=["agents", "chat"])
    parser.add_argument("--sizes", nargs="+", type=float, default=[0.1, 0.2, 0.4, 0.8])
    parser.add_argument("--seconds", type=float, default=2400.0)
    asked, profile, rows = parser.parse_args(), load_profile(), []
    pages, bf16 = profile.of("k4v4").kv_tokens // 64, profile.of("auto").kv_tokens
    full = {
        f"{length} tokens, floor {floor}": round(pages // (length // 64 + floor) * length / bf16, 3)
        for length, floor in product((1024, 2048, 4096, 16384, 65536), (0, 1, 2))
    }
    for load, size, row in product(asked.loads, asked.sizes, ("auto", "int8", "k4v4", *ELASTIC)):
        rows.append(simulate(profile, load, size, row, asked.seconds))
        print(rows[-1], flush=True)
        asked.out.write_text(json.dumps({"full_pressure_over_bf16": full, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
