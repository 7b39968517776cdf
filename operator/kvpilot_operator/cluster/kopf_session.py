"""A connection to the API server for kopf, with our sockets and the official client's credentials.

kopf ends the whole operator after HTTP 401, 403, 404 or 410, after an error event other than 410, or after an answer
that is not JSON. This session turns each of these into a broken connection, after which kopf only lists or watches
again (docs/upstream/kopf-watch-errors.patch).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import aiohttp
import kopf
import msgspec

from kvpilot_formats.untrusted import whole_lines
from kvpilot_operator.cluster.objects import Object, path_of
from kvpilot_operator.cluster.transport import REMEDIES, Event, Transport, connector

T = TypeVar("T")

log = logging.getLogger(__name__)

_SHORTEST_WATCH_SECONDS = 1.0
_PAUSE_SECONDS = 3.0
_GONE = b'{"type":"ERROR","object":{"code":410}}\n'

Listed = Callable[[str, Sequence[Object], str], None]
"""Callback for a complete list: namespace ("" for all), its objects, and the list's resourceVersion."""


class _Page(msgspec.Struct):
    items: list[Object]
    metadata: Object


class KopfSession:
    """A middleware for kopf's HTTP session, which watches one kind in some namespaces.

    After a 410, kopf lists again, but does not report objects that are missing from the new list. So this session also
    reads each list, and passes it to `listed` when it is complete.
    """

    def __init__(
        self, transport: Transport, api_version: str, kind: str, namespaces: Sequence[str], listed: Listed
    ) -> None:
        self._transport = transport
        self._kind = kind
        self._listed = listed
        self._collections = {path_of(api_version, kind, namespace): namespace for namespace in namespaces}
        self._pages: dict[str, list[Object]] = {}
        self._watched: dict[str, float] = {}

    def login(self) -> kopf.AiohttpSession:
        """Return a session that kopf accepts as credentials and closes itself."""
        api = self._transport.api
        session = aiohttp.ClientSession(
            connector=connector(api.rest_client.ssl_context),
            headers={"User-Agent": api.user_agent},
            proxy=api.configuration.proxy,
            trust_env=False,
            middlewares=(self._ask,),
        )
        return kopf.AiohttpSession(aiohttp_session=session, server=api.configuration.host)

    async def _ask(self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        token = (await self._transport.api.configuration.auth_settings()).get("BearerToken")
        if token is not None:
            request.headers[token["key"]] = token["value"]
        path = request.url.path
        if request.method != "GET":
            with self._transport.fence.write(request.method, path) as seconds:
                async with asyncio.timeout(seconds):
                    return await send(request)
        if path not in self._collections:
            return await self._discover(request, send)
        try:
            return await (self._watch if "watch" in request.url.query else self._list)(request, send)
        except aiohttp.ClientPayloadError as error:
            log.warning("watch of %s ended, again in %g s: %s", self._kind, _PAUSE_SECONDS, error)
            await asyncio.sleep(_PAUSE_SECONDS)
            raise

    async def _discover(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await send(request)
        if response.status == 401:
            raise aiohttp.ClientConnectionError(f"{request.url.path}: HTTP 401{REMEDIES[401]}")
        if response.status == 200:
            await _decoded(response, Object, aiohttp.ClientConnectionError)
        return response

    async def _list(self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        path = request.url.path
        response = await self._timed("LIST", request, send)
        _refuse(response)
        if response.status != 200:
            return response
        page = await _decoded(response, _Page, aiohttp.ClientPayloadError)
        if not all(map(_is_versioned, page.items)):
            raise aiohttp.ClientPayloadError(f"{path}: an item of the list has no resourceVersion")
        before = self._pages.get(path, []) if "continue" in request.url.query else []
        self._pages[path] = [*before, *page.items]
        if not page.metadata.get("continue"):
            self._listed(self._collections[path], self._pages.pop(path), str(page.metadata.get("resourceVersion", "")))
        return response

    async def _watch(self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        path, now = request.url.path, time.monotonic()
        wait = max(0.0, self._watched.get(path, -_SHORTEST_WATCH_SECONDS) + _SHORTEST_WATCH_SECONDS - now)
        self._watched[path] = now + wait
        await asyncio.sleep(wait)
        response = await self._timed("WATCH", request, send)
        if response.status == 410:
            response.release()
            response.status = 200
            response.content = _Lines(response.content, _gone())  # type: ignore[assignment]  # what kopf asks of it
        elif response.status == 200:
            response.content = _Lines(response.content, _checked(response.content))  # type: ignore[assignment]
        else:
            _refuse(response)
        return response

    async def _timed(
        self, verb: str, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        status, began = 0, time.perf_counter()
        try:
            response = await send(request)
            status = response.status
        finally:
            self._transport.on_request(verb, self._kind, status, time.perf_counter() - began)
        return response


def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raise ClientPayloadError for a status that would end kopf. Accept 200, and 429 and 5xx, which kopf retries."""
    if response.status == 200 or response.status == 429 or response.status >= 500:
        return
    response.close()
    raise aiohttp.ClientPayloadError(f"{response.url.path}: HTTP {response.status}{REMEDIES.get(response.status, '')}")


async def _decoded(response: aiohttp.ClientResponse, kind: type[T], broken: type[aiohttp.ClientError]) -> T:
    """Decode a body as `kind`, or raise `broken`. kopf can still read the body afterwards."""
    try:
        return msgspec.json.decode(await response.read(), type=kind)
    except msgspec.DecodeError as error:
        raise broken(f"{response.url.path}: the answer has an unexpected form: {error}") from None


class _Lines:
    """A replacement for a watch's stream, from which kopf reads `lines`. Other attributes are those of the stream."""

    def __init__(self, content: aiohttp.StreamReader, lines: AsyncIterator[bytes]) -> None:
        self._content = content
        self._lines = lines

    def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        """Return whole lines, one JSON event each."""
        return self._lines

    def __getattr__(self, name: str) -> object:
        return getattr(self._content, name)


async def _gone() -> AsyncIterator[bytes]:
    """Yield the event that makes kopf list again."""
    yield _GONE


async def _checked(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield a watch's events, and break the connection before an event that would end kopf."""
    async for line in whole_lines(content.iter_any()):
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError as error:
            raise aiohttp.ClientPayloadError(f"not an event: {line[:300]!r}: {error}") from None
        failed = event.type == "ERROR" and event.object.get("code") != 410
        if failed or (event.type != "ERROR" and not _is_versioned(event.object, named=event.type != "BOOKMARK")):
            raise aiohttp.ClientPayloadError(f"an event that kopf cannot take: {line[:300]!r}")
        yield line + b"\n"


def _is_versioned(obj: Object, *, named: bool = False) -> bool:
    metadata = obj.get("metadata")
    wanted = ("resourceVersion", *(("name", "namespace") if named else ()))
    return isinstance(metadata, dict) and all(isinstance(metadata.get(one), str) for one in wanted)
