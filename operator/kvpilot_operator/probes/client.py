"""The one place that talks to an engine: vLLM's OpenAI-compatible API over httpx, with nothing taken on trust.

Used: POST /tokenize (chat messages to token ids, by the engine's own template), POST /v1/completions as a stream with
token ids in and token ids with logprobs out, and GET /metrics for the length of the queue. Every size is bounded, and a
connection failure is tried once more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from kvpilot_operator.budget import METRICS_CHUNK_BYTES
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.page import PageReader
from kvpilot_operator.probes.answers import Step, Tokenized, printable, read_object, read_steps, read_tokens
from kvpilot_operator.probes.errors import EngineRefused, EngineUnreachable, MalformedAnswer
from kvpilot_operator.probes.packs import Message

T = TypeVar("T")

CONNECT_SECONDS = 5.0
# Longest silence: a prefill on a loaded CPU engine takes tens of seconds, more is a hang (the deadline rules anyway).
READ_SECONDS = 120.0
RETRY_PAUSE_SECONDS = 0.5
METRICS_SECONDS = 5.0
_MAX_JSON_BYTES = 16 * 1024 * 1024
_MAX_LINE_BYTES = 256 * 1024
# One token with its logprobs takes some 2 KiB. The loop that reads serves the whole fleet: an engine that talks without
# an end, and fast, must not have it to itself until the run's deadline.
_MAX_STREAM_BYTES = 1024 * 1024
_MAX_TOKEN_BYTES = 64 * 1024
_TOOLS_AS_TEXT = "You can call these tools. To call one, answer only with a JSON object with its name and arguments."


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's address (`http://host:port`) and the model's served name; `http` is shared by all requests."""

    base_url: str
    model: str
    http: httpx.AsyncClient

    async def tokenize(self, messages: Sequence[Message], tools: str = "") -> Tokenized:
        """Return the chat rendered by the engine's own template, ready for an answer.

        `tools` is a JSON list of functions. A template that does not know tools gets them as text in the first message.
        A model without a chat template, or whose template refuses these roles, gets plain text: role and content.
        """
        chat = [{"role": m.role, "content": m.content} for m in messages]
        if not tools:
            return await self._rendered(chat)
        functions = [{"type": "function", "function": function} for function in json.loads(tools)]
        try:
            with_tools = self._tokens(await self._tokenized(chat, tools=functions))
            if with_tools != await self._rendered(chat):
                return with_tools
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
        first = chat[0]
        said = f"{_TOOLS_AS_TEXT}\n{tools}\n\n{first['content']}"
        return await self._rendered([{"role": first["role"], "content": said}, *chat[1:]])

    async def _rendered(self, chat: Sequence[Mapping[str, str]]) -> Tokenized:
        try:
            answer = await self._tokenized(chat)
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
            text = "\n".join(f"{m['role']}: {m['content']}" for m in chat) + "\nassistant:"
            answer = await self._post("/tokenize", {"model": self.model, "prompt": text})
        return self._tokens(answer)

    async def _tokenized(self, chat: Sequence[Mapping[str, str]], **more: object) -> Mapping[str, Any]:
        return await self._post("/tokenize", {"model": self.model, "messages": chat, **more})

    async def decode(
        self,
        prompt: Sequence[int],
        tokens: int,
        top_k: int,
        *,
        past_end: bool = False,
        priority: int | None = None,
    ) -> AsyncGenerator[Step, None]:
        """Yield the greedy continuation of `prompt` token by token; closing the iterator stops the engine's work.

        At most `tokens` steps. With `past_end` the model's end token is a token like any other. `priority` is for an
        engine that schedules by it (a larger one waits longer). A connection that fails before the first token is tried
        once more; later failures raise `EngineUnreachable`.
        """
        body: dict[str, object] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": top_k,
            "return_tokens_as_token_ids": True,
            "ignore_eos": past_end,
            "stream": True,
        }
        if priority is not None:
            body["priority"] = priority
        for last_try in (False, True):
            started = False
            try:
                async with aclosing(self._stream(body, tokens)) as steps:
                    async for step in steps:
                        started = True
                        yield step
                return
            except EngineUnreachable:
                if last_try or started:
                    raise
                await asyncio.sleep(RETRY_PAUSE_SECONDS)

    async def waiting(self) -> float:
        """Requests that wait for room in the engine; 0 where it does not say, 1 where it is too busy to say."""
        reader = PageReader()
        try:
            async with asyncio.timeout(METRICS_SECONDS), self.http.stream("GET", f"{self.base_url}/metrics") as page:
                async for chunk in page.aiter_raw(METRICS_CHUNK_BYTES):
                    reader.feed(chunk)
            return reader.close().waiting
        except (TimeoutError, httpx.TimeoutException):
            return 1.0
        except (httpx.HTTPError, ScrapeError):
            return 0.0

    async def _stream(self, body: Mapping[str, object], tokens: int) -> AsyncGenerator[Step, None]:
        url = f"{self.base_url}/v1/completions"
        count = 0
        try:
            async with self.http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise EngineRefused(url, response.status_code, printable(await _read(response, 4096)))
                async for line in _lines(response, _MAX_STREAM_BYTES + tokens * _MAX_TOKEN_BYTES):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    for step in read_steps(url, read_object(url, data)):
                        count += 1
                        if count > tokens:
                            raise MalformedAnswer(f"{url}: more than the {tokens} tokens asked for")
                        yield step
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"{url}: {type(error).__name__}: {error}; is the engine running?") from error

    def _tokens(self, answer: Mapping[str, Any]) -> Tokenized:
        return read_tokens(f"{self.base_url}/tokenize", answer)

    async def _post(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        url = f"{self.base_url}{path}"

        async def ask() -> Mapping[str, Any]:
            async with self.http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise EngineRefused(url, response.status_code, printable(await _read(response, 4096)))
                return read_object(url, await _read(response, _MAX_JSON_BYTES))

        return await _twice(url, ask)


def http_client() -> httpx.AsyncClient:
    """Return a client for engines inside the cluster: no proxies, no redirects, bounded waits, nothing compressed."""
    timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    plain = {"Accept-Encoding": "identity"}
    return httpx.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False, headers=plain)


async def _twice(url: str, ask: Callable[[], Awaitable[T]]) -> T:
    try:
        return await ask()
    except httpx.HTTPError:
        await asyncio.sleep(RETRY_PAUSE_SECONDS)
    try:
        return await ask()
    except httpx.HTTPError as error:
        raise EngineUnreachable(f"{url}: {type(error).__name__}: {error}; is the engine running?") from error


async def _read(response: httpx.Response, limit: int) -> bytes:
    """Return the body, cut after `limit` bytes."""
    body = b""
    async for chunk in response.aiter_raw(16384):
        body += chunk
        if len(body) >= limit:
            break
    return body[:limit]


async def _lines(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """Yield the lines of a stream of at most `limit` bytes; httpx's own splitter would buffer a line of any length."""
    rest = b""
    async for chunk in response.aiter_raw():
        if response.num_bytes_downloaded > limit:
            raise MalformedAnswer(f"{response.url}: more than {limit} bytes")
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES or any(len(line) > _MAX_LINE_BYTES for line in lines):
            raise MalformedAnswer(f"{response.url}: a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            yield line
    if rest:
        yield rest
