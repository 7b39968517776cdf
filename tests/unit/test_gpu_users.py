"""Simulated users of the benchmark `gpu_users`, a server that counts requests, and the figures of one load level."""

import asyncio
import itertools
import json
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.engine.gpu_users import refuse_busy
from benchmarks.engine.users import Load, Objectives, Turn, Users, quantiles, summary

STRICT = Objectives(ttft=2.0, itl=0.05)


def test_percentiles_are_values_that_occurred() -> None:
    assert quantiles([*range(1, 101)]) == [50, 95, 99]
    assert quantiles([7.0]) == [7.0, 7.0, 7.0]
    assert quantiles([]) == [float("inf")] * 3


def test_an_unanswered_question_counts_with_its_waiting_time() -> None:
    turns = [Turn(10.0, [10.5, 10.53]), Turn(11.0)]
    found = summary(turns, 10.0, 15.0, STRICT)
    assert (found["questions"], found["unanswered"]) == (2, 1)
    assert found["ttft"][1] == 4.0
    assert not found["held"]


def test_only_requests_of_the_measured_period_count() -> None:
    turns = [Turn(1.0, [9.0, 9.5, 10.02]), Turn(10.0, [10.1, 10.14]), Turn(20.0)]
    found = summary(turns, 10.0, 15.0, Objectives(ttft=0.2, itl=0.6))
    assert found["questions"] == 1
    assert [round(value, 2) for value in found["itl"]] == [0.04, 0.52, 0.52]
    assert found["held"]


def test_each_question_repeats_the_conversation_with_its_answers() -> None:
    asked: list[list[int]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(body["prompt"])
        response = web.StreamResponse()
        await response.prepare(request)
        for token in range(body["max_tokens"]):
            chunk: dict[str, Any] = {"choices": [{"text": "", "token_ids": [token]}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def scenario() -> list[Turn]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        load = Load(history=50, asked=4, answered=3, turns=1000, thought=1e-6)
        async with aiohttp.ClientSession() as session:
            users = Users(session, url, "m", load, 1000)
            users.raise_to(1, rate=1)
            while len(asked) < 4:
                await asyncio.sleep(0.01)
                users.check()
            await users.close()
        await runner.cleanup()
        return users.turns

    turns = asyncio.run(scenario())
    assert len(turns[0].chunks) == 3
    for earlier, later in itertools.pairwise(asked):
        assert later[: len(earlier) + 3] == [*earlier, 0, 1, 2]
        assert len(later) == len(earlier) + 4 + 3


def test_a_busy_port_is_refused_before_a_server_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--port: {port} is in use"):
            refuse_busy(port)
