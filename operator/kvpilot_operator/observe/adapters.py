"""Which LoRA adapters an engine has loaded, as it says itself: at /v1/models they are models that have a parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvpilot_formats.untrusted import shown
from kvpilot_operator.budget import METRICS_WORK_BYTES
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServiceKey

_PATH = "/v1/models"
# A model takes some 500 bytes of it.
_MAX_BYTES = 64 * 1024


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Page:
    """Keeps an answer until it is whole."""

    def __init__(self) -> None:
        self._text = bytearray()

    @property
    def work(self) -> int:
        return len(self._text) // METRICS_WORK_BYTES

    def steps(self, chunk: bytes) -> Iterator[None]:
        if len(self._text) + len(chunk) > _MAX_BYTES:
            raise ScrapeError(f"more than {_MAX_BYTES} bytes")
        self._text += chunk
        yield

    def close(self) -> tuple[str, ...]:
        try:
            models = msgspec.json.decode(self._text, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ScrapeError(f"not a list of models: {error}") from error
        return tuple(shown(one.id) for one in models if one.parent is not None)


async def loaded(scraper: Scraper, service: ServiceKey, url: str, spend: Callable[[int], None]) -> tuple[str, ...]:
    """Names of the adapters that one engine of a service has loaded, in its order.

    `spend` is told the work that it took, in units of `Scraper.scrape`. Every failure is a ScrapeError that names the
    address.
    """
    page = _Page()
    try:
        return await scraper.read(service, url, page, _PATH)
    finally:
        spend(page.work)
