"""The one place that talks to an engine: vLLM's OpenAI-compatible API over httpx, with nothing taken on trust.

Used: POST /tokenize (chat messages to token ids, by the engine's own template) and POST /v1/completions as a stream
with token ids in and token ids with logprobs out. Every size is bounded, a missing or non-finite logprob becomes an
empty position (maximal damage), and a connection failure is tried once more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import httpx

from kvpilot_operator.probes.codec import MAX_TOKEN_ID
from kvpilot_operator.probes.errors import EngineRefused, EngineUnreachable, MalformedAnswer
from kvpilot_operator.probes.packs import Message
from kvpilot_operator.probes.stats import MIN_LOGPROB, Logprobs

T = TypeVar("T")

CONNECT_SECONDS = 5.0
# Longest silence: a prefill on a loaded CPU engine takes tens of seconds, more is a hang (the deadline rules anyway).
READ_SECONDS = 120.0
RETRY_PAUSE_SECONDS = 0.5
MAX_EXCERPT = 300
MAX_TOP = 64
_MAX_JSON_BYTES = 16 * 1024 * 1024
_MAX_LINE_BYTES = 256 * 1024
_TOKEN_PREFIX = "token_id:"  # noqa: S105 - vLLM's spelling of a token id, nothing secret


class Tokenized(NamedTuple):
    """A prompt's token ids and the engine's context length in tokens."""

    tokens: tuple[int, ...]
    max_model_len: int


class Step(NamedTuple):
    """One streamed token: its logprobs, its text, and whether the engine ended here by itself."""

    logprobs: Logprobs
    text: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's address (`http://host:port`) and the model's served name; `http` is shared by all requests."""

    base_url: str
    model: str
    http: httpx.AsyncClient

    async def tokenize(self, messages: Sequence[Message]) -> Tokenized:
        """Return the chat rendered by the engine's own template, ready for an answer.

        A model without a chat template, or whose template refuses these roles, gets plain text: role and content.
        """
        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            answer = await self._post("/tokenize", {"model": self.model, "messages": chat})
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
            text = "\n".join(f"{m.role}: {m.content}" for m in messages) + "\nassistant:"
            answer = await self._post("/tokenize", {"model": self.model, "prompt": text})
        tokens, length = answer.get("tokens"), answer.get("max_model_len")
        if not isinstance(tokens, list) or not tokens or not all(_is_token(t) for t in tokens):
            raise MalformedAnswer(
                f"{self.base_url}/tokenize: tokens is {_excerpt(tokens)}; expected a list of token ids"
            )
        if not isinstance(length, int) or length < 1:
            raise MalformedAnswer(f"{self.base_url}/tokenize: max_model_len is {_excerpt(length)}; expected a length")
        return Tokenized(tuple(tokens), length)

    async def decode(
        self, prompt: Sequence[int], tokens: int, top_k: int, *, past_end: bool = False
    ) -> AsyncGenerator[Step, None]:
        """Yield the greedy continuation of `prompt` token by token; closing the iterator stops the engine's work.

        At most `tokens` steps. With `past_end` the model's end token is a token like any other. A connection that fails
        before the first token is tried once more; later failures raise `EngineUnreachable`.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": top_k,
            "return_tokens_as_token_ids": True,
            "ignore_eos": past_end,
            "stream": True,
        }
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

    async def _stream(self, body: Mapping[str, object], tokens: int) -> AsyncGenerator[Step, None]:
        url = f"{self.base_url}/v1/completions"
        count = 0
        try:
            async with self.http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise EngineRefused(url, response.status_code, _text(await _read(response, 4096)))
                async for line in _lines(response):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    for step in _steps(url, _json(url, data)):
                        count += 1
                        if count > tokens:
                            raise MalformedAnswer(f"{url}: more than the {tokens} tokens asked for")
                        yield step
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"{url}: {type(error).__name__}: {error}; is the engine running?") from error

    async def _post(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        url = f"{self.base_url}{path}"

        async def ask() -> Mapping[str, Any]:
            async with self.http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise EngineRefused(url, response.status_code, _text(await _read(response, 4096)))
                return _json(url, await _read(response, _MAX_JSON_BYTES))

        return await _twice(url, ask)


def http_client() -> httpx.AsyncClient:
    """Return a client for engines inside the cluster: no proxies, no redirects, bounded waits."""
    timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False)


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
    async for chunk in response.aiter_bytes(16384):
        body += chunk
        if len(body) >= limit:
            break
    return body[:limit]


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; httpx's own splitter would buffer a line of any length."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES or any(len(line) > _MAX_LINE_BYTES for line in lines):
            raise MalformedAnswer(f"{response.url}: a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            yield line
    if rest:
        yield rest


def _json(url: str, data: bytes) -> Mapping[str, Any]:
    try:
        # json reads NaN and Infinity, which an engine with broken logits may send; they become None.
        answer = json.loads(data, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise MalformedAnswer(f"{url}: not JSON: {_text(data)}") from error
    if not isinstance(answer, dict):
        raise MalformedAnswer(f"{url}: {_excerpt(answer)}; expected an object")
    return answer


def _steps(url: str, chunk: Mapping[str, Any]) -> list[Step]:
    """Return a streamed chunk's tokens; an engine that fails in the middle of a stream says so in `error`."""
    if "error" in chunk:
        error = chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        raise EngineRefused(url, code if isinstance(code, int) else 500, _excerpt(error))
    choices = chunk.get("choices")
    if not isinstance(choices, list) or len(choices) > 1 or (choices and not isinstance(choices[0], dict)):
        raise MalformedAnswer(f"{url}: choices is {_excerpt(choices)}; expected one choice")
    if not choices or choices[0].get("logprobs") is None:
        return []
    choice, logprobs = choices[0], choices[0]["logprobs"]
    text = choice.get("text")
    lists = [
        logprobs.get(key) if isinstance(logprobs, dict) else None
        for key in ("tokens", "token_logprobs", "top_logprobs")
    ]
    if (
        not isinstance(text, str)
        or not all(isinstance(x, list) for x in lists)
        or len({len(x or []) for x in lists}) != 1
    ):
        raise MalformedAnswer(
            f"{url}: logprobs is {_excerpt(logprobs)}; expected tokens, token_logprobs and top_logprobs"
        )
    tokens, chosen, tops = (x or [] for x in lists)
    stopped = choice.get("finish_reason") == "stop"
    steps = []
    for i, (token, logprob, top) in enumerate(zip(tokens, chosen, tops, strict=True)):
        ident = _token(url, token)
        last = i == len(tokens) - 1
        steps.append(Step(Logprobs(ident, _top(url, ident, logprob, top)), text if last else "", stopped and last))
    return steps


