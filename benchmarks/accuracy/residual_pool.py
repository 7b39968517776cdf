"""Simulated engine whose block pool also holds residual pages.

    python -m benchmarks.accuracy.residual_pool --out FILE

A residual is the difference between a key or value at 8 bits and at its stored 4 bits. A residual page holds the
residuals of one block: base page and residual page together give the block 8 bits.

Every new block gets a residual page if one is free, and residual pages are freed before a request is preempted. The
newest two blocks of a running request (its *floor*) always keep their residuals. Which pages residuals may take depends
on the row:

- row `elastic`: only empty pages;
- row `elastic-60`: also pages of a cached prefix that was idle for 60 seconds;
- rows `elastic-seen` and `elastic-limit`: also pages of a cached prefix that was idle for twice the longest time after
  which a prefix was lately reused.

A step reads a share of its tokens at 8 bits, at the cost of an `int8` engine. This share equals the share of the
blocks, running or cached, that have residuals. In row `elastic-limit`, `residual_limit` bounds the share. Pages beyond
the bound stay, and may be read again later. The other rows are engines of `kvpilot backtest`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.accuracy.residual_limit import Limit
from kvpilot_cli.backtest.batch import Blocks, Limits
from kvpilot_cli.backtest.costs import Profile, load_profile
from kvpilot_cli.backtest.engine import Engine
from kvpilot_cli.backtest.loads import cut, synthetic
from kvpilot_cli.backtest.service import Objective, Service

ELASTIC = {"elastic": inf, "elastic-60": 60.0, "elastic-seen": None, "elastic-limit": None}
"""Seconds after which a cached prefix counts as idle and may be evicted for residuals, by row; None to learn it."""

FLOOR = 2
"""Number of newest blocks of a running request that keep their residuals."""

WARM_UP, END, HOUR = 600.0, 2400.0, 13 * 3600


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation: one kind of engine (`row`, a row of the result table) under one load."""

    load: str
    """Kind of load, such as `agents`."""
    size: float
    """Factor by which the load's arrival rate is multiplied."""
    row: str
    itl: float = 0.06
    """ITL objective in seconds."""
    seed: int = 0
    firm: int = FLOOR
    """Number of a running request's newest blocks whose residuals may evict any cached prefix.

    Residuals of all other blocks get empty pages, and pages of prefixes that have been idle for the time that `ELASTIC`
    gives for the case's row.
    """


class Pool(Blocks):
    """Pool of the engine's pages. `_empty` also counts pages with residuals, because these can be freed."""

    def __init__(self, engine: Engine, idle: float | None, firm: int) -> None:
        super().__init__(engine.blocks.total)
        self._engine, self._idle, self._learns = engine, WARM_UP if idle is None else idle, idle is None
        self._firm = firm
        self._since: dict[int, float] = {}
        self.share = 0.0
        """Share of the blocks, running or cached, that have residuals."""

    @property
    def available(self) -> int:
        """Number of pages for base blocks: all pages except those for the `Case.firm` residuals of running requests."""
        return max(0, super().available - self._firm * len(self._engine.running))

    @property
    def floor(self) -> float:
        """Share of the floor (the newest blocks of running requests) whose residuals have pages."""
        return min(1.0, self._empty / max(FLOOR * len(self._engine.running), 1))

    def take(self, count: int) -> None:
        """Take pages for `count` base blocks. Then let residuals evict idle prefixes, as far as the row allows."""
        newest = min(self._firm * len(self._engine.running), super().available - count)
        super().take(count + newest)
        self._empty += newest
        while self._kept and self._wanted(count) > self._empty:
            session = next(iter(self._kept))
            if self._engine.now - self._since[session] < self._idle:
                break
            self.reuse(session, 0)
        self.share = min(self._wanted(count), self._empty) / max(self.total - self._empty, 1)

    def _wanted(self, count: int) -> float:
        """Return how many residual pages are wanted: the present ones, and one for each of `count` new blocks."""
        return self.share * (self.total - self._empty - count) + count

    def reuse(self, session: int, count: int) -> None:
        """Reuse a prefix. Lower the learnt idle time by 0.1%, but not below twice the idle time of this prefix."""
        if count and self._learns:
            self._idle = max(0.999 * self._idle, 2 * (self._engine.now - self._since[session]))
        super().reuse(session, count)

    def give(self, count: int, session: int, keep: int) -> None:
        """Free base blocks, and remember when the session's prefix became idle."""
        super().give(count, session, keep)
        self._since[session] = self._engine.now


