"""Add up a window of scrapes: work, means of the load, the observed time, and signs of evicted prefixes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from kvpilot_operator.api.kv_cache import Pressure
from kvpilot_operator.state.samples import Flows, Sample

# Scrapes rarely fall on a window's edges, so a window counts as full if scrapes cover this share of it.
SPAN = 0.8
# The longest time between two scrapes that still counts as observed, in seconds.
STALE_SECONDS = 60
GAP = timedelta(seconds=STALE_SECONDS)
# A scrape represents the service only if at least this share of its ready pods gave plausible metrics.
_ENOUGH = 2 / 3
# Prompts dominate if prefill takes half of the requests' time. They also dominate if a replica computes prompts half of
# the time, and an engine step has at least 1,024 prompt tokens. The reason for 1,024: while a GPU of 2020 to 2026
# reads the weights once, it can compute 200 to 300 tokens (data sheets: peak FLOP/s over bytes/s). To read a full KV
# cache as well takes about four times as long. So from about 1,000 prompt tokens on, prompts take most of a step.
_PREFILL_SHARE = 0.5
_PROMPTS_IN_HAND = 0.5
_PROMPT_TOKENS_A_STEP = 1024.0


@dataclass(slots=True)
class Sums:
    """Sums over a window of scrapes. Only `usage`, `held` (KV tokens in use), `running` and `waiting` are means."""

    count: int = 0
    pods: int = 0
    capacity: int = 0
    covered: float = 0.0
    """Observed seconds: the times between scrapes, without gaps longer than GAP."""
    high: int = 0
    """Number of scrapes with KV use at or above highPercent."""
    queued: int = 0
    """Number of scrapes with at least waitingPerReplica waiting requests per replica."""
    uneven: int = 0
    """Number of scrapes in which requests wait for one full engine while other engines have room."""
    usage: float = 0.0
    held: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    growth: float = 0.0
    """Waiting requests at the end, minus waiting requests at the start."""
    flows: Flows = field(default_factory=Flows)
    """Work of the engines in the window, without histograms."""

    @property
    def preemptions(self) -> float:
        """Return how many requests a replica preempted per minute."""
        return self.flows.preemptions * 60 / self.flows.seconds if self.flows.seconds else 0.0

    @property
    def reuse(self) -> float | None:
        """Return the share of prompt tokens found in a cache. Return None if no prompt was looked up."""
        return self.flows.hits / self.flows.prefix_queries if self.flows.prefix_queries else None

    @property
    def prompts_in_hand(self) -> float:
        """Return the mean number of prompts that a replica computes at a time; 0 if unknown."""
        return self.flows.prefill_seconds / self.flows.seconds if self.flows.seconds else 0.0

    @property
    def prompt_tokens_per_step(self) -> float:
        """Return the mean number of uncached prompt tokens in an engine step: their rate times the step's duration.

        A step generates one token of each request, so its duration is the time per token.
        """
        f = self.flows
        if not f.seconds or not f.generation_tokens:
            return 0.0
        return max(0.0, f.prompt_tokens - f.hits) / f.seconds * f.decode_seconds / f.generation_tokens

    @property
    def stands_still(self) -> bool:
        """Return True if the engines had work at every scrape and made no progress."""
        f = self.flows
        done = f.prompt_tokens + f.generation_tokens + f.finished + f.preemptions
        return f.seconds > 0 and not done and self.running + self.waiting > 0

    @property
    def mostly_prompts(self) -> bool:
        """Return True if prompts take most of the requests' time, and False if that is unknown."""
        prefill, decode = self.flows.prefill_seconds, self.flows.decode_seconds
        return prefill > 0 and prefill >= _PREFILL_SHARE * (prefill + decode)

    @property
    def always_prompts(self) -> bool:
        """Return True if a replica computes prompts most of the time, with many tokens in each engine step."""
        return self.prompts_in_hand >= _PROMPTS_IN_HAND and self.prompt_tokens_per_step >= _PROMPT_TOKENS_A_STEP


def plausible(s: Sample) -> bool:
    """Return True if enough ready pods gave plausible metrics for the scrape to represent the service."""
    if not s.implausible and not s.unanswered:
        return s.pods > 0
    return s.pods >= max(1.0, _ENOUGH * ready_pods(s))


def ready_pods(s: Sample) -> int:
    """Count the ready pods of a scrape, also those without plausible metrics. Skip stalled pods, which take no load."""
    return s.pods + len(s.implausible) + s.unanswered


