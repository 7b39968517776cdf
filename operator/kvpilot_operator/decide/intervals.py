"""Estimate how much two sides, such as canary and stable, differ, with one-sided confidence limits.

- Ratio of p95s: Woodruff's interval for each side (1952, JASA 47:635). MOVER joins both on the log scale (Zou and
  Donner 2008, Statistics in Medicine 27:1693).
- Ratio of means or rates: ratios of sums (Cochran 1977, Sampling Techniques, 6.3).
- Difference of shares: Newcombe's method 10 (1998, Statistics in Medicine 17:873).

Consecutive requests resemble each other, so they are not independent samples. Variances are therefore computed from
means over equal slices of time (batch means; Schmeiser 1982, Operations Research 30:556), with Student's t.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

from kvpilot_operator.state.histogram import Histogram

QUANTILE = 0.95
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A log ratio, or a difference of shares, with one-sided limits. `value` is above 0 if the first side is larger."""

    value: float
    low: float
    high: float


def p95_change(ours: Sequence[Histogram], theirs: Sequence[Histogram]) -> Callable[[float], Estimate | None]:
    """Return a function that gives the log ratio of two p95s, with limits at the level `alpha`.

    The function returns None if a p95 is unknown because it lies above the last bucket bound.
    """
    bounds = common(Histogram.together(ours), Histogram.together(theirs))
    c, s = (_woodruff([_coarsen(h, bounds) for h in batches]) for batches in (ours, theirs))
    if c is None or s is None:
        return lambda _: None
    m = len(c.strays)
    shared = m / (m - 1) * sum(a * b for a, b in zip(c.strays, s.strays, strict=True))
    rho = max(-1.0, min(1.0, shared / math.sqrt(c.variance * s.variance)))
    value = c.value - s.value

    def at(alpha: float) -> Estimate:
        (c_low, c_high), (s_low, s_high) = c.limits(alpha), s.limits(alpha)
        return Estimate(
            value,
            value - _mover(c.value - c_low, s_high - s.value, rho),
            value + _mover(c_high - c.value, s.value - s_low, rho),
        )

    return at


def ratio_change(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], alpha: float
) -> Estimate | None:
    """Return the log ratio of two sides' ratios. A side's ratio is its sum of numerators over its sum of denominators.

    ours, theirs: (numerator, denominator) of each slice of time. If a sum is 0, the result is None.
    """
    strays: list[list[float]] = []
    logs: list[float] = []
    for slices in (ours, theirs):
        top, bottom = sum(y for y, _ in slices), sum(x for _, x in slices)
        if top <= 0 or bottom <= 0:
            return None
        logs.append(math.log(top / bottom))
        strays.append([(y - top / bottom * x) / top for y, x in slices])
    m = len(ours)
    variance = m / (m - 1) * sum((a - b) ** 2 for a, b in zip(*strays, strict=True))
    half = student(1 - alpha, m - 1) * math.sqrt(variance)
    value = logs[0] - logs[1]
    return Estimate(value, value - half, value + half)


def share_change(ours: tuple[float, float], theirs: tuple[float, float], alpha: float) -> Estimate:
    """Return the difference of two shares, each given as (hits, total)."""
    z = _NORMAL.inv_cdf(1 - alpha)
    c, c_low, c_high = _wilson(*ours, z)
    s, s_low, s_high = _wilson(*theirs, z)
    value = c - s
    return Estimate(value, value - math.hypot(c - c_low, s_high - s), value + math.hypot(c_high - c, s - s_low))


def log_quantile(h: Histogram, q: float) -> float:
    """Return the log of the quantile `q`, or inf if it lies above the last bound.

    Within a bucket, values are assumed to be log-normal; but in a first bucket that begins at 0, uniform.
    """
    rank = q * h.count
    for i, reached in enumerate(accumulate(h.counts)):
        if reached < rank or h.counts[i] <= 0:
            continue
        if i == len(h.bounds):
            return math.inf
        low, high, before = h.bounds[i - 1] if i else 0.0, h.bounds[i], reached - h.counts[i]
        if low <= 0:
            return math.log(high * (rank - before) / h.counts[i])
        below, above = _score(before, h.count), _score(reached, h.count)
        part = (_score(rank, h.count) - below) / (above - below) if above > below else 1.0
        return math.log(low) + min(1.0, max(0.0, part)) * math.log(high / low)
    return math.inf


