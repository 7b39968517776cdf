"""Metrics pages of a revision's pods, and the scrape loop that passes them to `plausible_sample`."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from kvpilot_operator.mesh import Identity
from kvpilot_operator.observe.plausible import Known, plausible_sample
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Sample

T0 = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
START = T0.timestamp() - 3600
IDLE = PodMetrics(0.0, 0, 0, 16_000, 1000, "auto", process_start=START)
BUSY = replace(IDLE, usage=0.6, running=8)


def at(seconds: float) -> datetime:
    """Return the time this many seconds after the first scrape."""
    return T0 + timedelta(seconds=seconds)


class ScrapeLoop:
    """Loop that calls plausible_sample as the scraper does."""

    def __init__(self) -> None:
        self.known: Mapping[str, Known] = {}

    def scrape(self, seconds: float, pages: Mapping[str, PodMetrics], **more: object) -> Sample:
        """Judge one scrape, taken at this second, with these pages."""
        sample, self.known = plausible_sample(at(seconds), self.known, pages, **more)  # type: ignore[arg-type]
        return sample

    def watch(self, pages: Callable[[int], Mapping[str, PodMetrics]], count: int) -> list[Sample]:
        """Run `count` scrapes, one every five seconds. `pages` gets the number of the scrape."""
        return [self.scrape(5 * i, pages(i)) for i in range(count)]


def busy(i: int) -> PodMetrics:
    """Return page number `i` of an engine under constant load."""
    return counted(BUSY, generation_tokens=1000 * i)


def counted(page: PodMetrics, **totals: float | Histogram) -> PodMetrics:
    """Return the metrics page with these counter values."""
    return replace(page, totals=replace(page.totals, **totals))  # type: ignore[arg-type]


@asynccontextmanager
async def scraping(identity: Identity | None = None) -> AsyncIterator[Scraper]:
    """Yield a Scraper, and close it at the end."""
    scraper = Scraper(identity)
    try:
        yield scraper
    finally:
        await scraper.close()


def ignore(work: int) -> None:
    """Do nothing: a callback for the work of a scrape, in tests that do not limit it."""
