"""The comparison of canary and stable side: two-sample tests over one window of their own metrics.

Each figure is a change with a confidence limit on each side (`intervals` has the formulas). If the better end of the
interval is beyond the limit, the figure failed. If the worse end is within the limit, it passed. Otherwise it is
inconclusive and needs more requests. A canary passes if every figure passes, each at level `alpha`. It fails if any
figure fails, with `alpha` divided among the figures. So exactly at the limit, neither verdict is wrong more often than
`alpha`.

The p95s are as fine as the engines' buckets; the means and the tokens per second do not depend on buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from kvpilot_operator.api.rollout import Canary
from kvpilot_operator.api.words import Reason, Verdict
from kvpilot_operator.decide.intervals import Estimate, common, p95_change, ratio_change, share_change
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample

# With more batches, each is shorter than the drift of the load, and intervals get too narrow. In simulations exactly at
# the limit, with separate loads, 5.7% of runs failed with 20 batches and 2.7% with 10. The target is 2.5%.
MAX_BATCHES = 10
MIN_BATCHES = 5
_TTFT, _ITL, _RATE = "TTFT p95", "ITL p95", "tokens/s of a running request"
_SLOWER = Reason.PERFORMANCE_REGRESSED


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict of one look at the figures."""

    outcome: Verdict
    reason: str
    message: str
    itl_p95_change_percent: int | None = None
    """In percent of the stable side; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One side's window: increments by slice of time, and their total."""

    batches: tuple[Flows, ...]
    total: Flows
    running_per_pod: float


@dataclass(frozen=True, slots=True)
class _Figure:
    """One figure: its function by confidence level, and the largest permitted regression."""

    name: str
    reason: str
    limit: float
    at: Callable[[float], Estimate | None]
    text: Callable[[float], str] = field(default=lambda value: f"{100 * math.expm1(value):+.0f}%")


def compare(
    stable: Sequence[Sample], canary: Sequence[Sample], limits: Canary, start: datetime, end: datetime, alpha: float
) -> Finding:
    """Judge the scrapes of both sides from `start` to `end`; `alpha` is the error that this look may spend."""
    ours, theirs = _sides(canary, stable, start, end)
    sizes = (
        f"{ours.total.finished:.0f} and {theirs.total.finished:.0f} requests (canary, stable), "
        f"{ours.running_per_pod:.1f} and {theirs.running_per_pod:.1f} running a pod"
    )
    if min(ours.total.finished, theirs.total.finished) < limits.min_requests:
        return Finding(
            Verdict.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, f"{sizes}; at least {limits.min_requests} are needed on each"
        )
    if len(ours.batches) < MIN_BATCHES:
        return Finding(
            Verdict.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, f"{sizes}; at least {MIN_BATCHES} scrapes are needed"
        )
    both = ((ours.total.ttft, theirs.total.ttft), (ours.total.itl, theirs.total.itl))
    if any(a.count and b.count and not common(a, b) for a, b in both):
        return Finding(Verdict.ERROR, Reason.TOO_FEW_SAMPLES, f"{sizes}; their latency histograms share no bucket")
    figures = _figures(ours, theirs, limits)
    share = alpha / len(figures)
    told = [(f, f.at(alpha), f.at(share)) for f in figures]
    wide = {f.name: at_alpha for f, at_alpha, _ in told}
    change = _percent(wide.get(_ITL))
    message = "; ".join([_tell(f, wide[f.name]) for f in figures] + [sizes])
    failed = [f for f, _, strict in told if strict is not None and strict.low > f.limit]
    if failed:
        return Finding(Verdict.FAILED, failed[0].reason, f"{failed[0].name} is worse beyond doubt: {message}", change)
    open_ = [f.name for f, found, _ in told if found is None or not found.high < f.limit]
    if open_:
        text = f"more requests are needed to tell {' and '.join(open_)}: {message}"
        return Finding(Verdict.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, text, change)
    return Finding(Verdict.PASSED, Reason.WITHIN_LIMITS, message, change)


