"""Detect surges: loads that grow faster than new replicas start.

A latency objective permits a few late requests in each window. In a surge, the last fifth of the window alone has as
many late requests as the whole window may have, or the load grows so fast that requests will be late one window from
now. Then kvpilot adds replicas at once, because a replica takes minutes to start. It starts no canary, which would take
far longer. Without latency objectives no request counts as late, so there are no surges.
"""

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
"""Seconds in which a queue must drain, about as long as clients wait."""
# The short window is the last fifth of the window. In a surge, it has five times the permitted share of late requests.
_PART = 5
# Shortest useful short window, in seconds. If a fifth of the window is shorter, no surge is detected.
_LEAST_SECONDS = 30.0
_LEAST_SCRAPES = 3
_SIGMAS = 3.0
_TIME = attrgetter("time")


@dataclass(frozen=True, slots=True)
class Surge:
    """The evidence of a surge (`message`), and the load of all replicas in the short window."""

    message: str
    arrivals: float
    """Forecast of the arrival rate (requests per second) one window from now, when a new replica may answer."""
    waiting: float
    """Requests that wait at the end of the short window."""


def find(samples: Sequence[Sample], pressure: Pressure, objectives: Sequence[Objective]) -> Surge | None:
    """Return the surge that `samples` show, or None.

    `samples`, oldest first, begin when the newest replica answered. The last sample is plausible.
    """
    seconds = pressure.sustained_seconds / _PART
    if seconds < _LEAST_SECONDS or not samples or not objectives:
        return None
    last = samples[-1]
    at = bisect_right(samples, last.time - timedelta(seconds=seconds), key=_TIME)
    window, flows = samples[at:], [s.flows for s in samples[at:]]
    whole = all(s.pods == last.pods and not s.implausible and not s.unanswered for s in window)
    passed = (last.time - window[0].time).total_seconds()
    if len(window) < _LEAST_SCRAPES or not whole or passed < seconds / 2:
        return None
    arrivals, before = _arrivals(window), _arrivals(samples[:at])
    if arrivals is None or not any(one.prompt_tokens + one.generation_tokens for one in flows):
        return None
    load = tuple(s.running + s.waiting for s in (window[0], window[len(window) // 2], last))
    if load[0] > load[1] > load[2]:
        return None  # The load falls, so late requests are leftovers of an earlier queue.
    chance, grown = _SIGMAS * math.sqrt(arrivals * passed), load[2] - load[0]
    why = _late(flows, objectives, seconds)
    if not why and load[0] < load[1] < load[2] and grown > max(chance, pressure.waiting_per_replica * last.pods):
        done = Flows.counted(flows)
        finished, allowed = done.finished / done.seconds * last.pods, _allowed(done, objectives)
        # By Little's law, a request that arrives one window from now would then take longer than allowed.
        if load[2] + grown / passed * pressure.sustained_seconds * (1 - 1 / _PART) > allowed * finished:
            why = (
                f"in the last {passed:.0f} s {arrivals:.1f} requests a second arrived and {finished:.1f} finished: "
                f"{load[2]:.0f} run or wait, and a request that comes in {pressure.sustained_seconds} s would take "
                f"longer than {allowed:.0f} s"
            )
    if not why:
        return None
    ahead, risen = pressure.sustained_seconds, 0.0 if before is None else arrivals - before
    # Count only a rise beyond chance: three standard deviations of independent arrivals.
    risen = risen if risen > chance / passed else 0.0
    return Surge(why, arrivals + risen * ahead / ((ahead + seconds) / 2), last.waiting)


def _arrivals(window: Sequence[Sample]) -> float | None:
    """Return the requests per second that arrive at all replicas, or None if there are too few samples."""
    pod_seconds = sum(s.flows.seconds for s in window)
    passed = (window[-1].time - window[0].time).total_seconds() if window else 0.0
    if pod_seconds <= 0 or passed <= 0:
        return None
    first, last = window[0], window[-1]
    grown = (last.running + last.waiting - first.running - first.waiting) / passed
    return max(0.0, sum(s.flows.finished for s in window) / pod_seconds * last.pods + grown)


def _allowed(done: Flows, objectives: Sequence[Objective]) -> float:
    """Return the seconds that a request may take: the time until its first token, and the time of its decoding.

    Without a TTFT objective, the first token may take DRAIN_SECONDS. Without an ITL objective, decoding may take as
    long as observed.
    """
    limits = {m: [o.milliseconds / 1000 for o in objectives if o.metric == m] for m in ("TTFT", "ITL")}
    first, count = max(limits["TTFT"], default=DRAIN_SECONDS), done.finished
    rest = max(limits["ITL"]) * done.generation_tokens if limits["ITL"] else done.decode_seconds
    return first + (rest / count if count else 0.0)


def _late(flows: Sequence[Flows], objectives: Sequence[Objective], seconds: float) -> str:
    """Describe an objective that requests miss five times as often as it permits, in both halves of `flows`.

    Return "" if there is none.
    """
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
                f"ms, {_PART} times the permitted share"
            )
    return ""
