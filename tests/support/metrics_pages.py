"""Parser of a whole metrics page at once."""

from kvpilot_operator.observe.page import PageReader
from kvpilot_operator.observe.pod_metrics import PodMetrics


def parse_page(text: str) -> PodMetrics:
    """Parse a whole metrics page. Raise ScrapeError as `PageReader` does."""
    reader = PageReader()
    for _ in reader.steps(text.encode("utf-8", errors="replace")):
        pass
    return reader.close()
