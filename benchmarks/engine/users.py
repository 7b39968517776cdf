"""Simulated users who hold long conversations with a vLLM server over its HTTP API."""

import asyncio
import itertools
import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

FIRST_TOKEN = 100
"""Lowest token ID in a prompt. Special tokens have lower IDs."""
ARRIVAL_SECONDS = 10.0
"""Seconds in which the users of a `Crowd` arrive, one after another."""


@dataclass(frozen=True)
class Load:
    """Settings of one user's conversations. Lengths are in tokens, times in seconds."""

    history: int = 6000
    """Length of a new conversation before its first question."""
    asked: int = 400
    answered: int = 200
    turns: int = 12
    """Number of questions before a new conversation begins."""
    thought: float = 20.0
    """Mean time between an answer and the next question. The time is exponentially distributed."""


@dataclass(frozen=True)
class Objectives:
    """Upper limits for the 95th percentiles of TTFT and ITL, in seconds."""

    ttft: float
    itl: float


@dataclass
class Turn:
    """Times of one question of a user: when it was sent, and when each chunk of the answer arrived."""

    sent: float
    chunks: list[float] = field(default_factory=list)


class Users:
    """Growing number of users. Each has one conversation at a time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, load: Load, vocab: int) -> None:
        self.turns: list[Turn] = []
        self._session, self._url, self._model, self._load, self._vocab = session, url, model, load, vocab
        self._tasks: list[asyncio.Task[None]] = []

    def raise_to(self, count: int, rate: float) -> float:
        """Add users until there are `count`, `rate` of them a second. Return the seconds until the last one starts."""
        missing = count - len(self._tasks)
        for place in range(missing):
            self._tasks.append(asyncio.create_task(self._converse(len(self._tasks), place / rate)))
        return missing / rate

    def check(self) -> None:
        """Raise the exception of the first user whose question failed, if there is one."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Stop all users, and cancel their running requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _converse(self, number: int, wait: float) -> None:
        """Ask questions with pauses between them, forever. The first conversation starts at a random question."""
        chance, load = random.Random(number), self._load  # noqa: S311
        await asyncio.sleep(wait)
        done = chance.randrange(load.turns)
        while True:
            tokens = self._draw(chance, load.history + done * (load.asked + load.answered))
            for _ in range(done, load.turns):
                tokens += self._draw(chance, load.asked)
                tokens += await self._ask(tokens)
                await asyncio.sleep(chance.expovariate(1 / load.thought))
            done = 0

    def _draw(self, chance: random.Random, count: int) -> list[int]:
        return chance.choices(range(FIRST_TOKEN, self._vocab), k=count)

    async def _ask(self, tokens: list[int]) -> list[int]:
        """Send the conversation as a prompt, and return the tokens of the answer."""
        body = {
            "model": self._model, "prompt": tokens, "max_tokens": self._load.answered, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        turn, answer = Turn(time.perf_counter()), list[int]()
        self.turns.append(turn)
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"a question got {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                new = json.loads(line[6:])["choices"][0].get("token_ids") or []
                if new:
                    turn.chunks.append(time.perf_counter())
                    answer += new
        return answer


class Crowd:
    """Simulated users in a separate process, so that other work of this process does not delay their clocks."""

    def __init__(self, url: str, model: str, load: Load, vocab: int, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        spawn.Process(target=_crowd, args=(other, url, model, load, vocab, count), daemon=True).start()
        other.close()
        self._pipe.recv()  # the process has started

    def end(self) -> list[Turn]:
        """End the users, and return their turns. Raise RuntimeError if a question failed."""
        try:
            self._pipe.send(None)
            found: list[Turn] = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("a user's question failed; see the traceback above") from error
        return found


def _crowd(pipe: Any, url: str, model: str, load: Load, vocab: int, count: int) -> None:
    async def converse() -> None:
        # Use a new connection for each request: the server may close an idle connection just when a user sends on it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            users = Users(session, url, model, load, vocab)
            users.raise_to(count, count / ARRIVAL_SECONDS)
            pipe.send(None)
            while not pipe.poll():
                users.check()
                await asyncio.sleep(0.2)
            pipe.recv()  # raises EOFError if the parent has ended
            await users.close()
            pipe.send(users.turns)

    asyncio.run(converse())


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the 50th, 95th and 99th percentile (nearest rank), or infinities without values."""
    ranked = sorted(values)
    return [ranked[-(-len(ranked) * percent // 100) - 1] if ranked else float("inf") for percent in (50, 95, 99)]


def pauses(turns: Sequence[Turn], begin: float, end: float) -> list[float]:
    """Return the seconds between chunks of an answer that arrived from `begin` to `end`."""
    return [
        later - earlier for turn in turns for earlier, later in itertools.pairwise(turn.chunks) if begin <= later < end
    ]


def summary(turns: Sequence[Turn], begin: float, end: float, objectives: Objectives) -> dict[str, Any]:
    """Return the latencies of the period from `begin` to `end`, in seconds. `held` is True if both objectives were met.

    A question counts in the period in which it was sent. If it has no answer by `end`, the wait until `end` counts. A
    gap between chunks counts in the period in which it ends.
    """
    sent = [turn for turn in turns if begin <= turn.sent < end]
    first = [(turn.chunks[0] if turn.chunks else end) - turn.sent for turn in sent]
    ttft, itl = quantiles(first), quantiles(pauses(turns, begin, end))
    return {
        "ttft": ttft,
        "itl": itl,
        "questions": len(sent),
        "unanswered": sum(not turn.chunks for turn in sent),
        "turns_per_second": len(sent) / (end - begin),
        "held": ttft[1] <= objectives.ttft and itl[1] <= objectives.itl,
    }
