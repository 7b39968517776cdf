"""The numbers of one pod's metrics page, and the increments between two of its pages. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpilot_formats.untrusted import whole
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows
from kvpilot_operator.state.snapshot import ModelFacts

_COUNTS = (
    "preemptions", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "host_hits", "finished",
    "stopped", "asked_tokens",
)  # fmt: skip
DONE_COUNTS = ("prompt_tokens", "generation_tokens", "finished", "preemptions")
"""Counters of which at least one increases while an engine works."""
_HISTOGRAMS = ("ttft", "itl", "generation_lengths")
# If two pages are further apart, treat the later one as a first page, because increments would cover too long a time.
LONGEST_GAP_SECONDS = 600.0
# Ignore smaller changes of a process's start time: Linux derives it from the boot time, which changes when the clock is
# set.
_START_JITTER_SECONDS = 5.0


# Limit of engines on one page. An API server in front of a large deployment has a few hundred ranks.
MOST_RANKS = 512
# Names of an engine's figures in `Ranks`.
USAGE, RUNNING, WAITING, FOR_ROOM, DONE = "usage", "running", "waiting", "for_room", "done"
_LARGEST_LABEL = 10**10
_Key = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Totals(Flows):
    """Counters of an engine since its process started. Here the fields `seconds` and `failed` stay unset."""

    errors: float = 0
    """Finished requests that ended in an error of the engine (finished_reason "error")."""
    server_errors: float = 0
    """HTTP 5xx answers of the API (/v1/...)."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One engine of a page: a data-parallel rank, or a separate process."""

    name: str
    """Text of the labels that distinguish this engine on its page. Empty for the only engine of a page."""
    usage: float
    running: float
    waiting: float
    done: float
    """Sum of the engine's DONE_COUNTS; the sum over the whole page for an engine without its own counters."""


class Ranks:
    """A collector of each engine's figures on a page: data-parallel ranks (label `engine`) or processes (`pid`)."""

    def __init__(self) -> None:
        self._found: dict[_Key, dict[str, float]] = {}

    def add(self, figure: str, labels: Mapping[str, str], value: float) -> None:
        """Add one series to its engine. Of several KV uses, keep the largest; add up all other figures."""
        key = whole(labels.get("engine", ""), _LARGEST_LABEL), whole(labels.get("pid", ""), _LARGEST_LABEL)
        rank = self._found.setdefault(key, {})
        if len(self._found) > MOST_RANKS:
            raise ScrapeError(
                f"the metrics page has more than {MOST_RANKS} engines (pairs of labels `engine` and `pid`)"
            )
        before = rank.get(figure, 0.0)
        rank[figure] = max(before, value) if figure == USAGE else before + value

    def close(self, done: float) -> tuple[Rank, ...]:
        """Return the engines that report their KV use; () for a single one. `done` is the work of the whole page."""
        keys = sorted((key for key, rank in self._found.items() if USAGE in rank), key=str)
        if len(keys) < 2:
            return ()
        ranks = ((_name(key, keys), self._found[key]) for key in keys)
        return tuple(
            Rank(name, of[USAGE], of.get(RUNNING, 0.0), of.get(FOR_ROOM, of.get(WAITING, 0.0)), of.get(DONE, done))
            for name, of in ranks
        )


def _name(key: _Key, keys: list[_Key]) -> str:
    words = [
        f"{word} {'?' if key[i] is None else key[i]}"
        for i, word in enumerate(("engine", "process"))
        if len({other[i] for other in keys}) > 1
    ]
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class PodMetrics:
    """The figures that one pod's metrics page reports."""

    usage: float
    """Share of the KV blocks in use, 0 to 1. If a page has several engines, the share of the fullest one."""
    running: float
    waiting: float
    """Requests that wait for a place in the batch or for cache blocks."""
    capacity_tokens: int
    """Tokens that the KV cache holds; 0 if the page does not report it."""
    blocks: int
    """Number of KV blocks; 0 if the page does not report it."""
    dtype: str
    process_start: float | None = None
    """Unix time at which the API server's process started. vLLM with several API servers does not report it."""
    totals: Totals = Totals()
    model: ModelFacts | None = None
    factors: str = ""
    """Hash of the static factors that keys and values are quantized with; empty if the page does not report it."""
    recent_tokens: int | None = None
    """Number of last tokens of each sequence that are read at 8 bits; None if the page does not report it."""
    ranks: tuple[Rank, ...] = ()
    """The engines of a page with several engines."""

    @property
    def engines(self) -> tuple[Rank, ...]:
        """All engines on the page: data-parallel ranks, or the only engine."""
        return self.ranks or (Rank("", self.usage, self.running, self.waiting, done(self.totals)),)


def done(counts: Flows) -> float:
    """Return the sum of DONE_COUNTS: tokens, finished requests and preemptions."""
    return counts.prompt_tokens + counts.generation_tokens + counts.finished + counts.preemptions


def restarted(before: PodMetrics, after: PodMetrics) -> bool:
    """Return True if the process restarted between two metrics pages; False if a page lacks its start time."""
    if before.process_start is None or after.process_start is None:
        return False
    return abs(after.process_start - before.process_start) > _START_JITTER_SECONDS


def increments(before: PodMetrics, after: PodMetrics, elapsed: float, now: float) -> Flows:
    """Return how much the counters grew between two pages.

    The pages are `elapsed` seconds apart, and `now` is the later page's Unix time.

    After a restart of the process, every counter counts from zero. Otherwise only a counter that fell counts from zero,
    as in PromQL's increase().
    """
    if not 0 < elapsed <= LONGEST_GAP_SECONDS:
        return Flows()
    fresh = restarted(before, after)
    old, new = before.totals, after.totals

    def step(was: float, now_is: float) -> float:
        return now_is if fresh or now_is < was else now_is - was

    # A request that fails before its first token lowers vLLM's sums of seconds. So a lower sum does not show a reset,
    # but a lower number of finished requests does.
    reset = fresh or new.finished < old.finished
    errors = step(old.errors, new.errors)
    # An engine's error is also an HTTP 500, unless the answer had begun. Neither count includes all errors, so take the
    # larger one.
    failed = max(errors, step(old.server_errors, new.server_errors))
    counts: dict[str, Any] = {field: step(getattr(old, field), getattr(new, field)) for field in _COUNTS}
    counts["finished"] += failed - errors
    counts |= {field: _grown(getattr(old, field), getattr(new, field), fresh) for field in _HISTOGRAMS}
    # A new process has run for `age`, unless the clocks of pod and operator differ too much.
    age = now - (after.process_start or 0.0)
    return Flows(
        seconds=age if fresh and 0 < age < elapsed else elapsed,
        failed=failed,
        prefill_seconds=max(0.0, new.prefill_seconds - (0.0 if reset else old.prefill_seconds)),
        decode_seconds=max(0.0, new.decode_seconds - (0.0 if reset else old.decode_seconds)),
        **counts,
    )


def _grown(was: Histogram, now_is: Histogram, fresh: bool) -> Histogram:
    if not fresh and was.bounds == now_is.bounds:
        counts = tuple(b - a for a, b in zip(was.counts, now_is.counts, strict=True))
        if not any(counts):
            return Histogram()
        if min(counts) >= 0:
            return Histogram(now_is.bounds, counts, max(0.0, now_is.total - was.total))
    return Histogram(now_is.bounds, now_is.counts, max(0.0, now_is.total)) if now_is.count else Histogram()
