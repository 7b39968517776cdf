"""The demo's load counts every failure, retries nothing, and opens a connection for each request."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpilot_demo.load import Load, LoadError

Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
TOKENS = 4


@asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[tuple[str, list[int]]]:
    """Serve completions by `handler` on persistent connections.

    Yield the address, and a list of the requests per connection.
    """
    per_connection: list[int] = []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        per_connection.append(0)
        mine = len(per_connection) - 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                if head.startswith("post /tokenize"):
                    answer = json.dumps({"tokens": list(range(1000)), "max_model_len": 100}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
                else:
                    per_connection[mine] += 1
                    await handler(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", per_connection
    finally:
        server.close()


def events(count: int, usage: int) -> bytes:
    lines = [{"choices": [{"text": "x"}]}] * count
    last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": usage}}
    return b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in [*lines, last])


def respond(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK") -> None:
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


async def sound(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.01)
    respond(writer, events(body["max_tokens"], body["max_tokens"]) + b"data: [DONE]\n\n")


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not seen():
            await asyncio.sleep(0.01)


async def drive(handler: Handler, answers: int = 2) -> tuple[Load, list[int]]:
    """Run two users until this many of their requests have succeeded or failed."""
    async with engine(handler) as (url, per_connection):
        load = Load(url, "m", users=2, prompt_tokens=10, output_tokens=TOKENS)
        await load.start()
        await until(lambda: load.stats.ok + load.stats.failed >= answers)
        await load.stop()
    return load, per_connection


async def test_each_request_opens_its_own_connection_and_is_counted() -> None:
    asked: list[int] = []

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(body["max_tokens"])
        await sound(body, writer)

    load, per_connection = await drive(handler, 4)
    assert load.stats.ok >= 4
    assert load.stats.failed == 0
    assert max(per_connection) == 1
    assert load.stats.ok == sum(per_connection)
    assert (load.stats.output_tokens, load.stats.prompt_tokens) == (sum(asked), 10 * load.stats.ok)
    assert all(TOKENS // 2 < tokens <= TOKENS * 3 // 2 for tokens in asked)
    assert len(load.stats.first_token) == load.stats.ok
    assert len(load.stats.between_tokens) == sum(asked) - load.stats.ok


async def test_prompts_are_as_long_as_asked_and_all_begin_differently() -> None:
    prompts: list[list[int]] = []

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompts.append(body["prompt"])
        await sound(body, writer)

    await drive(handler, 10)
    assert all(len(p) == 10 for p in prompts)
    assert len({p[0] for p in prompts}) == len(prompts)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (b'{"error": "draining"}', "500 Internal Server Error", "HTTP 500: .*draining"),
        (events(TOKENS, TOKENS), "200 OK", "ended after 4 of"),
        (events(2, 2) + b"data: [DONE]\n\n", "200 OK", "ended after 2 of"),
        (b'data: {"error": {"message": "engine died"}}\n\n', "200 OK", "engine died"),
        (b"data: {broken\n\n", "200 OK", "not JSON"),
        (b'data: {"usage": 7}\n\n', "200 OK", "AttributeError"),
    ],
)
async def test_an_unusable_answer_counts_as_one_failure_with_its_reason(answer: bytes, status: str, words: str) -> None:
    async def handler(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        respond(writer, answer, status)

    load, per_connection = await drive(handler)
    assert load.stats.ok == 0
    assert load.stats.failed == sum(per_connection) == 2
    assert len(load.stats.failures) == 2
    assert re.search(words, load.stats.failures[0])


async def test_a_request_whose_connection_is_cut_counts_as_failed() -> None:
    async def handler(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + events(2, 2))
        await writer.drain()
        writer.transport.abort()

    load, _ = await drive(handler)
    assert (load.stats.ok, load.stats.failed) == (0, 2)


async def test_stopping_the_load_lets_requests_finish_and_counts_those_that_it_cuts_off() -> None:
    flying = 0
    answer = asyncio.Event()

    async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal flying
        flying += 1
        await answer.wait()
        await sound(body, writer)

    async with engine(slow) as (url, _):
        patient = Load(url, "m", users=3, prompt_tokens=10, output_tokens=TOKENS)
        await patient.start()
        await until(lambda: flying == 3)
        stopping = asyncio.create_task(patient.stop())
        await asyncio.sleep(0)
        answer.set()
        await stopping
        answer.clear()
        hasty = Load(url, "m", users=3, prompt_tokens=10, output_tokens=TOKENS)
        await hasty.start()
        await until(lambda: flying == 6)
        await hasty.stop(patience_seconds=0.05)
        answer.set()
    assert (patient.stats.ok, patient.stats.failed) == (3, 0)
    assert (hasty.stats.ok, hasty.stats.failed) == (0, 3)
    assert "stopped" in hasty.stats.failures[0]


async def test_users_can_be_added_and_removed_while_the_load_runs() -> None:
    async with engine(sound) as (url, _):
        load = Load(url, "m", users=1, prompt_tokens=10, output_tokens=TOKENS)
        await load.start()
        load.set_users(5)
        assert load.summary().startswith("5 users")
        load.set_users(2)
        await until(lambda: load.summary().startswith("2 users"))
        await load.stop()
    assert load.summary().startswith("0 users")


async def test_a_prompt_that_cannot_fit_or_a_missing_engine_prevents_the_load() -> None:
    async with engine(sound) as (url, _):
        long = Load(url, "m", users=1, prompt_tokens=98, output_tokens=TOKENS)
        with pytest.raises(LoadError, match="context of 100"):
            await long.start()
        await long.stop()
    gone = Load(url, "m", users=1, prompt_tokens=10, output_tokens=TOKENS)
    with pytest.raises(LoadError, match="ClientConnectorError"):
        await gone.start()
    await gone.stop()
