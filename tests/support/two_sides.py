"""Random scrapes of two revisions under one load, as vLLM's histograms would show them: for the two-sample tests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np

from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample
from support.services import NOW

# The defaults of vLLM 0.32.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
SCRAPE = timedelta(seconds=5)


def load(rng: np.random.Generator, scrapes: int, *, swing: float = 0.25, memory: float = 0.8) -> Sequence[float]:
    """A load around 1 that drifts: log-normal, with this correlation from one scrape to the next."""
    drift = [rng.standard_normal()]
    for _ in range(scrapes - 1):
        drift.append(memory * drift[-1] + (1 - memory**2) ** 0.5 * rng.standard_normal())
    return [float(np.exp(swing * z - swing**2 / 2)) for z in drift]


def scrapes(
    rng: np.random.Generator,
    requests: int,
    loads: Sequence[float],
    *,
    slow: float = 1.0,
    failing: float = 0.002,
    first: float = 0.35,
    spread: float = 0.6,
    between: float = 0.03,
    bounds: Sequence[float] = TTFT,
) -> tuple[Sample, ...]:
    """About so many requests over the loads. More load is slower; all tokens of a scrape share their batch's pace."""
    made = [Sample(NOW, 1, 0.5, 4.0, 0.0, 1000, "auto")]
    for i, now in enumerate(loads):
        count = int(rng.poisson(requests / len(loads) * now))
        ttft = first * slow * now**0.5 * np.exp(spread * rng.standard_normal(count))
        tokens = rng.geometric(1 / 40, count)
        pace = between * slow * now**0.5 * np.exp(0.1 * rng.standard_normal())
        itl = pace * np.exp(0.25 * rng.standard_normal(int(tokens.sum())))
        made.append(
            Sample(
                NOW + SCRAPE * (i + 1), 1, 0.5, 4.0 * now, 0.0, 1000, "auto",
                Flows(
                    seconds=5.0,
                    generation_tokens=float(tokens.sum()),
                    finished=float(count),
                    failed=float(rng.binomial(count, failing)),
                    prefill_seconds=float(ttft.sum()),
                    decode_seconds=float(itl.sum()),
                    ttft=histogram(ttft, bounds),
                    itl=histogram(itl, ITL),
                    generation_lengths=Histogram((), (float(count),), float(tokens.sum())),
                ),
            )
        )  # fmt: skip
    return tuple(made)


def histogram(values: np.ndarray, bounds: Sequence[float]) -> Histogram:
    """The values by bucket."""
    counts = np.bincount(np.searchsorted(bounds, values), minlength=len(bounds) + 1)
    return Histogram(tuple(bounds), tuple(float(c) for c in counts), float(values.sum()))


def span(count: int) -> tuple[datetime, datetime]:
    """The window of so many scrapes."""
    return NOW, NOW + SCRAPE * count