def common(a: Histogram, b: Histogram) -> tuple[float, ...]:
    """Return the bucket bounds that both histograms have, because two engine versions may use different buckets."""
    if not a.bounds or not b.bounds:
        return a.bounds or b.bounds
    return tuple(sorted(set(a.bounds) & set(b.bounds)))


def student(level: float, freedom: int) -> float:
    """Return the quantile at `level` of Student's t with `freedom` degrees of freedom (accurate from 4 on).

    Cornish-Fisher expansion: Abramowitz and Stegun 26.7.5.
    """
    z = _NORMAL.inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**i for i, term in enumerate(terms, 1))


@dataclass(frozen=True, slots=True)
class _Woodruff:
    """One side's p95: its log (`value`), the histogram of all batches (`total`), and each batch's deviation (`strays`).

    A batch's deviation: (its share of values above the p95, minus 5%) times the batch's part of all observations.
    """

    total: Histogram
    value: float
    strays: tuple[float, ...]
    variance: float

    def limits(self, alpha: float) -> tuple[float, float]:
        """Return the lower and the upper one-sided limit of the p95, as logs."""
        half = student(1 - alpha, len(self.strays) - 1) * math.sqrt(self.variance)
        low = log_quantile(self.total, QUANTILE - half) if half < QUANTILE else -math.inf
        return low, log_quantile(self.total, QUANTILE + half) if QUANTILE + half < 1 else math.inf


def _mover(a: float, b: float, rho: float) -> float:
    if math.isinf(a) or math.isinf(b):
        return math.inf
    return math.sqrt(max(0.0, a * a + b * b - 2 * rho * a * b))


def _woodruff(batches: Sequence[Histogram]) -> _Woodruff | None:
    """Estimate one side's p95 and its variance. Return None if the p95 lies above the last bucket bound."""
    total = Histogram.together(batches)
    n, m = total.count, len(batches)
    value = log_quantile(total, QUANTILE) if n > 0 else math.inf
    if not math.isfinite(value):
        return None
    strays = tuple((_share_above(h, value) - (1 - QUANTILE)) * h.count / n for h in batches)
    variance = max(m / (m - 1) * sum(e * e for e in strays), QUANTILE * (1 - QUANTILE) / n)
    return _Woodruff(total, value, strays, variance)


def _share_above(h: Histogram, log_value: float) -> float:
    """Return the share of observations above a value. Interpolate within a bucket as `log_quantile` does."""
    value, before = math.exp(log_value), 0.0
    if h.count <= 0:
        return 0.0
    for i, bound in enumerate(h.bounds):
        reached = before + h.counts[i]
        if value < bound:
            low = h.bounds[i - 1] if i else 0.0
            if low <= 0:
                return (h.count - before - h.counts[i] * value / bound) / h.count
            below, above = _score(before, h.count), _score(reached, h.count)
            part = (log_value - math.log(low)) / math.log(bound / low)
            share = 1 - _NORMAL.cdf(below + part * (above - below))
            return min((h.count - before) / h.count, max((h.count - reached) / h.count, share))
        before = reached
    return (h.count - before) / h.count


def _score(below: float, count: float) -> float:
    """Return the quantile of the normal distribution for a rank. Assume half an observation beyond each end, so that
    the quantile is finite."""
    half = min(0.5, count / 4) / count
    return _NORMAL.inv_cdf(min(1 - half, max(half, below / count)))


def _coarsen(h: Histogram, bounds: tuple[float, ...]) -> Histogram:
    if h.bounds == bounds or not h.count:
        return h
    counts = [0.0] * (len(bounds) + 1)
    place = 0
    for i, count in enumerate(h.counts):
        upper = h.bounds[i] if i < len(h.bounds) else math.inf
        while place < len(bounds) and bounds[place] < upper:
            place += 1
        counts[place] += count
    return Histogram(bounds, tuple(counts), h.total)


def _wilson(hits: float, n: float, z: float) -> tuple[float, float, float]:
    """Return a share with Wilson's score interval (1927, JASA 22:209)."""
    p = min(1.0, hits / n)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return p, max(0.0, middle - half), min(1.0, middle + half)
