"""The load that the engines of one revision report, scrape by scrape. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any

from kvpilot_operator.state.histogram import Histogram

NOTHING_OBSERVED = Histogram()
ROOMY = 0.5
"""An engine with at most this share of the fullest engine's use has room for waiting requests."""


@dataclass(frozen=True, slots=True)
class Flows:
    """Increments of one revision's pods since the previous scrape, never counters.

    A pod counts once two pages of one engine process exist. After a restart, counters start from zero.
    """

    seconds: float = 0.0
    """Pod-seconds that the increments cover; 0 while nothing is known."""
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    prefix_queries: float = 0.0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: float = 0.0
    """Prompt tokens that the prefix cache held."""
    host_hits: float = 0.0
    """Prompt tokens that were loaded from host memory or disk instead."""
    finished: float = 0.0
    """Requests that ended, failed ones included."""
    failed: float = 0.0
    """Requests that ended in an error of the engine; a client that left does not count."""
    prefill_seconds: float = 0.0
    """Request-seconds spent in prefill."""
    decode_seconds: float = 0.0
    """Request-seconds spent in decode."""
    ttft: Histogram = NOTHING_OBSERVED
    """Time to first token, seconds."""
    itl: Histogram = NOTHING_OBSERVED
    """Inter-token latency, seconds."""
    generation_lengths: Histogram = NOTHING_OBSERVED
    disk_hits: float = 0.0
    """The part of `host_hits` that came from a disk below host memory."""

    @classmethod
    def together(cls, flows: Sequence[Flows]) -> Flows:
        """Return their sum. Histograms with other buckets than the last (another engine version) are left out."""
        columns: Iterator[tuple[Any, ...]] = zip(*map(_FIGURES, flows), strict=True)
        sums: list[Any] = [Histogram.together(c) if isinstance(c[0], Histogram) else sum(c) for c in columns]
        return cls(*sums)


_FIGURES = attrgetter(*(one.name for one in fields(Flows)))


@dataclass(frozen=True, slots=True)
class Spread:
    """The fullest engine of one scrape in comparison with the others. An engine is a pod or a data-parallel rank."""

    name: str
    usage: float
    waiting: float
    mean: float
    """Mean use of all engines: the use of each if requests were spread evenly."""
    roomy: float
    """Share of the engines that are at most half as full."""
    roomy_waiting: float
    """Mean number of waiting requests at each of these engines."""

    @classmethod
    def of(cls, engines: Sequence[tuple[str, float, float]]) -> Spread | None:
        """Compare engines, given as name, use and waiting requests; None for fewer than two."""
        if len(engines) < 2:
            return None
        fullest = max(engines, key=lambda one: (one[1], one[2], one[0]))
        roomy = [waiting for _, usage, waiting in engines if usage <= ROOMY * fullest[1]]
        mean = sum(usage for _, usage, _ in engines) / len(engines)
        return cls(*fullest, mean, len(roomy) / len(engines), sum(roomy) / len(roomy) if roomy else 0.0)

    def mixed(self, other: Spread, share: float) -> Spread:
        """Return the weighted mean of both, in which `other` has the weight `share`. The name is that of `other`."""
        ours, theirs = astuple(self)[1:], astuple(other)[1:]
        return Spread(other.name, *(a + (b - a) * share for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one revision: sums over the pods with plausible pages and working engines.

    Use is their token-weighted mean. A pod with several engines counts with its fullest one.
    """

    time: datetime
    pods: int
    """Pods that answered with a plausible page."""
    usage: float
    """Share of KV blocks in use, 0 to 1."""
    running: float
    waiting: float
    capacity_tokens: int
    observed_dtype: str
    """The KV-cache dtype that most pods report; empty if none reports any."""
    flows: Flows = Flows()
    implausible: tuple[str, ...] = ()
    """Pods that answered with an implausible page, each as "NAME: why"."""
    unanswered: int = 0
    """Ready pods that gave no page."""
    stalled: tuple[str, ...] = ()
    """Pods whose engines have work but make no progress, each as "NAME: why". The sums leave them out."""
    spread: Spread | None = None
    """Distribution of the load over the engines; None if there is only one engine."""
    recent_tokens: int | None = None
    """The recent window of most pods, in tokens; None if none reports any."""
    retention: str = ""
    """The policy by which most pods free pages of a sequence; empty if most keep all."""
    factors: str = ""
    """Hash of the calibration factors of most pods; empty if none reports any."""
    other_dtypes: tuple[tuple[str, str], ...] = ()
    """The first few pods, by name, with another dtype, and that dtype."""
    mixed: tuple[tuple[str, str], ...] = ()
    """The first few pods, by name, with other factors, and their hash."""


def names(pods: Sequence[str]) -> str:
    """Return the names from texts such as "NAME: why". The reasons are left out, because their figures change."""
    return ", ".join(sorted(one.partition(":")[0] for one in pods))
