"""Judge latency objectives (spec.scaling.objectives) by vLLM's histograms over the workload's window.

An objective is missed if both halves of the window miss it, met if the whole window meets it, else undecided.
"""

import math
from collections.abc import Sequence

from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.api.words import ObjectiveState
from kvpilot_operator.decide.load.window import plausible
from kvpilot_operator.state.decision import ObjectiveResult
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample

# Each half of the window needs this many samples, and one of them must lie beyond the percentile: p99 needs 100.
LEAST = 20.0


def judge_objectives(
    objectives: Sequence[Objective], window: Sequence[Sample], *, sustained: bool
) -> tuple[ObjectiveResult, ...]:
    """Judge each objective by `window` (oldest first).

    If the window is not `sustained` (too short a part of it was observed), each objective has the state NoSamples.
    """
    flows = [s.flows for s in window if plausible(s)] if objectives and sustained else []
    half, found = len(flows) // 2, []
    for one in objectives:
        halves = [latencies(part, one) for part in (flows[:half], flows[half:])]
        q, limit = one.percentile / 100, one.milliseconds / 1000
        seconds = Histogram.together(halves).quantile(q)
        if min(h.count for h in halves) < max(LEAST, 100 / (100 - one.percentile)) or math.isnan(seconds):
            found.append(ObjectiveResult(one, ObjectiveState.NO_SAMPLES))
        elif min(h.quantile(q) for h in halves) > limit:
            found.append(ObjectiveResult(one, ObjectiveState.MISSED, seconds))
        else:
            state = ObjectiveState.HELD if seconds <= limit else ObjectiveState.UNSETTLED
            found.append(ObjectiveResult(one, state, seconds))
    return tuple(found)


def latencies(flows: Sequence[Flows], objective: Objective) -> Histogram:
    """Return the histogram of the objective's latency over all flows."""
    return Histogram.together([f.ttft if objective.metric == "TTFT" else f.itl for f in flows])