def _figures(ours: _Side, theirs: _Side, limits: Canary) -> tuple[_Figure, ...]:
    first = math.log1p(limits.max_ttft_p95_regression_percent / 100)
    between = math.log1p(limits.max_itl_p95_regression_percent / 100)
    slower = limits.max_throughput_regression_percent / 100
    rate = -math.log1p(-slower) if slower < 1 else math.inf
    # If every answer has one token, there is no time between two tokens.
    paced = any(f.generation_lengths.total > f.generation_lengths.count for f in (ours.total, theirs.total))
    pace = (
        (
            _Figure(_ITL, _SLOWER, between, _p95(ours, theirs, lambda f: f.itl)),
            _Figure("ITL mean", _SLOWER, between, lambda a: _mean(ours, theirs, lambda f: f.itl, a)),
        )
        if paced
        else ()
    )
    return (
        _Figure(_TTFT, _SLOWER, first, _p95(ours, theirs, lambda f: f.ttft)),
        _Figure("TTFT mean", _SLOWER, first, lambda a: _mean(ours, theirs, lambda f: f.ttft, a)),
        *pace,
        _Figure(
            _RATE,
            _SLOWER,
            rate,
            # Both sums count only requests that ended, so that tokens and time match.
            lambda a: _ratio(
                ours, theirs, lambda f: f.prefill_seconds + f.decode_seconds, lambda f: f.generation_lengths.total, a
            ),
            lambda value: f"{100 * math.expm1(-value):+.0f}%" if math.isfinite(value) else f"{-value}",
        ),
        _Figure(
            "failed requests",
            Reason.ERRORS_INCREASED,
            limits.max_error_increase_percent / 100,
            lambda a: share_change(_failures(ours), _failures(theirs), a),
            lambda value: f"{100 * value:+.1f} points",
        ),
    )


def _p95(ours: _Side, theirs: _Side, of: Callable[[Flows], Histogram]) -> Callable[[float], Estimate | None]:
    return p95_change([of(f) for f in ours.batches], [of(f) for f in theirs.batches])


def _mean(ours: _Side, theirs: _Side, of: Callable[[Flows], Histogram], alpha: float) -> Estimate | None:
    return _ratio(ours, theirs, lambda f: of(f).total, lambda f: of(f).count, alpha)


def _ratio(
    ours: _Side, theirs: _Side, top: Callable[[Flows], float], bottom: Callable[[Flows], float], alpha: float
) -> Estimate | None:
    pairs = [[(top(f), bottom(f)) for f in side.batches] for side in (ours, theirs)]
    return ratio_change(pairs[0], pairs[1], alpha)


def _failures(side: _Side) -> tuple[float, float]:
    return side.total.failed, side.total.finished


def _tell(figure: _Figure, found: Estimate | None) -> str:
    if found is None:
        return f"{figure.name} not known"
    limit = figure.text(figure.limit) if math.isfinite(figure.limit) else "none"
    low, high = (figure.text(v) if math.isfinite(v) else "?" for v in (found.low, found.high))
    return f"{figure.name} {figure.text(found.value)} ({low} to {high}, limit {limit})"


def _percent(found: Estimate | None) -> int | None:
    return None if found is None or not math.isfinite(found.value) else round(100 * math.expm1(found.value))


def _sides(canary: Sequence[Sample], stable: Sequence[Sample], start: datetime, end: datetime) -> tuple[_Side, _Side]:
    """Cut both sides into the same slices of time. A scrape covers the time since the previous scrape, so both must lie
    in the window."""
    ours, theirs = (
        [after for before, after in pairwise(samples) if before.time >= start and after.time <= end]
        for samples in (canary, stable)
    )
    count = min(MAX_BATCHES, len(ours), len(theirs))
    return _sliced(ours, count, start, end), _sliced(theirs, count, start, end)


def _sliced(scrapes: Sequence[Sample], count: int, start: datetime, end: datetime) -> _Side:
    slices: list[list[Flows]] = [[] for _ in range(count)]
    for scrape in scrapes:
        if count:
            slices[min(count - 1, int(count * ((scrape.time - start) / (end - start))))].append(scrape.flows)
    batches = tuple(Flows.together(flows) for flows in slices)
    pods = sum(s.pods for s in scrapes)
    return _Side(batches, Flows.together(batches), sum(s.running for s in scrapes) / pods if pods else 0.0)