class Elastic(Engine):
    """Engine with a `Pool`. It counts the tokens that its steps read (`read`), and those read at 8 bits (`fine`)."""

    def __init__(
        self, profile: Profile, limits: Limits, idle: float | None, limit: Limit | None = None, firm: int = FLOOR
    ) -> None:
        super().__init__(profile.of("k4v4"), limits, "k4v4")
        self.blocks: Pool = Pool(self, idle, firm)
        self._limit = limit
        self._range = [profile.of(dtype).per_kv_token for dtype in ("k4v4", "int8")]
        self.forget()

    def forget(self) -> None:
        """Reset all sums over steps, such as the number of tokens read."""
        self.read = self.fine = 0.0
        self.counted = self.floors = 0.0

    @property
    def share(self) -> float:
        """Share of the tokens that the next step reads at 8 bits. Floors are always read at 8 bits."""
        if self._limit is None:
            return self.blocks.share
        floor = FLOOR * self.costs.block_size * len(self.decoding) / max(self.decoding.tokens, 1)
        return min(self.blocks.share, max(self._limit.share, floor))

    def alike(self, until: float) -> int:
        """Return how many equal steps follow until the time `until`, and count the tokens that they read."""
        share, (low, high) = self.share, self._range
        self.costs = replace(self.costs, per_kv_token=low + share * (high - low))
        steps = super().alike(until)
        self.read += max(steps, 1) * self.decoding.tokens
        self.fine += share * max(steps, 1) * self.decoding.tokens
        self.counted += max(steps, 1)
        self.floors += self.blocks.floor * max(steps, 1)
        return steps

    def _step(self) -> None:
        before, decoding = self.now, len(self.decoding)
        super()._step()
        if self._limit is not None and decoding:
            self._limit = self._limit.after(self.now - before)

    def _steps(self, count: int) -> None:
        before = self.now
        super()._steps(count)
        if self._limit is not None:
            self._limit = self._limit.after((self.now - before) / count, count)


def simulate(profile: Profile, case: Case) -> dict[str, Any]:
    """Simulate one engine under the load of the day's busiest hour.

    Return the case with its figures: good requests, all requests, latencies in seconds, preemptions, and the share of
    prompt tokens that hit the prefix cache. An elastic row also has the share of tokens that were read at 8 bits.
    """
    load, dtype = cut(synthetic(case.load, 1.0, case.seed, case.size), HOUR, END), case.row
    dtype = "k4v4" if dtype in ELASTIC else dtype
    service = Service(profile, load, dtype, 1, objective=Objective(itl=case.itl), start_seconds=60, timeout=120)
    if case.row in ELASTIC:
        limit = Limit(case.itl) if case.row == "elastic-limit" else None
        service.replicas[0].engine = Elastic(profile, service.limits, ELASTIC[case.row], limit, case.firm)
    engine = service.replicas[0].engine
    service.advance(WARM_UP)
    service.forget()
    engine.scrape()
    if isinstance(engine, Elastic):
        engine.forget()
    service.advance(END)
    outcome, flows = service.outcome, engine.scrape().flows
    found = {
        "good": outcome.good, "asked": outcome.finished + outcome.lost,
        "ttft_p95": round(outcome.ttft.take().quantile(0.95), 3),
        "itl_p95": round(outcome.itl.take().quantile(0.95), 4),
        "preemptions": outcome.preemptions, "hits": round(flows.prefix_hits / max(flows.prefix_queries, 1), 3),
    }  # fmt: skip
    if isinstance(engine, Elastic):
        found |= {
            "at_8_bits": round(engine.fine / max(engine.read, 1), 3),
            "floor_kept": round(engine.floors / max(engine.counted, 1), 3),
        }
    return asdict(case) | found


def cases() -> Iterator[Case]:
    """Yield the cases of the page's table, and then variants of it.

    A variant has a tighter objective, another seed, or fewer residuals that may evict cached prefixes (`Case.firm`).
    """
    every = list(product(("agents", "chat"), (0.1, 0.2, 0.4, 0.6, 0.8)))
    rivals = ("k4v4", "elastic-limit")
    for (load, size), row in product(every, ("auto", "int8", "k4v4", *ELASTIC)):
        yield Case(load, size, row)
    for (load, size), row in product(every, rivals):
        yield Case(load, size, row, itl=0.05)
    for seed, (load, size), row in product(range(1, 6), every, rivals):
        yield Case(load, size, row, seed=seed)
    for (load, size), firm in product(every, (1, 0)):
        yield Case(load, size, "elastic-limit", firm=firm)


def main() -> None:
    """Write a row for each case. Also write the KV capacity at full pressure, relative to that of a bf16 cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    asked, profile, rows = parser.parse_args(), load_profile(), []
    most = profile.of("k4v4").kv_tokens / profile.of("auto").kv_tokens
    full = {
        f"{length} tokens, floor {floor}": round(most * length / (length + 64 * floor), 3)
        for length, floor in product((1024, 2048, 4096, 16384, 65536), (0, 1, 2))
    }
    for case in cases():
        rows.append(simulate(profile, case))
        print(rows[-1], flush=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    asked.out.write_text(f'{{\n "full_pressure_over_bf16": {json.dumps(full)},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
