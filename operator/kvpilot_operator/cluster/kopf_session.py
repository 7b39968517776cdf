"""kopf's connection to the API server: our sockets, the official client's credentials, and no failure that is final.

kopf ends an operator whose watch is refused (401, 403, 404, 410), that gets an error event other than 410 or an answer
that is no JSON, and asks a server that ends every watch at once for the next one without a pause. All of these pass by
themselves or when somebody mends the cluster: here they become a broken connection, after which kopf lists or watches
again (docs/upstream/kopf-watch-errors.patch).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import aiohttp
import kopf
import msgspec
from kubernetes.aio.client import ApiClient

from kvpilot_operator.budget import whole_lines
from kvpilot_operator.cluster.fence import WriteFence
from kvpilot_operator.cluster.objects import Object, path_of
from kvpilot_operator.cluster.transport import REMEDIES, OnRequest, connector

log = logging.getLogger(__name__)

_SHORTEST_WATCH_SECONDS = 1.0
_PAUSE_SECONDS = 3.0
_GONE = b'{"type":"ERROR","object":{"code":410}}\n'


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str
    name: str = ""
    namespace: str = ""


class _Thing(msgspec.Struct):
    metadata: _Metadata


class _List(msgspec.Struct):
    items: list[_Thing]


class _Failure(msgspec.Struct):
    code: int = 500
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


@dataclass(eq=False)
class KopfSession:
    """A middleware of kopf's aiohttp session. `listed` is called with a namespace that kopf has listed."""

    api: ApiClient
    fence: WriteFence
    on_request: OnRequest
    api_version: str
    kind: str
    namespaces: Sequence[str]
    listed: Callable[[str], None]

    def __post_init__(self) -> None:
        self._collections = {
            path_of(self.api_version, self.kind, namespace): namespace for namespace in self.namespaces
        }
        self._unreported: set[str] = set()
        self._watched: dict[str, float] = {}

    def login(self) -> kopf.AiohttpSession:
        """What kopf takes for credentials: a session of its own, that it closes."""
        session = aiohttp.ClientSession(
            connector=connector(self.api.rest_client.ssl_context),
            headers={"User-Agent": self.api.user_agent},
            proxy=self.api.configuration.proxy,
            trust_env=False,
            middlewares=(self._ask,),
        )
        return kopf.AiohttpSession(aiohttp_session=session, server=self.api.configuration.host)

    async def _ask(self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        token = (await self.api.configuration.auth_settings()).get("BearerToken")
        if token is not None:
            request.headers[token["key"]] = token["value"]
        path = request.url.path
        if request.method != "GET":
            with self.fence.write(request.method, path) as seconds:
                async with asyncio.timeout(seconds):
                    return await send(request)
        if path not in self._collections:
            return await _checked(await send(request), Object)
        try:
            if "watch" in request.url.query:
                return await self._watch(path, request, send)
            response = await _checked(await self._timed("LIST", request, send), _List)
            if response.status == 200:
                self._unreported.add(path)
            return response
        except aiohttp.ClientPayloadError as error:
            log.warning("%s is not watched, again in %g s: %s", self.kind, _PAUSE_SECONDS, error)
            await asyncio.sleep(_PAUSE_SECONDS)
            raise

    async def _watch(
        self, path: str, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if path in self._unreported:
            self._unreported.discard(path)
            self.listed(self._collections[path])
        now = time.monotonic()
        wait = self._watched.get(path, now - _SHORTEST_WATCH_SECONDS) + _SHORTEST_WATCH_SECONDS - now
        self._watched[path] = now + max(0.0, wait)
        await asyncio.sleep(max(0.0, wait))
        response = await self._timed("WATCH", request, send)
        if response.status == 410:
            response.release()
            response.status, response.content = 200, _Gone(response.content)  # type: ignore[assignment]  # what kopf asks of it
        elif response.status == 200:
            response.content = _Events(response.content)  # type: ignore[assignment]
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
            self.on_request(verb, self.kind, status, time.perf_counter() - began)
        return response


def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raise for an answer that kopf would end at; what it tries again by itself (429, 5xx) is left to it."""
    if response.status == 200 or response.status == 429 or response.status >= 500:
        return
    response.close()
    raise aiohttp.ClientPayloadError(f"{response.url.path}: HTTP {response.status}{REMEDIES.get(response.status, '')}")


async def _checked(response: aiohttp.ClientResponse, kind: type) -> aiohttp.ClientResponse:
    """An answer that kopf can read, whose body is read; `kind` is what it needs of it."""
    if kind is _List:
        _refuse(response)
    elif response.status == 401:
        raise aiohttp.ClientConnectionError(f"{response.url.path}: HTTP 401{REMEDIES[401]}")
    if response.status == 200:
        try:
            msgspec.json.decode(await response.read(), type=kind)
        except msgspec.DecodeError as error:
            broken = aiohttp.ClientPayloadError if kind is _List else aiohttp.ClientConnectionError
            raise broken(f"{response.url.path}: the answer is not what it should be: {error}") from None
    return response


class _Stream:
    """What kopf reads a watch from; aiohttp asks the rest of the stream that it takes the place of."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> object:
        return getattr(self._content, name)


class _Events(_Stream):
    """The events of a watch as kopf reads them, up to one that kopf would end at: the connection is broken there."""

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Whole lines, one JSON event each."""
        async for line in whole_lines(self._content.iter_chunked(size)):
            try:
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    failure = msgspec.json.decode(event.object, type=_Failure)
                    if failure.code != 410:
                        raise aiohttp.ClientPayloadError(f"error event {failure.code}: {failure.message[:300]}")
                elif event.type == "BOOKMARK":
                    msgspec.json.decode(event.object, type=_Thing)
                else:
                    metadata = msgspec.json.decode(event.object, type=_Thing).metadata
                    if not (metadata.name and metadata.namespace):
                        raise aiohttp.ClientPayloadError(f"an event about nothing: {line[:300]!r}")
            except msgspec.DecodeError as error:
                raise aiohttp.ClientPayloadError(f"no event but {line[:300]!r}: {error}") from None
            yield line + b"\n"


class _Gone(_Stream):
    """The stream of a watch whose version the server does not know any more."""

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """The event that makes kopf list anew."""
        yield _GONE
