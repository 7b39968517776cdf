"""Requests to engines over vLLM's OpenAI-compatible API, with limits on answer sizes and one retry of a connection."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import aiohttp
import msgspec

from kvpilot_formats.untrusted import OverBudget, shown, whole_lines
from kvpilot_probes import answers
from kvpilot_probes.engine_http import EngineConnector, check, read_all
from kvpilot_probes.errors import EngineRefused, EngineUnreachable, MalformedAnswer
from kvpilot_probes.pace import Pace
from kvpilot_probes.packs import Message

Progress = Callable[[], None]
Read = Callable[[str, bytes], answers.Chunk]

T = TypeVar("T")

CONNECT_SECONDS = 5.0
# Longest time in seconds without data from an engine: on a loaded CPU, a prefill takes tens of seconds.
READ_SECONDS = 120.0
RETRY_PAUSE_SECONDS = 0.5
_MAX_LINE_BYTES = 128 * 1024
# Number of token ids per piece of a request's body. Prompts are written to JSON piece by piece, so that many long
# prompts in flight take little memory.
_PIECE = 4096
# This parameter makes our runtime load the prompt's pages through the KV connector, even if the GPU has them
# (runtime/kvpilot_runtime/config/offload.py). Other engines ignore it.
FROM_CONNECTOR: dict[str, object] = {"kvpilot_from_connector": True}
GREEDY: Mapping[str, object] = MappingProxyType({"temperature": 0})

# A stream may have _MAX_STREAM_BYTES, and _MAX_TOKEN_BYTES more for each token, which takes about 2 KiB with its
# logprobs. So an engine that sends without end cannot occupy the event loop.
_MAX_STREAM_BYTES = 1024 * 1024
_MAX_TOKEN_BYTES = 64 * 1024
_TEMPLATE_BYTES = 64 * 1024
_MAX_MODELS_BYTES = 256 * 1024
_JSON = {"Content-Type": "application/json"}
# Connection errors. aiohttp reports a connection's timeout as a ClientError.
_BROKEN = (aiohttp.ClientError, OSError)
_TOOLS_AS_TEXT = "You can call these tools. To call one, answer only with a JSON object with its name and arguments."


def untold() -> None:
    """Do nothing. This is the default of the callback `progress`."""


@dataclass(frozen=True, slots=True)
class EngineClient:
    """Client of one engine at `http://host:port`, for its served `model`. `session.Settings` explains other fields.

    With `from_connector`, the engine loads prompts through its KV connector, even if the GPU has their pages.
    """

    base_url: str
    model: str
    http: aiohttp.ClientSession
    progress: Progress = untold
    priority: int | None = None
    from_connector: bool = False
    read_seconds: float = READ_SECONDS
    pace: Pace = field(default_factory=Pace)

    async def tokenize(self, messages: Sequence[Message], tools: str = "") -> answers.Tokenized:
        """Return the token ids of a chat as the engine's own chat template renders it, up to where the answer begins.

        `tools` is a JSON list of functions. If the template ignores or rejects tools, the first message lists them as
        text. If the model has no chat template, or the template rejects these roles, each message becomes "role:
        content".
        """
        chat = [{"role": m.role, "content": m.content} for m in messages]
        if not tools:
            return await self._rendered(chat)
        functions = [{"type": "function", "function": function} for function in json.loads(tools)]
        try:
            with_tools = await self.tokenize_chat(chat, tools=functions)
            if with_tools != await self._rendered(chat):
                return with_tools
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
        first = chat[0]
        said = f"{_TOOLS_AS_TEXT}\n{tools}\n\n{first['content']}"
        return await self._rendered([{"role": first["role"], "content": said}, *chat[1:]])

    async def tokenize_text(self, text: str) -> answers.Tokenized:
        """Return the token ids of a text, without a chat template."""
        return await self._tokens({"model": self.model, "prompt": text})

    async def _rendered(self, chat: Sequence[Mapping[str, str]]) -> answers.Tokenized:
        try:
            return await self.tokenize_chat(chat)
        except EngineRefused as refusal:
            if refusal.status != 400:
                raise
        text = "\n".join(f"{m['role']}: {m['content']}" for m in chat) + "\nassistant:"
        return await self.tokenize_text(text)

    async def tokenize_chat(self, chat: Sequence[Mapping[str, object]], **more: object) -> answers.Tokenized:
        """Return the token ids of a chat. Raise `EngineRefused` if the model's chat template does not support it."""
        return await self._tokens({"model": self.model, "messages": chat, **more})

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        return await self._asked("/detokenize", {"model": self.model, "tokens": list(tokens)}, answers.read_text)

    async def _tokens(self, body: Mapping[str, object]) -> answers.Tokenized:
        return await self._asked("/tokenize", body, answers.read_tokens)

    async def _asked(self, path: str, body: Mapping[str, object], read: Callable[[str, bytes], T]) -> T:
        url, asked = f"{self.base_url}{path}", msgspec.json.encode(body)
        # Limit the size of the answer: a text has at most one token per byte, and the template may add
        # `_TEMPLATE_BYTES`.
        limit = min(answers.BYTES_A_TOKEN * len(asked) + _TEMPLATE_BYTES, answers.READ_BYTES)

        async def ask() -> T:
            async with self.http.post(url, data=asked, headers=_JSON, allow_redirects=False) as response:
                await check(url, response)
                found = read(url, await read_all(url, response, limit))
            self.progress()
            return found

        return await _twice(url, ask)

    async def decode(
        self,
        prompt: Sequence[int],
        tokens: int,
        top_k: int,
        *,
        past_end: bool = False,
        sampling: Mapping[str, object] = GREEDY,
    ) -> AsyncGenerator[answers.StreamedToken, None]:
        """Yield the continuation of `prompt`, token by token. Closing the iterator stops the engine's work.

        The answer has `tokens` tokens, or fewer if the model ends it. With `past_end`, decoding continues after an end
        token. `top_k` is the number of logprobs per token, and `sampling` has vLLM's sampling parameters. Retry once if
        the connection fails before the first token.
        """
        other_fields = msgspec.json.encode({**self.fields(tokens, past_end, sampling), "logprobs": top_k})

        def asked() -> Iterator[bytes]:
            yield other_fields[:-1] + b',"prompt":['
            for i in range(0, len(prompt), _PIECE):
                yield msgspec.json.encode(list(prompt[i : i + _PIECE]))[1:-1] + b"," * (i + _PIECE < len(prompt))
            yield b"]}"

        async with aclosing(self.stream("/v1/completions", asked, answers.read_streamed, tokens, past_end)) as steps:
            async for step in steps:
                yield step

    def fields(self, tokens: int, past_end: bool, sampling: Mapping[str, object]) -> dict[str, object]:
        """Return the fields of a request for an answer that do not depend on the kind of prompt."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": tokens,
            **sampling,
            "return_tokens_as_token_ids": True,
            "ignore_eos": past_end,
            "stream": True,
        }
        if self.priority is not None:
            body["priority"] = self.priority
        if self.from_connector:
            body["kv_transfer_params"] = FROM_CONNECTOR
        return body

    async def stream(
        self, path: str, asked: Callable[[], Iterator[bytes]], read: Read, tokens: int, past_end: bool
    ) -> AsyncGenerator[answers.StreamedToken, None]:
        """Send the body `asked` to `path`, and yield the tokens that `read` finds in the answer's chunks."""
        for last_try in (False, True):
            await self.pace.rest(self.progress)
            began, started = time.monotonic(), False
            try:
                with self.pace.request():
                    async with aclosing(self._stream(path, asked, read, tokens, past_end)) as steps:
                        async for step in steps:
                            if not started:
                                self.pace.read(time.monotonic() - began)
                            started = True
                            yield step
                return
            except EngineUnreachable:
                if last_try or started:
                    raise
            await asyncio.sleep(RETRY_PAUSE_SECONDS)

    async def text(
        self, prompt: Sequence[int], tokens: int, *, past_end: bool = False, sampling: Mapping[str, object] = GREEDY
    ) -> str:
        """Return the text that continues `prompt`. `decode` explains the parameters."""
        async with aclosing(self.decode(prompt, tokens, 1, past_end=past_end, sampling=sampling)) as steps:
            return "".join([step.text async for step in steps])

    async def _stream(
        self, path: str, asked: Callable[[], Iterator[bytes]], read: Read, tokens: int, past_end: bool
    ) -> AsyncGenerator[answers.StreamedToken, None]:
        url = f"{self.base_url}{path}"
        headers = {**_JSON, "Content-Length": str(sum(map(len, asked())))}
        count, ended = 0, ""
        most = _MAX_STREAM_BYTES + tokens * _MAX_TOKEN_BYTES
        limit = _timeout(self.read_seconds)
        try:
            async with self.http.post(
                url, data=_sent(asked()), headers=headers, allow_redirects=False, timeout=limit
            ) as response:
                await check(url, response)
                async for line in whole_lines(response.content.iter_any(), url, most, _MAX_LINE_BYTES):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    chunk = read(url, data)
                    ended = chunk.finish_reason or ended
                    for step in chunk.tokens:
                        count += 1
                        if count > tokens:
                            raise MalformedAnswer(f"{url}: more than the {tokens} tokens asked for")
                        self.progress()
                        yield step
        except _BROKEN as error:
            raise _unreachable(url, error) from error
        except OverBudget as error:
            raise MalformedAnswer(str(error)) from error
        if count < tokens and (past_end or ended != "stop"):
            # Refuse an answer that ends too early: its few positions (or none) could all agree, which would hide the
            # damage.
            raise MalformedAnswer(
                f"{url}: {count} of {tokens} tokens, finish_reason {ended[:40]!r}; see the engine's log, and "
                "max_new_tokens in the model's generation_config.json"
            )


