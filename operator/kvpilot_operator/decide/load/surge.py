"""Surges: a load that grows faster than the replicas can follow. As in burn-rate alerts, a fifth of the window is
enough to find one.

Queues or late tokens must persist for the whole window before they cause a step. If the last fifth of the window alone
has spent the budget of the whole window, waiting is useless: a replica takes minutes to start, and users leave
meanwhile. A surge only adds replicas, because a canary takes far longer. Without objectives no latency counts as late,
so there are no surges. Then a smaller dtype, which needs no additional GPU, may end a growing queue.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter

from kvpilot_operator.api.kv_cache import Pressure
from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.decide.load.objectives import LEAST, latencies
from kvpilot_operator.state.samples import Flows, Sample

DRAIN_SECONDS = 120.0
"""Time in seconds in which a queue must drain, about as long as clients are willing to wait."""
# The short window is one fifth of the long one. In a surge it spends the long window's budget five times too fast.
_PART = 5
# Shortest short window. A long window below five times this length is short enough itself.
_LEAST_SECONDS = 30.0
_LEAST_SCRAPES = 3
_SIGMAS = 3.0
_TIME, _DECODE, _GENERATED = attrgetter("time"), attrgetter("decode_seconds"), attrgetter("generation_tokens")


@dataclass(frozen=True, slots=True)
class Surge:
    """The requests of all replicas together in the short window."""

    message: str
    arrivals: float
    """Forecast of requests per second one whole window from now, about when a new replica answers."""
    waiting: float
    """Waiting requests at its end."""


def find(samples: Sequence[Sample], pressure: Pressure, objectives: Sequence[Objective]) -> Surge | None:
    """Find a surge in `samples` (oldest first, the newest plausible) since the newest replica answered.

    Return None without objectives.
    """
    seconds = pressure.sustained_seconds / _PART
    if seconds < _LEAST_SECONDS or not samples or not objectives:
        return None
    last = samples[-1]
    at = bisect_right(samples, last.time - timedelta(seconds=seconds), key=_TIME)
    window = samples[at:]
    whole = all(s.pods == last.pods and not s.implausible and not s.unanswered for s in window)
    passed = (last.time - window[0].time).total_seconds()
    if len(window) < _LEAST_SCRAPES or not whole or passed < seconds / 2:
        return None
    now, before = _Rates.of(window), _Rates.of(samples[:at])
    if now is None or not any(s.flows.prompt_tokens + s.flows.generation_tokens for s in window):
        return None
    if _drains(window):
        return None
    why = _late([s.flows for s in window], objectives, seconds) or _left_behind(window, now, pressure, objectives)
    if not why:
        return None
    ahead, risen = pressure.sustained_seconds, 0.0
    if before is not None:
        risen = now.arrivals - before.arrivals
        # Count only a rise beyond chance: three standard deviations of independent arrivals.
        risen = risen if risen > _SIGMAS * math.sqrt(now.arrivals / passed) else 0.0
    return Surge(why, now.arrivals + risen * ahead / ((ahead + seconds) / 2), last.waiting)


@dataclass(frozen=True, slots=True)
class _Rates:
    """Rates of all replicas: requests that came and finished a second, and the decoding time of one."""

    arrivals: float
    finished: float
    decode: float
    generated: float

    @classmethod
    def of(cls, window: Sequence[Sample]) -> _Rates | None:
        """Compute the rates of a window, or return None if it has too few samples."""
        pod_seconds = sum(s.flows.seconds for s in window)
        passed = (window[-1].time - window[0].time).total_seconds() if window else 0.0
        if pod_seconds <= 0 or passed <= 0:
            return None
        count, pods = sum(s.flows.finished for s in window), window[-1].pods
        finished = count / pod_seconds * pods
        grown = (_in_hand(window[-1]) - _in_hand(window[0])) / passed
        each = (sum(f(s.flows) for s in window) / count if count else 0.0 for f in (_DECODE, _GENERATED))
        return cls(max(0.0, finished + grown), finished, *each)


def _in_hand(s: Sample) -> float:
    return s.running + s.waiting


def _drains(window: Sequence[Sample]) -> bool:
    """Return True if unfinished requests decrease all the time. Late requests are then leftovers of an earlier
    queue."""
    first, middle, last = (_in_hand(window[i]) for i in (0, len(window) // 2, -1))
    return first > middle > last


def _late(flows: Sequence[Flows], objectives: Sequence[Objective], seconds: float) -> str:
    """Name the objective that spent the whole window's budget of late samples in each half of this part."""
    half = len(flows) // 2
    for one in objectives:
        share = _PART * (1 - one.percentile / 100)
        if share >= 1:
            continue
        parts = [latencies(part, one) for part in (flows[:half], flows[half:])]
        enough = min(h.count for h in parts) >= max(LEAST, 100 / (100 - one.percentile))
        if enough and min(h.quantile(1 - share) for h in parts) > one.milliseconds / 1000:
            return (
                f"{one}: in the last {seconds:.0f} s more than {share * 100:.0f}% took longer than {one.milliseconds} "
                f"ms, {_PART} times what may"
            )
    return ""


def _left_behind(window: Sequence[Sample], rates: _Rates, pressure: Pressure, objectives: Sequence[Objective]) -> str:
    """Report that a request at the window's end would take too long, because running requests grow (Little's law)."""
    first, middle, last = (_in_hand(window[i]) for i in (0, len(window) // 2, -1))
    passed = (window[-1].time - window[0].time).total_seconds()
    chance = _SIGMAS * math.sqrt(rates.arrivals * passed)
    if not first < middle < last or last - first <= max(chance, pressure.waiting_per_replica * window[-1].pods):
        return ""
    growth = (last - first) / passed
    ahead = last + growth * pressure.sustained_seconds * (1 - 1 / _PART)
    allowed = _allowed(rates, objectives)
    if ahead <= allowed * rates.finished:
        return ""
    return (
        f"in the last {passed:.0f} s {rates.arrivals:.1f} requests a second came and {rates.finished:.1f} were "
        f"finished: {last:.0f} are in hand, and in {pressure.sustained_seconds} s one would take longer than "
        f"{allowed:.0f} s"
    )


def _allowed(rates: _Rates, objectives: Sequence[Objective]) -> float:
    """Return the seconds that a request may take; without an objective the time for a queue to drain, or to decode."""
    limits = {m: [o.milliseconds / 1000 for o in objectives if o.metric == m] for m in ("TTFT", "ITL")}
    first = max(limits["TTFT"], default=DRAIN_SECONDS)
    return first + (max(limits["ITL"]) * rates.generated if limits["ITL"] else rates.decode)
