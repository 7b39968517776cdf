"""Fetch the engines' metrics pages, within limits on time, size, memory and concurrency."""

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import aiohttp

from kvpilot_formats.untrusted import shown
from kvpilot_operator import budget
from kvpilot_operator.backoff import Backoff
from kvpilot_operator.errors import NoIdentity, ScrapeError, ScrapeTimeout
from kvpilot_operator.mesh import Identity
from kvpilot_operator.observe.page import PageReader
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes.engine_http import EngineConnector

# Limit of the time for a whole answer, so that a server that sends a byte a second cannot block a scrape.
TIMEOUT_SECONDS = 5.0
_EXCERPT = 200


class Scraper:
    """A client for engines' metrics pages. Its owner must close it. `identity` is for engines that require TLS.

    The client uses no proxy from the environment and no cookies. It accepts no compressed answers, because a few KiB
    may unpack to gigabytes.
    """

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity
        self._permits = budget.Permits(budget.METRICS)
        self._steps = asyncio.Semaphore(budget.METRICS_STEPS)
        self._http = aiohttp.ClientSession(
            connector=EngineConnector(limit=0, socket_factory=_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=budget.METRICS_CHUNK_BYTES,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def scrape(self, service: ServiceKey, url: str, spend: Callable[[int], None]) -> PodMetrics:
        """Fetch and parse one engine's page. Every failure is a ScrapeError that names the address.

        Pass the page's work (`PageReader.work`) to `spend`, even after a failure.
        """
        page, address = PageReader(), f"{url}/metrics"
        try:
            async with (
                self._permits.of(service.namespace),
                asyncio.timeout(TIMEOUT_SECONDS) as limit,
                self._http.get(address, allow_redirects=False, ssl=self.tls(address) or True) as answer,
            ):
                _refuse(answer)
                async for chunk in answer.content.iter_chunked(budget.METRICS_CHUNK_BYTES):
                    await self._feed(page, chunk, limit)
                return page.close()
        except (ScrapeError, NoIdentity) as error:
            raise ScrapeError(f"{address}: {error}") from error
        except TimeoutError as error:
            raise ScrapeTimeout(f"{address}: no whole page within {TIMEOUT_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The text may include data from the server, so make it printable and cut it.
            raise ScrapeError(f"{address}: {type(error).__name__}: {shown(str(error))[:_EXCERPT]}") from error
        finally:
            spend(page.work)

    async def load(self, service: ServiceKey, url: str) -> tuple[float, float]:
        """Return how many requests wait for room in one pod, and how many run.

        Without a usable page, both numbers are 0. If the engine is too slow to send the page, both are 1.
        """
        try:
            # Do not charge the service for this page: a probe asks for few of them.
            page = await self.scrape(service, url, lambda _: None)
        except ScrapeTimeout:
            return 1.0, 1.0
        except ScrapeError:
            return 0.0, 0.0
        return page.waiting, page.running

    async def find(self, service: ServiceKey, url: str) -> PodMetrics | None:
        """Return the numbers of one engine's page, or None without a usable page."""
        try:
            return await self.scrape(service, url, lambda _: None)
        except ScrapeError:
            return None

    async def loaded(self, service: ServiceKey, url: str) -> float:
        """Return the number of tokens that an engine has loaded through its KV connector; NaN if it is unknown."""
        page = await self.find(service, url)
        return math.nan if page is None else page.totals.host_hits

    def tls(self, url: str) -> ssl.SSLContext | None:
        """Return the TLS context for this address, or None for plain HTTP. Raise NoIdentity without certificates."""
        return self.identity.tls() if self.identity is not None and url.startswith("https:") else None

    async def _feed(self, page: PageReader, chunk: bytes, limit: asyncio.Timeout) -> None:
        """Pass a chunk of bytes to the parser in steps, and let other ready tasks run between them.

        The engine's time limit stands still meanwhile, because the engine did not cause this wait.
        """
        clock = asyncio.get_running_loop().time
        came, until = clock(), limit.when() or 0.0
        limit.reschedule(None)
        steps, more = page.steps(chunk), True
        while more:
            async with self._steps:
                more = next(steps, steps) is None
                await asyncio.sleep(0)
        limit.reschedule(until + clock() - came)


def _refuse(answer: aiohttp.ClientResponse) -> None:
    """Raise ScrapeError for an answer that is not a metrics page, or is too large."""
    if answer.status != 200:
        raise ScrapeError(f"HTTP {answer.status}")
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ScrapeError(f"the page is encoded ({shown(encoding)[:_EXCERPT]}), though plain text was asked for")
    if (answer.content_length or 0) > budget.METRICS.read_bytes:
        raise ScrapeError(f"{answer.content_length} bytes, more than {budget.METRICS.read_bytes}")


def _socket(address: aiohttp.connector.AddrInfoType) -> socket.socket:
    """Make a socket with a bounded receive buffer, because its memory counts towards the container's limit."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, budget.METRICS_SOCKET_BYTES)
    return made


# The first failure causes no pause, because it may be chance.
BACKOFF = Backoff(2.0, 30.0)


@dataclass(frozen=True, slots=True)
class _Failed:
    times: int
    until: float
    why: str


class ScrapeThrottle:
    """A limit on the scrapes of one service. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._failed: dict[str, _Failed] = {}
        self._asked = 0
        self._paid_at = 0.0

    @property
    def backed_off(self) -> Mapping[str, str]:
        """Last error by pod, for pods whose scrapes failed more than once in a row. They are scraped less often."""
        return {pod: one.why for pod, one in self._failed.items() if one.times > 1}

    def due(self, pods: Collection[str], now: float) -> list[str]:
        """Return those of `pods` to scrape now. Forget the failures of all other pods."""
        for gone in self._failed.keys() - pods:
            del self._failed[gone]
        if now < self._paid_at:
            return []
        due = [pod for pod in pods if pod not in self._failed or self._failed[pod].until <= now]
        self._asked = len(due)
        return due

    def spend(self, work: int, now: float) -> None:
        """Charge the work of parsing a metrics page, even an invalid one, to the whole service.

        The service's next scrape waits until its pods' common budget covers the work. If only the pod with a large page
        waited, that pod would look as if it did not answer.
        """
        self._paid_at = max(self._paid_at, now) + work / (budget.METRICS_WORK_PER_SECOND * max(1, self._asked))

    def answered(self, pod: str) -> None:
        """Forget a pod's failures, because its metrics page was readable."""
        self._failed.pop(pod, None)

    def failed(self, pod: str, now: float, why: str) -> None:
        """Count a pod's failed scrape. From the second one in a row on, scrape the pod less often."""
        known = self._failed.get(pod)
        times = known.times + 1 if known is not None else 1
        pause = BACKOFF.pause(times - 2) if times > 1 else 0.0
        self._failed[pod] = _Failed(times, now + pause, why)