async def _sent(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def served_models(base_url: str, http: aiohttp.ClientSession) -> tuple[str, ...]:
    """Return the names of the models that an engine serves. Raise a `ProbeError` if the request fails."""
    url = f"{base_url}/v1/models"

    async def ask() -> tuple[str, ...]:
        async with http.get(url, allow_redirects=False) as response:
            await check(url, response)
            models = answers.read_models(url, await read_all(url, response, _MAX_MODELS_BYTES))
            return tuple(model.id for model in models)

    return await _twice(url, ask)


def http_client(api_key: str | None = None, tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """Return an HTTP session for engines, with bounded waits, and without proxies, cookies and compression."""
    authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        connector=EngineConnector(ssl=tls or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", **authorization},
        auto_decompress=False,
        trust_env=False,
        timeout=_timeout(READ_SECONDS),
    )


def _timeout(read_seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read_seconds)


async def _twice(url: str, ask: Callable[[], Awaitable[T]]) -> T:
    try:
        return await ask()
    except _BROKEN:
        await asyncio.sleep(RETRY_PAUSE_SECONDS)
    try:
        return await ask()
    except _BROKEN as error:
        raise _unreachable(url, error) from error


def _unreachable(url: str, error: Exception) -> EngineUnreachable:
    # The text may include data from the server, so make it printable and cut it.
    return EngineUnreachable(f"{url}: {type(error).__name__}: {shown(str(error))[:200]}; is the engine running?")
