"""Find pods with implausible metrics, and turn the last pages of one revision's pods into one Sample. Pure.

The metrics of a sound engine obey these rules:

- *No KV blocks in use while nothing runs.* Blocks belong to running requests; cached ones count as free.
- *Not more running requests than blocks in use.* Each request owns its last block, even under prefix caching.
- *No preemptions without a full cache.* An engine preempts when no block is free, so tokens have filled all blocks.
- *Capacity within a factor of two* of the median of the other pods on the same kind of GPU. All pods of a revision have
  the same configuration.
- *Not more tokens, preemptions or requests a second* than any machine can do.

A sound engine may break a rule for a moment, because it does not write all gauges at the same time. So a pod counts as
implausible only if it breaks a rule for longer.

A stalled engine has requests, but its counters and its cache use stay constant. (A long prompt changes no counter, but
it fills blocks.) The Sample leaves out the pod of a stalled engine.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import median
from typing import TypeVar

from kvpilot_operator.observe.pod_metrics import LONGEST_GAP_SECONDS, PodMetrics, increments, restarted
from kvpilot_operator.state.samples import Flows, Sample, Spread

_T = TypeVar("_T", int, str)

# A contradiction must last this long, and over this many consecutive pages, to count.
LASTING_SECONDS = 15.0
LASTING_PAGES = 4
# Time without progress after which an engine counts as stalled. It is longer than LASTING_SECONDS, because a model with
# only sliding-window or state-space layers stops filling blocks during a long prompt, and then looks stalled.
STALLED_SECONDS = 30.0

# Compare pods only if there are at least this many. With fewer, it is unclear which pod is wrong.
ENOUGH_TO_COMPARE = 3

# Most pods that a sample names for a deviating dtype or deviating factors. Each name takes memory in every sample.
MOST_NAMED = 4

_GAUGES = frozenset({"held", "crowded"})
"""Contradictions that one page shows by itself: KV blocks in use while nothing runs ("held"), and more running requests
than blocks ("crowded"). A Sample leaves the pod out from the first such page on."""

# Bounds of KV cache use: at most _HELD in an idle engine, and at least _FAR_FROM_FULL in an engine that preempts.
_HELD = 0.05
_FAR_FROM_FULL = 0.25
_MOST_A_SECOND = {"generation_tokens": 5e6, "prompt_tokens": 1e9, "preemptions": 1e5, "finished": 1e6}
"""Largest plausible rates of one pod, per second. Prompt tokens have a high one: cached tokens take no time."""


@dataclass(frozen=True, slots=True)
class Streak:
    """A run of consecutive metrics pages of a pod that show the same contradiction."""

    since: datetime
    pages: int = 1

    def lasts(self, now: datetime, seconds: float = LASTING_SECONDS) -> bool:
        """Return True once the contradiction has lasted for `seconds` and enough pages to count."""
        return self.pages >= LASTING_PAGES and (now - self.since).total_seconds() >= seconds


@dataclass(frozen=True, slots=True)
class Known:
    """State of a pod between scrapes: its last metrics page, and how long its contradictions have lasted."""

    time: datetime
    page: PodMetrics
    odd: Mapping[str, Streak] = field(default_factory=dict)
    stalls: Mapping[str, Streak] = field(default_factory=dict)
    """The pod's stalled engines, by name."""


