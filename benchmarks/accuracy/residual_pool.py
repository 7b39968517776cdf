"""Simulated engine whose block pool also holds residual pages.

    python -m benchmarks.accuracy.residual_pool --out FILE

Every new block gets a residual page if one is free, and residual pages are freed before a request is preempted. The
newest two blocks of a running request always keep their residuals. Residuals take these pages:

- row `elastic`: only empty pages;
- row `elastic-60`: also pages of a cached prefix that was idle for 60 seconds;
- row `elastic-seen`: also pages of a cached prefix that was idle for twice the longest time after which a prefix was
  lately reused.

A step reads a share of its tokens at 8 bits, at the cost of `int8`. This share is the share of all blocks, running or
cached, that have residuals. The other rows are engines of `kvpilot backtest`.
"""

import argparse
import json
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvpilot_cli.backtest.batch import Blocks, Limits
from kvpilot_cli.backtest.costs import Profile, load_profile
from kvpilot_cli.backtest.engine import Engine
from kvpilot_cli.backtest.loads import cut, synthetic
from kvpilot_cli.backtest.service import Objective, Service

ELASTIC = {"elastic": inf, "elastic-60": 60.0, "elastic-seen": None}
"""Seconds after which an idle prefix gives way to residuals, by row; None to learn this time, starting at WARM_UP."""

FLOOR = 2
"""Number of newest blocks of a running request that keep their residuals."""

WARM_UP, SECONDS, HOUR = 600.0, 2400.0, 13 * 3600


class Pool(Blocks):
    """Pool of the engine's pages. `_empty` also counts pages with residuals, because they can be freed."""

    def __init__(self, engine: Engine, idle: float | None) -> None:
        super().__init__(engine.blocks.total)
        self._engine, self._idle, self._learns = engine, WARM_UP if idle is None else idle, idle is None
        self._since: dict[int, float] = {}
        self.share = 0.0
        """Share of the blocks, running or cached, that have residuals."""

    @property
    def available(self) -> int:
        """Number of pages for base blocks: all pages except those of the running requests' newest residuals."""
        return max(0, super().available - FLOOR * len(self._engine.running))

    def take(self, count: int) -> None:
        """Take base blocks, and residuals in the pages that are left."""
        newest = min(FLOOR * len(self._engine.running), super().available - count)
        super().take(count + newest)
        self._empty += newest
        while self._kept and self._wanted(count) > self._empty:
            session = next(iter(self._kept))
            if self._engine.now - self._since[session] < self._idle:
                break
            self.reuse(session, 0)
        self.share = min(self._wanted(count), self._empty) / max(self.total - self._empty, 1)

    def _wanted(self, count: int) -> float:
        """Return the number of wanted residuals: those that exist, and one for each of `count` new blocks."""
        return self.share * (self.total - self._empty - count) + count

    def reuse(self, session: int, count: int) -> None:
        """Take a prefix, and learn from its idle time. The learnt time shrinks by 0.1% with each reuse."""
        if count and self._learns:
            self._idle = max(0.999 * self._idle, 2 * (self._engine.now - self._since[session]))
        super().reuse(session, count)

    def give(self, count: int, session: int, keep: int) -> None:
        """Free base blocks, and remember when the session's prefix became idle."""
        super().give(count, session, keep)
        self._since[session] = self._engine.now


class Elastic(Engine):
    """Engine with a `Pool`. It counts the tokens that its steps read (`read`), and those read at 8 bits (`fine`)."""

    def __init__(self, profile: Profile, limits: Limits, idle: float | None) -> None:
        super().__init__(profile.of("k4v4"), limits, "k4v4")
        self.blocks: Pool = Pool(self, idle)
        self._range = [profile.of(dtype).per_kv_token for dtype in ("k4v4", "int8")]
        self.read = self.fine = 0.0

    def alike(self, until: float) -> int:
        """Return the number of equal steps that come next, and count the tokens that they read."""
        share, (low, high) = self.blocks.share, self._range
        self.costs = replace(self.costs, per_kv_token=low + share * (high - low))
        steps = super().alike(until)
        self.read += max(steps, 1) * self.decoding.tokens
        self.fine += share * max(steps, 1) * self.decoding.tokens
        return steps


def simulate(profile: Profile, name: str, size: float, row: str) -> dict[str, Any]:
    """Return the figures of one engine under the load of the day's busiest hour."""
    load, dtype = cut(synthetic(name, 1.0, 0, size), HOUR, SECONDS), "k4v4" if row in ELASTIC else row
    service = Service(profile, load, dtype, 1, objective=Objective(), start_seconds=60, timeout=120)
    if row in ELASTIC:
        service.replicas[0].engine = Elastic(profile, service.limits, ELASTIC[row])
    engine = service.replicas[0].engine
    service.advance(WARM_UP)
    service.forget()
    engine.scrape()
    if isinstance(engine, Elastic):
        engine.read = engine.fine = 0.0
    service.advance(SECONDS)
    outcome, flows = service.outcome, engine.scrape().flows
    return {
        "load": name, "size": size, "row": row, "good": outcome.good, "asked": outcome.finished + outcome.lost,
        "ttft_p95": round(outcome.ttft.take().quantile(0.95), 3),
        "itl_p95": round(outcome.itl.take().quantile(0.95), 4),
        "preemptions": outcome.preemptions, "hits": round(flows.prefix_hits / max(flows.prefix_queries, 1), 3),
        "at_8_bits": round(engine.fine / max(engine.read, 1), 3) if isinstance(engine, Elastic) else None,
    }  # fmt: skip


def main() -> None:
    """Write a row for each load, size and engine. Also write the tokens at full pressure relative to bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    asked, profile, rows = parser.parse_args(), load_profile(), []
    most = profile.of("k4v4").kv_tokens / profile.of("auto").kv_tokens
    full = {
        f"{length} tokens, floor {floor}": round(most * length / (length + 64 * floor), 3)
        for length, floor in product((1024, 2048, 4096, 16384, 65536), (0, 1, 2))
    }
    for load, size, row in product(("agents", "chat"), (0.1, 0.2, 0.4, 0.6, 0.8), ("auto", "int8", "k4v4", *ELASTIC)):
        rows.append(simulate(profile, load, size, row))
        print(rows[-1], flush=True)
        asked.out.write_text(json.dumps({"full_pressure_over_bf16": full, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