def _top(url: str, token: int, logprob: object, top: object) -> dict[int, float]:
    """Return the position's finite logprobs, or nothing at all when one of them is no number."""
    if top is None or logprob is None:
        return {}
    if not isinstance(top, dict) or len(top) > MAX_TOP:
        raise MalformedAnswer(f"{url}: top_logprobs is {_excerpt(top)}; expected at most {MAX_TOP} tokens")
    values = {token: logprob, **{_token(url, key): value for key, value in top.items()}}
    bounded: dict[int, float] = {}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return {}
        bounded[key] = float(min(max(value, MIN_LOGPROB), 0.0))
    return bounded


def _token(url: str, name: object) -> int:
    digits = name.removeprefix(_TOKEN_PREFIX) if isinstance(name, str) and name.startswith(_TOKEN_PREFIX) else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 8 and int(digits) <= MAX_TOKEN_ID):
        raise MalformedAnswer(
            f"{url}: token {_excerpt(name)}; expected {_TOKEN_PREFIX} and a number up to {MAX_TOKEN_ID}"
        )
    return int(digits)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _text(data: bytes) -> str:
    return " ".join(data.decode("utf-8", "replace").split())[:MAX_EXCERPT]


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_EXCERPT else f"{text[: MAX_EXCERPT - 3]}..."
