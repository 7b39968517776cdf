"""Connections to engines, with two limits that aiohttp lacks: on interim (1xx) answers, and on bytes around a body."""

import asyncio
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import set_exception
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

from kvpilot_formats.untrusted import OverBudget, read_body
from kvpilot_probes.answers import excerpt
from kvpilot_probes.errors import EngineRefused, MalformedAnswer

# Largest size in bytes of an answer's head. vLLM's heads have 0.2 KiB, and a gateway adds about as much.
HEAD_BYTES = 32 * 1024
INTERIM_ANSWERS = 8
# Number of framing bytes that are allowed for each body byte. A chunk of one body byte needs five. vLLM's chunks have
# about 100 body bytes.
AROUND_A_BYTE = 8
_MAX_ERROR_BYTES = 4096
# Bytes per call of the parser. The limits are checked between calls.
_STEP_BYTES = 4 * 1024


class TooMuchAround(aiohttp.ClientError):
    """Error for a server that sends too many bytes around an answer's body."""


class _Answer(ResponseHandler):
    """HTTP protocol of one connection to an engine. It aborts the connection at the first answer beyond a limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._came = self._body = self._interim = 0
        self._refused: TooMuchAround | None = None

    def data_received(self, data: bytes) -> None:
        """Parse received bytes in steps, and check the limits after each step."""
        for start in range(0, len(data), _STEP_BYTES) if data else (0,):
            if self._refused is not None:
                return
            part = data[start : start + _STEP_BYTES]
            self._came += len(part)
            super().data_received(part)
            self._body = max(self._body, self._payload.total_bytes if self._payload is not None else 0)
            if self._came - self._body > HEAD_BYTES + AROUND_A_BYTE * self._body:
                self._refuse(f"{self._came - self._body} bytes around a body of {self._body}")

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Count interim (1xx) answers, and pass each answer on to the request that waits for it."""
        if 100 <= data[0].code < 200:
            self._interim += 1
            if self._interim > INTERIM_ANSWERS:
                self._refuse(f"more than {INTERIM_ANSWERS} interim answers")
        if self._refused is None:
            super().feed_data(data, size)

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        """Keep only the first error: after an abort, aiohttp also reports the connection as lost."""
        if self._refused in (None, exc):
            super().set_exception(exc, *cause)

    def _refuse(self, words: str) -> None:
        self._refused = error = TooMuchAround(f"{words}: no engine answers so")
        payload, transport = self._payload, self.transport
        self.set_exception(error)
        if payload is not None:
            set_exception(payload, error)
        if transport is not None:
            transport.abort()


class EngineConnector(aiohttp.TCPConnector):
    """Connector that opens a new connection for each request, because engines close idle connections within seconds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(force_close=True, **options)
        kind: type[ResponseHandler] = _Answer
        self._factory = partial(kind, loop=self._loop)


async def check(url: str, response: aiohttp.ClientResponse) -> None:
    """Raise `EngineRefused` with the start of the answer if its status is not 200."""
    if response.status == 200:
        return
    said = bytearray()
    async for chunk in response.content.iter_any():
        said += chunk
        if len(said) >= _MAX_ERROR_BYTES:
            break
    raise EngineRefused(url, response.status, excerpt(bytes(said)))


async def read_all(url: str, response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of an answer. Raise `MalformedAnswer` if it has more than `limit` bytes."""
    try:
        return await read_body(response.content.iter_any(), limit, url)
    except OverBudget as error:
        raise MalformedAnswer(str(error)) from error
