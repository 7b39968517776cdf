"""Find engines that have work and do none of it, from two pages of a pod and what was seen before them. Pure.

Gauges of an engine that hangs stay where they were: they look like a full cache that requests wait for. Counters tell:
no token was made, and no request ended. vLLM counts a prompt when it ends, so a long one moves no counter either; but
it fills blocks meanwhile. So an engine stands still where neither its counters move nor its use does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from kvpilot_operator.observe.pod_metrics import PodMetrics, Rank, restarted

# A contradiction that lasts this long, over so many pages in a row at least, is not a coincidence of the moment.
LASTING_SECONDS = 15.0
LASTING_PAGES = 4
# Longer than other contradictions: a prompt fills no more blocks where every layer has a window or a state.
STALLED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Streak:
    """Consecutive pages with the same contradiction."""

    since: datetime
    pages: int = 1

    def lasts(self, now: datetime, seconds: float = LASTING_SECONDS) -> bool:
        """Return True once it is not a coincidence."""
        return self.pages >= LASTING_PAGES and (now - self.since).total_seconds() >= seconds


def watch(known: Mapping[str, Streak], before: PodMetrics, page: PodMetrics, since: datetime) -> Mapping[str, Streak]:
    """Return how long each engine of a pod has stood still, by its name; `before` is the pod's page of `since`."""
    old = {} if restarted(before, page) else {rank.name: rank for rank in before.engines}
    streaks = {}
    for rank in page.engines:
        last = old.get(rank.name)
        if last is not None and rank.running + rank.waiting > 0 and (last.done, last.usage) == (rank.done, rank.usage):
            streak = known.get(rank.name, Streak(since, 0))
            streaks[rank.name] = Streak(streak.since, streak.pages + 1)
    return streaks


def stalled(known: Mapping[str, Streak], page: PodMetrics, time: datetime) -> str | None:
    """Name an engine that has done nothing for too long to be a coincidence; None where none has."""
    for rank in page.engines:
        streak = known.get(rank.name)
        if streak is not None and streak.lasts(time, STALLED_SECONDS):
            return _told(rank, (time - streak.since).total_seconds())
    return None


def _told(rank: Rank, seconds: float) -> str:
    who = f"{rank.name}: " if rank.name else ""
    return (
        f"{who}{rank.running:.0f} requests run and {rank.waiting:.0f} wait, and for {seconds:.0f} s no token was made "
        "and none of them ended"
    )
