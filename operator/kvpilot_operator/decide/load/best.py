"""The best that a service did lately: requests a replica finished, and what the prefix cache held of their prompts.

An engine that has thrown out its cached prefixes does less than it did: what it could do lies before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpilot_operator.decide.load.window import SPAN, Sums
from kvpilot_operator.state.samples import Flows, Sample

# Prefixes are thrown out where the prefix cache holds this much less of the prompts than it did lately.
_LOST_REUSE = 0.2


def best_rate(samples: Sequence[Sample], seconds: int) -> tuple[float | None, float | None]:
    """The most requests a second that one replica finished, and the prompt tokens of one that no cache held then."""
    found = _best(samples, seconds, lambda f: (f.finished, f.seconds, computed(f)))
    return (None, None) if found is None else (found[0] / found[1], found[2] / found[0] if found[0] else None)


def computed(flows: Flows | Sums) -> float:
    """Prompt tokens that no cache held."""
    if isinstance(flows, Sums):
        return max(0.0, flows.queried - flows.hits) if flows.queried else flows.prompted
    held = flows.prefix_hits + flows.host_hits
    return max(0.0, flows.prefix_queries - held) if flows.prefix_queries else flows.prompt_tokens


def thrown_out(seen: Sums, samples: Sequence[Sample], seconds: int) -> str | None:
    """Why prompts that are computed now are a lack of memory: until lately the prefix cache held more of them.

    Not where the window wrote less than the cache has free: then all that it saw is there, and users ask otherwise.
    """
    if seen.reuse is None or not (seen.waiting or seen.preempted):
        return None
    if computed(seen) + seen.generated < seen.capacity - seen.held:
        return None
    found = _best(samples, seconds, lambda f: (f.prefix_hits + f.host_hits, f.prefix_queries, 0.0))
    before = found[0] / found[1] if found is not None else 0.0
    if before - seen.reuse < _LOST_REUSE:
        return None
    return (
        f"the prefix cache holds {seen.reuse * 100:.0f}% of the prompts' tokens and held {before * 100:.0f}% before: "
        "prefixes are thrown out and computed again"
    )


def _best(
    samples: Sequence[Sample], seconds: int, of: Callable[[Flows], tuple[float, float, float]]
) -> tuple[float, float, float] | None:
    """Three sums over the stretch, as long as the window, in which the first is the most of the second."""
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
