"""The load that the engines of one revision report, scrape by scrape. Frozen, no I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any, Self

from kvpilot_operator.state.histogram import Histogram

NOTHING_OBSERVED = Histogram()
ROOMY = 0.5
"""Share of the fullest engine's KV cache use. An engine at or below it has room for waiting requests."""


@dataclass(frozen=True, slots=True)
class Flows:
    """Increments of the counters of one revision's pods since the previous scrape.

    The first scrape of a pod adds nothing.
    """

    seconds: float = 0.0
    """Pod-seconds that the increments cover; 0 before a second scrape."""
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    prefix_queries: float = 0.0
    """Prompt tokens that were looked up in the GPU's prefix cache. `prefix_hits` of them were found."""
    prefix_hits: float = 0.0
    host_hits: float = 0.0
    """Prompt tokens that were loaded from host memory."""
    finished: float = 0.0
    """Requests that ended, failed ones included."""
    failed: float = 0.0
    """Requests that ended in an error of the engine. Requests that a client aborted do not count."""
    stopped: float = 0.0
    """Requests whose answer ended by itself (finished_reason "stop")."""
    asked_tokens: float = 0.0
    """Sum of the max_tokens of finished requests."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """Seconds in decode, summed over requests. `prefill_seconds` is the same for prefill."""
    ttft: Histogram = NOTHING_OBSERVED
    itl: Histogram = NOTHING_OBSERVED
    generation_lengths: Histogram = NOTHING_OBSERVED

    @classmethod
    def together(cls, flows: Sequence[Self]) -> Self:
        """Return the sum of `flows`. Leave out histograms whose buckets differ from those of the last one."""
        columns: Iterator[tuple[Any, ...]] = zip(*map(_FIGURES, flows), strict=True)
        sums: list[Any] = [Histogram.together(c) if isinstance(c[0], Histogram) else sum(c) for c in columns]
        return cls(*sums)

    @classmethod
    def counted(cls, flows: Sequence[Self]) -> Self:
        """Return the sum of `flows` without their histograms, which are slow to add."""
        sums: list[Any] = [sum(column) for column in zip(*map(_NUMBERS, flows), strict=True)]
        return cls(*sums)

    @property
    def hits(self) -> float:
        """Prompt tokens that were found in a cache: GPU or host memory."""
        return self.prefix_hits + self.host_hits

    @property
    def computed(self) -> float:
        """Prompt tokens that the engines had to compute, because no cache held them."""
        return max(0.0, self.prefix_queries - self.hits) if self.prefix_queries else self.prompt_tokens


_FIGURES = attrgetter(*(one.name for one in fields(Flows)))
_NUMBERS = attrgetter(*(one.name for one in fields(Flows) if one.default == 0.0))


@dataclass(frozen=True, slots=True)
class Spread:
    """The fullest engine (a pod or a data-parallel rank) of one scrape, compared with all engines of the revision."""

    name: str
    usage: float
    waiting: float
    mean: float
    """Mean use of all engines."""
    roomy: float
    """Share of the engines that are at most half as full as the fullest one."""
    roomy_waiting: float
    """Mean number of waiting requests of the engines that `roomy` counts."""

    @classmethod
    def of(cls, engines: Sequence[tuple[str, float, float]]) -> Self | None:
        """Compare engines, each given as (name, use, waiting requests). Return None for fewer than two."""
        if len(engines) < 2:
            return None
        fullest = max(engines, key=lambda one: (one[1], one[2], one[0]))
        roomy = [waiting for _, usage, waiting in engines if usage <= ROOMY * fullest[1]]
        mean = sum(usage for _, usage, _ in engines) / len(engines)
        return cls(*fullest, mean, len(roomy) / len(engines), sum(roomy) / len(roomy) if roomy else 0.0)

    def mixed(self, other: Self, share: float) -> Self:
        """Return the weighted mean of this spread and `other`, with the name of `other`.

        The weight of `other` is `share` (0 to 1).
        """
        ours, theirs = astuple(self)[1:], astuple(other)[1:]
        return type(self)(other.name, *(a + (b - a) * share for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one revision: sums over the pods with plausible metrics and working engines.

    `usage` is the mean KV cache use of these pods (0 to 1), weighted by capacity. The use of a pod with several engines
    is that of its fullest engine.
    """

    time: datetime
    pods: int
    usage: float
    running: float
    waiting: float
    capacity_tokens: int
    observed_dtype: str
    """The KV-cache dtype that most pods report. Empty if no pod reports a dtype."""
    flows: Flows = Flows()
    implausible: tuple[str, ...] = ()
    """Pods with implausible metrics, each as "NAME: why"."""
    unanswered: int = 0
    stalled: tuple[str, ...] = ()
    """Pods whose engines have work but make no progress, each as "NAME: why". They are not in the sums."""
    spread: Spread | None = None
    recent_tokens: int | None = None
    factors: str = ""
    """Hash of the calibration factors that most pods report. Empty if no pod reports a hash."""
    other_dtypes: tuple[tuple[str, str], ...] = ()
    """(pod, dtype) of the first few pods, by name, whose dtype differs from `observed_dtype`."""
    mixed: tuple[tuple[str, str], ...] = ()
    """(pod, hash) of the first few pods, by name, whose calibration factors differ from `factors`."""