def uneven(s: Sample, pressure: Pressure) -> bool:
    """Return True if requests wait for a full engine although other engines have room and no queue."""
    one, queue = s.spread, pressure.waiting_per_replica
    if one is None or not one.mean * 100 < pressure.high_percent <= one.usage * 100 or one.waiting < queue:
        return False
    return one.roomy > 0 and one.roomy_waiting < queue


def since_it_grew(samples: Sequence[Sample], start: int, end: int) -> int:
    """Return the index of the first sample since the newest replica answered. Earlier samples show fewer replicas."""
    ready = [ready_pods(s) + len(s.stalled) for s in samples[start:end]]
    if min(ready) == ready[-1]:
        return start
    return start + max(i for i in range(1, len(ready)) if ready[i - 1] < ready[i])


def add_up(window: Sequence[Sample], pressure: Pressure) -> Sums:
    """Add up a window that ends with a plausible scrape. Implausible scrapes are left out, and their time is a gap."""
    limit, queue = pressure.high_percent / 100, pressure.waiting_per_replica
    sums, before, first_waiting, s = Sums(), None, 0.0, window[-1]
    flows: list[Flows] = []
    for s in window:
        scale = 1.0
        if s.implausible or s.unanswered or not s.pods:
            if not plausible(s):
                continue
            scale = ready_pods(s) / s.pods
        if before is None:
            first_waiting = s.waiting * scale
        elif (gap := s.time - before) <= GAP:
            sums.covered += gap.total_seconds()
        before = s.time
        sums.count += 1
        sums.high += s.usage >= limit
        sums.uneven += uneven(s, pressure)
        sums.queued += s.waiting >= queue * s.pods
        sums.usage += s.usage
        sums.held += s.usage * s.capacity_tokens * scale
        sums.running += s.running * scale
        sums.waiting += s.waiting * scale
        if s.flows.seconds:
            flows.append(s.flows)
    sums.flows = Flows.counted(flows)
    sums.pods = ready_pods(s)
    sums.capacity = s.capacity_tokens * sums.pods // s.pods
    sums.growth = s.waiting * sums.pods / s.pods - first_waiting
    for name in ("usage", "held", "running", "waiting"):
        setattr(sums, name, getattr(sums, name) / sums.count)
    return sums


# Prefixes count as evicted if the share of prompt tokens found in the prefix cache falls by this much.
_LOST_REUSE = 0.2


def best_rate(samples: Sequence[Sample], seconds: int) -> tuple[float | None, float | None]:
    """Return one replica's best rate in requests per second, and the uncached prompt tokens per request at that rate.

    A rate is a mean over about `seconds`. Both values are None if unknown.
    """
    found = _best(samples, seconds, lambda f: (f.finished, f.seconds, f.computed))
    return (None, None) if found is None else (found[0] / found[1], found[2] / found[0] if found[0] else None)


def thrown_out(seen: Sums, samples: Sequence[Sample], seconds: int) -> str | None:
    """Return the evidence that prefixes were evicted, or None.

    The evidence is that the prefix cache held a larger share of the prompt tokens before. But if the window's new
    tokens fit into the free part of the cache, nothing was evicted: the share fell because the prompts have changed.
    """
    if seen.reuse is None or not (seen.waiting or seen.flows.preemptions):
        return None
    if seen.flows.computed + seen.flows.generation_tokens < seen.capacity - seen.held:
        return None
    found = _best(samples, seconds, lambda f: (f.hits, f.prefix_queries, 0.0))
    before = found[0] / found[1] if found is not None else 0.0
    if before - seen.reuse < _LOST_REUSE:
        return None
    return (
        f"the prefix cache holds {seen.reuse * 100:.0f}% of the prompts' tokens, and held {before * 100:.0f}% before: "
        "cached prefixes are evicted and computed again"
    )


def _best(
    samples: Sequence[Sample], seconds: int, of: Callable[[Flows], tuple[float, float, float]]
) -> tuple[float, float, float] | None:
    """Cut the samples into stretches of about `seconds`, and find the stretch with the best rate.

    The function `of` returns three numbers of a sample. A stretch's rate is its sum of the first number divided by its
    sum of the second. Return the three sums of the best stretch, or None.
    """
    best: tuple[float, float, float] | None = None
    sums, later = (0.0, 0.0, 0.0), samples[-1].time
    for s in reversed(samples):
        top, bottom, third = of(s.flows)
        sums = sums[0] + top, sums[1] + bottom, sums[2] + third
        if (later - s.time).total_seconds() >= SPAN * seconds:
            if sums[1] and (best is None or sums[0] * best[1] > best[0] * sums[1]):
                best = sums
            sums, later = (0.0, 0.0, 0.0), s.time
    return best
