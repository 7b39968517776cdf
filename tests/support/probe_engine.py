"""HTTP server with just enough of vLLM's API for a probe. Tests choose how well it answers."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from zlib import crc32

from kvpilot_probes.client import EngineClient, http_client, untold
from kvpilot_probes.codec import MAX_TOKEN_ID, Baseline, BaselinePrompt
from kvpilot_probes.generated import Rendered, rendered
from kvpilot_probes.packs import Message, ProbePrompt
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Logprobs

Body = dict[str, Any]
Writer = asyncio.StreamWriter
Handler = Callable[[str, Body, Writer], Awaitable[None]]

PROMPTS = tuple(ProbePrompt("builtin/general", f"p{i}", (Message("user", f"question {i}"),)) for i in range(4))
SETTINGS = Settings(tokens=8, deadline_seconds=20)


@asynccontextmanager
async def engine(handler: Handler, heads: list[str] | None = None) -> AsyncIterator[str]:
    """Serve requests with `handler`, one per connection. It gets the path, the JSON body and the socket to answer.

    The head of each request is added to `heads`.
    """

    async def connection(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if heads is not None:
                heads.append(head)
            lengths = [line for line in head.split("\r\n") if line.lower().startswith("content-length")]
            content = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b"{}"
            await handler(head.split()[1], json.loads(content), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.close()


def respond(writer: Writer, body: bytes, status: str = "200 OK") -> None:
    writer.write(f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)


def tokens_of(body: Body) -> bytes:
    text = json.dumps(body.get("messages") or body.get("prompt"))
    return json.dumps({"tokens": list(text.encode()), "max_model_len": 2048}).encode()


def words(body: Body) -> list[int]:
    """Return a token for each word and each sign, between the marks of a chat template."""
    texts = [body["prompt"]] if "prompt" in body else [f"<{m['role']}>{m['content']}<end>" for m in body["messages"]]
    text = json.dumps(body.get("tools", "")) + "".join(texts)
    return [crc32(word.encode()) % MAX_TOKEN_ID for word in re.findall(r"\w+|[^\w\s]|\s+", text)]


def reading(context: int, answers: Handler | None = None) -> Handler:
    """Return an engine with this context that splits text into words. `answers` replaces its sound answers."""

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize":
            respond(writer, json.dumps({"tokens": words(body), "max_model_len": context}).encode())
        else:
            await (answers or counting)(path, body, writer)

    return handler


def made(prompts: Sequence[ProbePrompt], context: int, handler: Handler | None = None) -> list[Rendered]:
    """Return the prompts as a probe renders them for an engine with this context. Answers have 32 tokens."""

    async def story() -> list[Rendered]:
        async with engine(handler or reading(context)) as url, http_client() as http:
            return (await rendered(EngineClient(url, "m", http), prompts, context, Settings(tokens=32), untold))[0]

    return asyncio.run(story())


def event(token: object, top: object, logprob: object = -0.1, finish: str | None = None) -> bytes:
    logprobs = {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [top]}
    choice = {"text": "x", "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def stream(writer: Writer, *events: bytes) -> None:
    respond(writer, b"".join(events) + b"data: [DONE]\n\n")


async def counting(path: str, body: Body, writer: Writer) -> None:
    """Answer like a sound engine: the greedy token is the number of tokens before it. It has no metrics."""
    if path in ("/tokenize", "/metrics"):
        respond(writer, tokens_of(body) if path == "/tokenize" else b"")
        return
    start = len(body["prompt"])
    steps = range(start, start + body["max_tokens"])
    stream(writer, *(event(f"token_id:{i}", {f"token_id:{i}": -0.1, "token_id:9999": -3.0}) for i in steps))


async def noisy(path: str, body: Body, writer: Writer) -> None:
    """Answer like a slightly damaged engine: a wrong token at every seventh position of a teacher-forced answer."""
    if path == "/tokenize":
        respond(writer, tokens_of(body))
        return
    start = len(body["prompt"])
    tokens = [7777 if body["ignore_eos"] and i % 7 == 0 else i for i in range(start, start + body["max_tokens"])]
    stream(writer, *(event(f"token_id:{t}", {f"token_id:{t}": -0.1, "token_id:9999": -3.0}) for t in tokens))


def serving(handler: Handler, *names: str) -> Handler:
    """Return the engine `handler` with these model names at /v1/models."""

    async def listing(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/models":
            respond(writer, json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode())
        else:
            await handler(path, body, writer)

    return listing


def completing(*events: bytes) -> Handler:
    """Return an engine that tokenizes soundly and answers completions with these events.

    Further answers repeat the last event.
    """

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize":
            respond(writer, tokens_of(body))
        else:
            stream(writer, *events, *events[-1:] * (body["max_tokens"] - len(events)))

    return handler


def ending(after: int, finish: str | None) -> Handler:
    """Return a sound engine whose answers end after at most `after` tokens with this finish_reason."""

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/tokenize":
            respond(writer, tokens_of(body))
            return
        start, count = len(body["prompt"]), min(after, body["max_tokens"])
        steps = [event(f"token_id:{i}", {f"token_id:{i}": -0.1}) for i in range(start, start + count)]
        # vLLM may send the finish_reason in a separate chunk, after the chunk with the last token.
        done = {"choices": [{"text": "", "logprobs": None, "finish_reason": finish}]}
        stream(writer, *steps, b"data: " + json.dumps(done).encode() + b"\n\n")

    return handler


def baseline(positions: int = 8, prompts: int = 2) -> Baseline:
    """Return a baseline: the answers of the engine `counting` to prompts of three tokens."""
    answer = tuple(Logprobs(3 + i, {3 + i: -0.1, 9999: -3.0}) for i in range(positions))
    return Baseline(
        "i", "m", "auto", tuple(BaselinePrompt(f"p{i}", "tail", "text", (1, 2, 3), answer) for i in range(prompts))
    )