def plausible_sample(
    time: datetime,
    known: Mapping[str, Known],
    pages: Mapping[str, PodMetrics],
    *,
    unanswered: int = 0,
    gpus: Mapping[str, str] | None = None,
) -> tuple[Sample, Mapping[str, Known]]:
    """Return the sample of one revision's pods at `time`, and what the next call must know of each pod.

    No single pod may make its revision look short of memory. So with three or more plausible pods, the highest number
    of waiting requests (or preemptions) is lowered to the second highest. The highest number of running requests is
    lowered only to ten times the second highest plus 64, because load may be uneven.

    `known` is the second result of the last call. `unanswered` pods gave no page. `gpus` has the known GPUs by pod.
    """
    flows = {pod: _flows(known.get(pod), page, time) for pod, page in pages.items()}
    now = {pod: _remember(known.get(pod), page, flows[pod], time) for pod, page in pages.items()}
    reasons = {pod: _implausible(now[pod], flows[pod], time) or _odd_capacity(pod, pages, gpus or {}) for pod in pages}
    implausible = tuple(f"{pod}: {why}" for pod, why in sorted(reasons.items()) if why)
    still = {
        pod: why
        for pod, doubt in reasons.items()
        if not doubt and (why := _stalled(now[pod].stalls, pages[pod], time)) is not None
    }
    left = {pod for pod, one in now.items() if one.stalls or _GAUGES & one.odd.keys()}
    plausible = sorted(pod for pod, why in reasons.items() if not why and pod not in left)
    kept = {pod: old for pod, old in known.items() if (time - old.time).total_seconds() <= LONGEST_GAP_SECONDS}
    sample = _together(time, [(pod, pages[pod], flows[pod]) for pod in plausible])
    left_out = len(pages) - len(plausible) - len(implausible) - len(still)
    told = {pod: page.factors for pod, page in pages.items() if page.factors}
    factors = _most(told.values()) or ""
    stored = {pod: page.dtype for pod, page in pages.items() if page.dtype}
    dtype = _most(stored.values()) or ""
    sample = replace(
        sample,
        implausible=implausible,
        unanswered=unanswered + left_out,
        stalled=tuple(f"{pod}: {why}" for pod, why in sorted(still.items())),
        observed_dtype=dtype,
        other_dtypes=tuple(sorted(other for other in stored.items() if other[1] != dtype))[:MOST_NAMED],
        recent_tokens=_most(page.recent_tokens for page in pages.values() if page.recent_tokens is not None),
        factors=factors,
        mixed=tuple(sorted(other for other in told.items() if other[1] != factors))[:MOST_NAMED],
    )
    return sample, {**kept, **now}


def _most(values: Iterable[_T]) -> _T | None:
    """Return the most common value, or the largest of equally common ones. Return None without values."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value), default=None)


def _flows(known: Known | None, page: PodMetrics, time: datetime) -> Flows:
    if known is None:
        return Flows()
    return increments(known.page, page, (time - known.time).total_seconds(), time.timestamp())


def _remember(known: Known | None, page: PodMetrics, flows: Flows, time: datetime) -> Known:
    if known is None:
        known = Known(time, page)
    odd: dict[str, Streak] = {}
    for name in _contradictions(known.page, page, flows):
        streak = known.odd.get(name)
        odd[name] = Streak(time) if streak is None else Streak(streak.since, streak.pages + 1)
    stalls = _watch(known.stalls, known.page, page, known.time) if flows.seconds else {}
    return Known(time, page, odd, stalls)


def _contradictions(before: PodMetrics, page: PodMetrics, flows: Flows) -> list[str]:
    tokens = flows.prompt_tokens + flows.generation_tokens
    found = []
    if page.running == 0 and page.usage > _HELD:
        found.append("held")
    # A request needs a block. Add one for rounding.
    if page.blocks and page.running > page.usage * page.blocks + 1:
        found.append("crowded")
    free = (1 - before.usage) * page.capacity_tokens
    if flows.preemptions > 0 and max(before.usage, page.usage) < _FAR_FROM_FULL and tokens < free / 2:
        found.append("preempted")
    return found


def _watch(known: Mapping[str, Streak], before: PodMetrics, page: PodMetrics, since: datetime) -> Mapping[str, Streak]:
    """Return the streak of each engine that makes no progress, by name. `before` is the pod's page at `since`."""
    old = {} if restarted(before, page) else {rank.name: rank for rank in before.engines}
    streaks = {}
    for rank in page.engines:
        last = old.get(rank.name)
        if last is not None and rank.running + rank.waiting > 0 and (last.done, last.usage) == (rank.done, rank.usage):
            streak = known.get(rank.name, Streak(since, 0))
            streaks[rank.name] = Streak(streak.since, streak.pages + 1)
    return streaks


