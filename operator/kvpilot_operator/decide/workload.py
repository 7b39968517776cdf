"""Is the service memory-bound? Answered from a window of the engine's own metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Literal

from kvpilot_operator.api.spec import Pressure
from kvpilot_operator.state.snapshot import Sample

Kind = Literal["NoMetrics", "Warming", "MemoryBound", "Relaxed"]

# A window counts as full when its samples reach back this far into it: scrapes do not fall on its very edge.
_SPAN = 0.8
# One scrape in ten may miss the threshold (a long request that ends frees its blocks at once).
_SHARE = 0.9
# A service is without metrics when the newest sample is older than this many seconds.
STALE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Workload:
    """What the window says. Use is in percent of KV blocks; demand in tokens, over all replicas."""

    kind: Kind
    usage_percent: int = 0
    waiting: float = 0.0
    preemptions_per_minute: float = 0.0
    capacity_tokens: int = 0
    demand_tokens: int = 0
    """Tokens that running and waiting requests would hold if all of them ran at once."""
    message: str = ""


def classify(samples: Sequence[Sample], pressure: Pressure, now: datetime, *, was_bound: bool = False) -> Workload:
    """Judge the samples of the last `sustainedSeconds`.

    Memory-bound means both: nearly every sample at or above `highPercent`, and requests that wait (on average at least
    `waitingPerReplica` a pod) or are preempted for it (at least `preemptionsPerMinute`). A full cache that nobody waits
    for is a cache put to good use. A service that `was_bound` stays so until its average use falls below `lowPercent`
    or nobody waits any more: one quiet moment does not end a pressure.
    """
    fresh = [s for s in samples if s.pods > 0 and s.time <= now]
    if not fresh or (now - fresh[-1].time).total_seconds() > STALE_SECONDS:
        return Workload("NoMetrics", message="no engine has reported metrics in the last minute")
    start = now - timedelta(seconds=pressure.sustained_seconds)
    window = [s for s in fresh if s.time >= start]
    if len(window) < 2:
        window = fresh[-2:]
    newest = window[-1]
    span = (newest.time - window[0].time).total_seconds()
    waiting = sum(s.waiting for s in window) / len(window)
    per_minute = _increase(window) * 60 / max(span, 1.0)
    usage = sum(s.usage for s in window) / len(window)
    facts = Workload(
        "Relaxed",
        usage_percent=round(usage * 100),
        waiting=round(waiting, 2),
        preemptions_per_minute=round(per_minute, 2),
        capacity_tokens=newest.capacity_tokens,
        demand_tokens=_demand(window),
    )
    high = [s for s in window if s.usage * 100 >= pressure.high_percent]
    full = len(high) >= _SHARE * len(window)
    starved = waiting >= pressure.waiting_per_replica * newest.pods or per_minute >= pressure.preemptions_per_minute
    evidence = (
        f"KV use {facts.usage_percent}% of {facts.capacity_tokens} tokens (limit {pressure.high_percent}%), "
        f"{waiting:.1f} waiting, {per_minute:.1f} preemptions a minute, over {span:.0f} s"
    )
    still = was_bound and starved and facts.usage_percent >= pressure.low_percent
    if not full and not still:
        return _as(facts, "Relaxed", f"{evidence}: memory does not bind")
    if not starved:
        return _as(facts, "Relaxed", f"{evidence}: the cache is full, but no request waits for it")
    if span < _SPAN * pressure.sustained_seconds:
        return _as(facts, "Warming", f"{evidence}: not sustained for {pressure.sustained_seconds} s yet")
    return _as(facts, "MemoryBound", f"{evidence}: memory {'still ' if still and not full else ''}binds")


def _as(facts: Workload, kind: Kind, message: str) -> Workload:
    return Workload(
        kind,
        facts.usage_percent,
        facts.waiting,
        facts.preemptions_per_minute,
        facts.capacity_tokens,
        facts.demand_tokens,
        message,
    )


def _increase(window: Sequence[Sample]) -> float:
    """Preemptions in the window; a counter that falls was reset by a restart and counts from zero, as in PromQL."""
    total = 0.0
    for before, after in pairwise(window):
        step = after.preemptions - before.preemptions
        # A pod that joins brings its history along: only the same set of pods can be compared.
        if before.pods == after.pods:
            total += step if step >= 0 else after.preemptions
    return total


def _demand(window: Sequence[Sample]) -> int:
    """Tokens held by running requests, and as many again for each waiting one as a running one holds on average."""
    held = sum(s.usage * s.capacity_tokens for s in window)
    running = sum(s.running for s in window)
    waiting = sum(s.waiting for s in window)
    return round((held + (waiting * held / running if running else 0.0)) / len(window))
