"""Compare latency, speed and errors of canary and stable side by two-sample tests over one window of metrics.

Each figure is a change from stable to canary with a confidence interval (`intervals`):

- It passes if even the worse end of the interval is within the limit.
- It fails if even the better end is beyond the limit.
- Else it needs more requests.

A canary passes if every figure passes at level `alpha`. It fails if one figure fails at `alpha` divided by the number
of figures. If a true change is exactly at its limit, each verdict is wrong with a probability of at most `alpha`. While
the canary's prefix cache is colder than the stable side's, figures that include prefill cannot fail it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from kvpilot_operator.api.rollout import Canary
from kvpilot_operator.api.words import Reason, Verdict
from kvpilot_operator.decide.intervals import Estimate, common, p95_change, ratio_change, share_change
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample

# With more batches, each is shorter than slow changes of the load, and intervals are too narrow. In simulations, a
# canary exactly at the limit failed in 5.7% of the runs with 20 batches, and in 2.7% with 10. The target is 2.5%.
MAX_BATCHES = 10
MIN_BATCHES = 5
# A canary's prefix cache counts as cold while its share of cached prompt tokens is more than COLD_SHARE below the
# stable side's. After WARM_REQUESTS requests it counts as warm in any case.
COLD_SHARE = 0.1
WARM_REQUESTS = 1000
_ITL = "ITL p95"
_SLOWER = Reason.PERFORMANCE_REGRESSED


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict of one comparison, with its reason and figures."""

    outcome: Verdict
    reason: str
    message: str
    itl_p95_change_percent: int | None = None
    """Change of the ITL p95 in percent of the stable side's; None if unknown."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One side's metrics in a window: the increments in each slice of time, and their total."""

    batches: tuple[Flows, ...]
    total: Flows
    running_per_pod: float


@dataclass(frozen=True, slots=True)
class _Figure:
    """One figure: `at` gives its change at a confidence level, and `limit` is the largest permitted regression."""

    name: str
    reason: str
    limit: float
    at: Callable[[float], Estimate | None]
    text: Callable[[float], str] = field(default=lambda value: f"{100 * math.expm1(value):+.0f}%")
    prefill: bool = False
    """True if the figure includes the time of prefill, which a cold prefix cache prolongs."""


def compare(
    stable: Sequence[Sample], canary: Sequence[Sample], limits: Canary, start: datetime, end: datetime, alpha: float
) -> Finding:
    """Judge the scrapes of both sides from `start` to `end`. `alpha` is the probability of a wrong verdict."""
    ours, theirs = _sides(canary, stable, start, end)
    sizes = (
        f"{ours.total.finished:.0f} and {theirs.total.finished:.0f} requests (canary, stable), "
        f"{ours.running_per_pod:.1f} and {theirs.running_per_pod:.1f} running a pod"
    )
    few = min(ours.total.finished, theirs.total.finished) < limits.min_requests
    if few or len(ours.batches) < MIN_BATCHES:
        least = f"{limits.min_requests} are needed on each" if few else f"{MIN_BATCHES} scrapes are needed"
        return Finding(Verdict.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, f"{sizes}; at least {least}")
    both = ((ours.total.ttft, theirs.total.ttft), (ours.total.itl, theirs.total.itl))
    if any(a.count and b.count and not common(a, b) for a, b in both):
        return Finding(
            Verdict.ERROR, Reason.TOO_FEW_SAMPLES, f"{sizes}; their latency histograms have no bucket bound in common"
        )
    figures = _figures(ours, theirs, limits)
    told = [(f, f.at(alpha), f.at(alpha / len(figures))) for f in figures]
    paced = next((found for f, found, _ in told if f.name == _ITL), None)
    known = paced is not None and math.isfinite(paced.value)
    change = round(100 * math.expm1(paced.value)) if paced is not None and known else None
    message = "; ".join([*(_tell(f, found) for f, found, _ in told), sizes])
    cold = _cold(ours.total, theirs.total)
    failed = [f for f, _, strict in told if strict is not None and strict.low > f.limit and not (cold and f.prefill)]
    if failed:
        return Finding(Verdict.FAILED, failed[0].reason, f"{failed[0].name} is clearly worse: {message}", change)
    open_ = [f.name for f, found, _ in told if found is None or not found.high < f.limit]
    if open_:
        text = f"more requests are needed to judge {' and '.join(open_)}{cold}: {message}"
        return Finding(Verdict.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, text, change)
    return Finding(Verdict.PASSED, Reason.WITHIN_LIMITS, message, change)