def _stalled(known: Mapping[str, Streak], page: PodMetrics, time: datetime) -> str | None:
    """Describe an engine that has made no progress for STALLED_SECONDS, or return None."""
    for rank in page.engines:
        streak = known.get(rank.name)
        if streak is not None and streak.lasts(time, STALLED_SECONDS):
            who, seconds = f"{rank.name}: " if rank.name else "", (time - streak.since).total_seconds()
            return (
                f"{who}{rank.running:.0f} requests run and {rank.waiting:.0f} wait, and for {seconds:.0f} s no token "
                "was generated and no request ended"
            )
    return None


def _implausible(now: Known, flows: Flows, time: datetime) -> str | None:
    page = now.page
    for name, most in _MOST_A_SECOND.items():
        rate = getattr(flows, name) / flows.seconds if flows.seconds else 0.0
        if rate > most:
            return f"{name.replace('_', ' ')}: {rate:.3g} a second, and no engine does more than {most:.0e}"
    words = {
        "held": f"KV use is {page.usage:.0%} while nothing runs",
        "crowded": f"{page.running:.0f} requests run in {page.usage * page.blocks:.0f} blocks",
        "preempted": f"requests are preempted while KV use is {page.usage:.0%}, with too few tokens to fill the rest",
    }
    for name, streak in now.odd.items():
        if streak.lasts(time):
            return f"{words[name]}, for {(time - streak.since).total_seconds():.0f} s"
    return None


def _odd_capacity(pod: str, pages: Mapping[str, PodMetrics], gpus: Mapping[str, str]) -> str | None:
    mine = pages[pod].capacity_tokens
    others = [p.capacity_tokens for name, p in pages.items() if name != pod and gpus.get(name) == gpus.get(pod)]
    if not mine or len([c for c in others if c]) < ENOUGH_TO_COMPARE - 1:
        return None
    usual = median(c for c in others if c)
    if usual / 2 <= mine <= usual * 2:
        return None
    return f"capacity is {mine} tokens while the other pods' median is {usual:.0f}"


def _together(time: datetime, pods: Sequence[tuple[str, PodMetrics, Flows]]) -> Sample:
    if not pods:
        return Sample(_whole(time), 0, 0.0, 0.0, 0.0, 0, "")
    pages = [page for _, page, _ in pods]
    weights = [page.capacity_tokens or 1 for page in pages]
    flows = Flows.together([flow for _, _, flow in reversed(pods)])
    engines = [(f"{pod} {one.name}".rstrip(), one.usage, one.waiting) for pod, page, _ in pods for one in page.engines]
    return Sample(
        time=_whole(time),
        pods=len(pods),
        usage=sum(page.usage * weight for page, weight in zip(pages, weights, strict=True)) / sum(weights),
        running=_cut([page.running for page in pages], times=10, more=64),
        waiting=_cut([page.waiting for page in pages]),
        capacity_tokens=sum(page.capacity_tokens for page in pages),
        observed_dtype="",
        flows=replace(flows, preemptions=_cut([flow.preemptions for _, _, flow in pods])),
        spread=Spread.of(engines),
    )


def _whole(time: datetime) -> datetime:
    """Cut a time to whole seconds, as decisions do, so that no sample is later than its reconcile."""
    return time.replace(microsecond=0)


def _cut(values: Sequence[float], *, times: float = 1, more: float = 0) -> float:
    """Return the sum of `values`, after lowering the highest to at most `times` the second highest plus `more`."""
    if len(values) < ENOUGH_TO_COMPARE:
        return sum(values)
    second, highest = sorted(values)[-2:]
    return sum(values) - highest + min(highest, times * second + more)
