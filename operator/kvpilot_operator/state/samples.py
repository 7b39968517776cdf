"""What the engines of one revision said of their load, scrape by scrape. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any

from kvpilot_operator.state.histogram import Histogram

NOTHING_OBSERVED = Histogram()


@dataclass(frozen=True, slots=True)
class Flows:
    """What happened on one revision's pods since the scrape before: increments, never counters.

    A pod adds to it only with two pages of one engine process behind it; what a restart lost counts from zero.
    """

    seconds: float = 0.0
    """Pod-seconds that the increments cover; 0 where nothing is known yet."""
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    prefix_queries: float = 0.0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: float = 0.0
    """Prompt tokens that it held."""
    host_hits: float = 0.0
    """Prompt tokens that it did not hold, and that were loaded from where they had been offloaded to."""
    finished: float = 0.0
    """Requests that ended, failed ones included."""
    failed: float = 0.0
    """Requests that ended in an error of the engine (a client that left is none)."""
    prefill_seconds: float = 0.0
    """Request-seconds spent in prefill."""
    decode_seconds: float = 0.0
    """Request-seconds spent in decode."""
    ttft: Histogram = NOTHING_OBSERVED
    """Time to first token, seconds."""
    itl: Histogram = NOTHING_OBSERVED
    """Inter-token latency, seconds."""
    prompt_lengths: Histogram = NOTHING_OBSERVED
    generation_lengths: Histogram = NOTHING_OBSERVED
    disk_hits: float = 0.0
    """Of `host_hits` the ones that came from a disk below host memory."""

    @classmethod
    def together(cls, flows: Sequence[Flows]) -> Flows:
        """Their sum; histograms of other buckets than the last (an engine of another version) are left out."""
        columns: Iterator[tuple[Any, ...]] = zip(*map(_FIGURES, flows), strict=True)
        sums: list[Any] = [Histogram.together(c) if isinstance(c[0], Histogram) else sum(c) for c in columns]
        return cls(*sums)


_FIGURES = attrgetter(*(one.name for one in fields(Flows)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one revision: sums over the pods whose pages are plausible; use is their token-weighted mean."""

    time: datetime
    pods: int
    """Pods that answered with a plausible page."""
    usage: float
    """Share of KV blocks in use, 0 to 1."""
    running: float
    waiting: float
    capacity_tokens: int
    observed_dtype: str
    """The KV-cache dtype that most pods report; empty where none has told it."""
    flows: Flows = Flows()
    implausible: tuple[str, ...] = ()
    """Pods that answered with an implausible page, each as "NAME: why"."""
    unanswered: int = 0
    """Ready pods that gave no page."""
    recent_tokens: int | None = None
    """The recent window of most pods; None where none has told it."""
    retention: str = ""
    """The policy by which most pods free pages of a sequence; empty where most keep all."""
    factors: str = ""
    """Hash of the calibration factors that most pods have; empty where none has told it."""
    other_dtypes: tuple[tuple[str, str], ...] = ()
    """Pods that report another dtype, and which; the first few by name."""
    mixed: tuple[tuple[str, str], ...] = ()
    """Pods that have other ones, and their hashes; the first few by name."""
