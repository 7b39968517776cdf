"""What happened on one pod between two of its pages. Pure."""

from __future__ import annotations

from kvpilot_operator.observe.page import PodMetrics
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.snapshot import Flows

# Two pages further apart say nothing of the time that decisions look at: the later one counts as a first page.
LONGEST_GAP_SECONDS = 600.0
# A process' start is derived from the host's boot time, which a clock that is set moves by a little.
_START_JITTER_SECONDS = 5.0


def restarted(before: PodMetrics, after: PodMetrics) -> bool:
    """True where both pages say when their process started, and they say it of two processes."""
    if before.process_start is None or after.process_start is None:
        return False
    return abs(after.process_start - before.process_start) > _START_JITTER_SECONDS


def increments(before: PodMetrics, after: PodMetrics, elapsed: float, now: float) -> Flows:
    """The flows between two pages `elapsed` seconds apart; `now` is the later one's Unix time.

    After a restart everything counts from zero. Without a word about the process, a counter that fell was reset and
    counts from zero, and the others go on, as PromQL's increase() has it: that never counts what happened before.
    """
    if not 0 < elapsed <= LONGEST_GAP_SECONDS:
        return Flows()
    fresh = restarted(before, after)
    old, new = before.totals, after.totals

    def step(was: float, now_is: float) -> float:
        return now_is if fresh or now_is < was else now_is - was

    def grown(was: Histogram, now_is: Histogram) -> Histogram:
        return _grown(was, now_is, fresh)

    # Request-seconds fall in vLLM when a request fails before its first token: the count of requests tells a reset.
    reset = fresh or new.finished < old.finished
    errors = step(old.errors, new.errors)
    # An engine's error is an HTTP 500, too, unless the answer had begun: neither count alone has them all.
    failed = max(errors, step(old.server_errors, new.server_errors))
    return Flows(
        seconds=_covered(after, elapsed, now) if fresh else elapsed,
        preemptions=step(old.preemptions, new.preemptions),
        prompt_tokens=step(old.prompt_tokens, new.prompt_tokens),
        generation_tokens=step(old.generation_tokens, new.generation_tokens),
        prefix_queries=step(old.prefix_queries, new.prefix_queries),
        prefix_hits=step(old.prefix_hits, new.prefix_hits),
        finished=step(old.finished, new.finished) + failed - errors,
        failed=failed,
        prefill_seconds=max(0.0, new.prefill_seconds - (0.0 if reset else old.prefill_seconds)),
        decode_seconds=max(0.0, new.decode_seconds - (0.0 if reset else old.decode_seconds)),
        ttft=grown(old.ttft, new.ttft),
        itl=grown(old.itl, new.itl),
        prompt_lengths=grown(old.prompt_lengths, new.prompt_lengths),
        generation_lengths=grown(old.generation_lengths, new.generation_lengths),
    )


def _grown(was: Histogram, now_is: Histogram, fresh: bool) -> Histogram:
    if not fresh and was.bounds == now_is.bounds:
        counts = tuple(b - a for a, b in zip(was.counts, now_is.counts, strict=True))
        if not any(counts):
            return Histogram()
        if min(counts) >= 0:
            return Histogram(now_is.bounds, counts, max(0.0, now_is.total - was.total))
    return Histogram(now_is.bounds, now_is.counts, max(0.0, now_is.total)) if now_is.count else Histogram()


def _covered(after: PodMetrics, elapsed: float, now: float) -> float:
    """Seconds that a new process has run, as far as the clocks of pod and operator agree."""
    age = now - (after.process_start or 0.0)
    return age if 0 < age < elapsed else elapsed
