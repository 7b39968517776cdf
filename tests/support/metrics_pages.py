"""A whole page of metrics, read at once."""

from __future__ import annotations

from kvpilot_operator.observe.page import PageReader
from kvpilot_operator.observe.pod_metrics import PodMetrics


def parse_page(text: str) -> PodMetrics:
    """Read it; raises ScrapeError, as `PageReader` does."""
    reader = PageReader()
    for _ in reader.steps(text.encode("utf-8", errors="replace")):
        pass
    return reader.close()
