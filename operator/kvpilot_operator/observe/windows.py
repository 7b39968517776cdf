"""The recent scrapes of every revision, kept in memory: what a restart forgets it measures again."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

from kvpilot_operator.state.snapshot import Sample, ServiceKey

# The schema's longest sustained window is an hour.
_KEEP = timedelta(hours=1)


class Windows:
    """Samples by service and revision, oldest first, at most an hour of them."""

    def __init__(self) -> None:
        self._series: dict[ServiceKey, dict[str, deque[Sample]]] = {}

    def add(self, key: ServiceKey, revision: str, sample: Sample) -> None:
        """Append a scrape and drop what is too old."""
        series = self._series.setdefault(key, {}).setdefault(revision, deque())
        series.append(sample)
        while series[0].time < sample.time - _KEEP:
            series.popleft()

    def of(self, key: ServiceKey) -> dict[str, tuple[Sample, ...]]:
        """All series of a service."""
        return {name: tuple(series) for name, series in self._series.get(key, {}).items()}

    def keep_only(self, key: ServiceKey, revisions: set[str]) -> None:
        """Forget revisions that no longer run."""
        series = self._series.get(key, {})
        for name in [name for name in series if name not in revisions]:
            del series[name]

    def forget(self, key: ServiceKey) -> None:
        """Forget a deleted service."""
        self._series.pop(key, None)
