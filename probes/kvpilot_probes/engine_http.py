"""Connections to engines with limits on interim answers and chunk extensions, which aiohttp lacks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import set_exception
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

# vLLM's answers have a head of 0.2 KiB, and a gateway in front of one adds as much.
HEAD_BYTES = 32 * 1024
INTERIM_ANSWERS = 8
# Framing bytes allowed per body byte. Even a chunk of one byte has five; streamed tokens have a hundred bytes a chunk.
AROUND_A_BYTE = 8
# Bytes per call of the parser. The limits are checked between calls.
_STEP_BYTES = 4 * 1024


class TooMuchAround(aiohttp.ClientError):
    """A server sent too many bytes around an answer's body."""


class _Answer(ResponseHandler):
    """The answers of one connection. The first answer that exceeds the limits ends the connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._came = self._body = self._interim = 0
        self._refused: TooMuchAround | None = None

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes step by step."""
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
        """Hand an answer to the request that waits for it."""
        if 100 <= data[0].code < 200:
            self._interim += 1
            if self._interim > INTERIM_ANSWERS:
                self._refuse(f"more than {INTERIM_ANSWERS} interim answers")
        if self._refused is None:
            super().feed_data(data, size)

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        """Keep only the first error: after a limit is exceeded, the connection is also reported as lost."""
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
    """A connector with a new connection for each request, because engines close idle ones within seconds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(force_close=True, **options)
        kind: type[ResponseHandler] = _Answer
        self._factory = partial(kind, loop=self._loop)