def _cold(ours: Flows, theirs: Flows) -> str:
    """Say that the canary's prefix cache is cold; empty if it counts as warm."""
    shares = [one.hits / one.prefix_queries if one.prefix_queries else 0.0 for one in (ours, theirs)]
    if ours.finished >= WARM_REQUESTS or shares[1] - shares[0] <= COLD_SHARE:
        return ""
    return (
        f" (caches held {100 * shares[0]:.0f}% of the canary's prompt tokens and {100 * shares[1]:.0f}% of the stable "
        f"side's, so prefill is not failed before {WARM_REQUESTS} requests)"
    )


def _figures(ours: _Side, theirs: _Side, limits: Canary) -> tuple[_Figure, ...]:
    slower = limits.max_throughput_regression_percent / 100
    rate = -math.log1p(-slower) if slower < 1 else math.inf
    # If every answer has only one token, there is no time between two tokens, so leave ITL out.
    paced = any(f.generation_lengths.total > f.generation_lengths.count for f in (ours.total, theirs.total))

    def ratio(top: Callable[[Flows], float], bottom: Callable[[Flows], float]) -> Callable[[float], Estimate | None]:
        pairs = [[(top(f), bottom(f)) for f in side.batches] for side in (ours, theirs)]
        return lambda alpha: ratio_change(pairs[0], pairs[1], alpha)

    def latency(name: str, percent: int, of: Callable[[Flows], Histogram]) -> tuple[_Figure, ...]:
        limit, sides = math.log1p(percent / 100), [[of(f) for f in side.batches] for side in (ours, theirs)]
        mean = ratio(lambda f: of(f).total, lambda f: of(f).count)
        figures = ((f"{name} p95", p95_change(*sides)), (f"{name} mean", mean))
        return tuple(_Figure(title, _SLOWER, limit, at, prefill=name == "TTFT") for title, at in figures)

    failed, others = ((side.total.failed, side.total.finished) for side in (ours, theirs))
    return (
        *latency("TTFT", limits.max_ttft_p95_regression_percent, lambda f: f.ttft),
        *(latency("ITL", limits.max_itl_p95_regression_percent, lambda f: f.itl) if paced else ()),
        _Figure(
            "tokens/s of a running request",
            _SLOWER,
            rate,
            # Count seconds and tokens only of requests that ended, so that the two match.
            ratio(lambda f: f.prefill_seconds + f.decode_seconds, lambda f: f.generation_lengths.total),
            lambda value: f"{100 * math.expm1(-value):+.0f}%" if math.isfinite(value) else f"{-value}",
            prefill=True,
        ),
        _Figure(
            "failed requests",
            Reason.ERRORS_INCREASED,
            limits.max_error_increase_percent / 100,
            lambda alpha: share_change(failed, others, alpha),
            lambda value: f"{100 * value:+.1f} points",
        ),
    )


def _tell(figure: _Figure, found: Estimate | None) -> str:
    if found is None:
        return f"{figure.name} not known"
    limit = figure.text(figure.limit) if math.isfinite(figure.limit) else "none"
    low, high = (figure.text(v) if math.isfinite(v) else "?" for v in (found.low, found.high))
    return f"{figure.name} {figure.text(found.value)} ({low} to {high}, limit {limit})"


def _sides(canary: Sequence[Sample], stable: Sequence[Sample], start: datetime, end: datetime) -> Iterator[_Side]:
    """Cut the scrapes of canary and stable side into the same slices of time."""
    both = [between(samples, start, end) for samples in (canary, stable)]
    count = min(MAX_BATCHES, *map(len, both))
    for scrapes in both:
        slices: list[list[Flows]] = [[] for _ in range(count)]
        for scrape in scrapes if count else ():
            slices[min(count - 1, int(count * ((scrape.time - start) / (end - start))))].append(scrape.flows)
        batches, pods = tuple(Flows.together(flows) for flows in slices), sum(s.pods for s in scrapes)
        yield _Side(batches, Flows.together(batches), sum(s.running for s in scrapes) / pods if pods else 0.0)


def between(samples: Sequence[Sample], start: datetime, end: datetime) -> list[Sample]:
    """Return the scrapes from `start` to `end`. Leave out a first scrape that counts work from before `start`."""
    return [after for before, after in pairwise(samples) if before.time >= start and after.time <= end]
