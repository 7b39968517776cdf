"""Send a closed-loop load: each user sends the next request after the last one is answered.

    python -m kvpilot_demo.load http://127.0.0.1:8080 smollm2 --users 8 --prompt-tokens 400 --output-tokens 64

Each request opens its own connection, so that it reaches the pods that the Service selects at that moment. A failed
request is counted and not retried, because a real user would have seen the failure. Prompts are parts of Python's
documentation. Each prompt starts at a different token, because a shared prefix would save the cache memory that the
load should fill. With a `Talk`, a user continues the same conversation, as in a chat.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import aiohttp

from kvpilot_probes.stats import percentile

# Pause after a failure. Otherwise a user whose connection is refused would retry without end at full speed.
PAUSE_AFTER_FAILURE_SECONDS = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=900.0, sock_read=900.0)
# Each prompt starts at another token of the text, which has about 12,000 tokens. A demo sends fewer prompts.
CORPUS_CHARACTERS = 60_000
KEPT_FAILURES = 100
KEPT_TIMES = 300_000


@dataclass(frozen=True)
class Talk:
    """Conversations of several requests, as in a chat.

    Attributes:
        asked: tokens of each question after the first prompt.
        turns: number of requests before a new conversation begins.
        thought: mean seconds between an answer and the next question; exponentially distributed.
    """

    asked: int
    turns: int
    thought: float


ONCE = Talk(0, 1, 0.0)
"""A new prompt for each request, without a pause."""


class LoadError(Exception):
    """Error for a load that cannot start: the engine does not answer, or prompts do not fit its context."""


@dataclass(slots=True)
class Stats:
    """Counts of requests and tokens, and the newest KEPT_TIMES values of each duration in seconds."""

    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_FAILURES))
    """Newest failures, each with its time and text."""
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    between_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))

    def percentiles(self) -> dict[str, Any]:
        """Return the counts, and percentiles of `first_token` and `between_tokens` in milliseconds."""
        found: dict[str, Any] = {"ok": self.ok, "failed": self.failed, "outputTokens": self.output_tokens}
        for name, times in (("ttftMs", self.first_token), ("itlMs", self.between_tokens)):
            found[name] = {f"p{q}": round(percentile(times, q / 100) * 1000, 1) for q in (50, 95, 99)} if times else {}
        return found


class _Failed(Exception):
    """Error for one request that failed: it is counted, and its user continues."""


class Load:
    """Simulated users of an OpenAI-compatible engine.

    Args:
        url: the engine's address, `http://host:port`.
        model: the model's served name.
        users: number of users at the start.
        prompt_tokens: tokens of a conversation's first prompt.
        output_tokens: mean tokens of an answer. Lengths vary from half to one and a half times this number.
        talk: the conversations of a user.
        seed: seed for the choice of prompts.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        users: int,
        prompt_tokens: int,
        output_tokens: int,
        talk: Talk = ONCE,
        seed: int = 0,
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._users = users
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._talk = talk
        self._random = random.Random(seed)  # noqa: S311 - a repeatable choice of prompts, no secret
        self._corpus: list[int] = []
        self._offsets: deque[int] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopping = False
        self._began = time.monotonic()
        self._http = aiohttp.ClientSession(
            timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0, force_close=True), read_bufsize=2**18
        )
        self.stats = self._phase = Stats()

    async def start(self) -> None:
        """Let the engine tokenize the text for prompts, and start the users.

        Raises:
            LoadError: the engine does not answer, or the prompts do not fit its context.
        """
        text = "\n\n".join(topics[key] for key in sorted(topics))[:CORPUS_CHARACTERS]
        try:
            body = {"model": self._model, "prompt": text}
            async with self._http.post(f"{self._url}/tokenize", json=body, raise_for_status=True) as answer:
                tokenized = await answer.json(content_type=None)
            self._corpus = [int(t) for t in tokenized["tokens"]]
            longest = int(tokenized["max_model_len"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{self._url}/tokenize: {type(error).__name__}: {error}") from error
        more = self._talk.turns * (self._output_tokens * 3 // 2) + (self._talk.turns - 1) * self._talk.asked
        if not 0 < self._prompt_tokens <= longest - more:
            raise LoadError(
                f"prompt_tokens: {self._prompt_tokens} and up to {more} of output and questions do not fit the model's "
                f"context of {longest}: use fewer"
            )
        self._began = time.monotonic()
        self.set_users(self._users)

    def set_users(self, users: int) -> None:
        """Change the number of users. Surplus users stop after their current request."""
        self._users = users
        for index in range(users):
            if index not in self._tasks or self._tasks[index].done():
                self._tasks[index] = asyncio.create_task(self._user(index))

    def phase(self) -> Stats:
        """Begin a phase of the load, and return its counts. They grow until the next phase begins."""
        self._phase = Stats()
        return self._phase

    async def stop(self, patience_seconds: float = 60.0) -> None:
        """Send no more requests, and wait for those in flight.

        If none of them ends for `patience_seconds`, the remaining ones count as failed.
        """
        self._stopping = True
        late = {t for t in self._tasks.values() if not t.done()}
        while late:
            ended, late = await asyncio.wait(late, timeout=patience_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                break
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self._http.close()

    def summary(self) -> str:
        """Return one line with the numbers of users and requests, the tokens per second and the latencies."""
        s = self.stats
        rate = s.output_tokens / max(time.monotonic() - self._began, 1e-3)
        active = sum(not t.done() for t in self._tasks.values())
        return (
            f"{active} users, {s.ok} answered, {s.failed} failed, {rate:.1f} tokens/s, "
            f"first token p50 {percentile(s.first_token, 0.5):.2f} s p95 {percentile(s.first_token, 0.95):.2f} s, "
            f"between tokens p50 {percentile(s.between_tokens, 0.5) * 1000:.0f} ms "
            f"p95 {percentile(s.between_tokens, 0.95) * 1000:.0f} ms"
        )

    async def _user(self, index: int) -> None:
        tokens: list[int] = []
        turn = 0
        while index < self._users and not self._stopping:
            tokens = self._part(self._talk.asked if turn else self._prompt_tokens, tokens)
            try:
                tokens = tokens + await self._request(tokens)
            except asyncio.CancelledError:
                self._fail("not answered before the load was stopped")
                raise
            except Exception as error:
                # Count any error. Otherwise the user's task would end without a trace.
                self._fail(str(error) if isinstance(error, _Failed) else f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_AFTER_FAILURE_SECONDS)
                turn = self._talk.turns
            turn += 1
            if turn >= self._talk.turns:
                tokens, turn = [], 0
            if self._talk.thought and not self._stopping:
                await self._think()

    async def _think(self) -> None:
        ends = time.monotonic() + self._random.expovariate(1 / self._talk.thought)
        while (left := ends - time.monotonic()) > 0 and not self._stopping:
            await asyncio.sleep(min(left, 0.2))

    def _counts(self) -> tuple[Stats, ...]:
        return (self.stats,) if self._phase is self.stats else (self.stats, self._phase)

    def _fail(self, text: str) -> None:
        for stats in self._counts():
            stats.failed += 1
            stats.failures.append(f"after {time.monotonic() - self._began:.1f} s: {text[:300]}")

    def _part(self, count: int, before: list[int]) -> list[int]:
        """Return `before` plus the next `count` tokens of the text. At the text's end, continue at its beginning.

        Start at another token each time, until every token has been a start.
        """
        if not self._offsets:
            self._offsets.extend(self._random.sample(range(len(self._corpus)), len(self._corpus)))
        start = self._offsets.popleft()
        size = len(self._corpus)
        return before + [self._corpus[(start + i) % size] for i in range(count)]

    async def _request(self, prompt: list[int]) -> list[int]:
        """Send a prompt, and return the tokens of the answer. Return none if the engine does not report token ids."""
        # Answers have random lengths. Otherwise all users would end together and leave the cache empty.
        wanted = self._random.randint(self._output_tokens // 2 + 1, self._output_tokens * 3 // 2)
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": self._talk.turns > 1,
        }
        sent = time.monotonic()
        times: list[float] = []
        counts: list[int] = []
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        done = False
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise _Failed(f"HTTP {response.status}: {await response.text(errors='replace')}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    chunk = _chunk(line[6:])
                    usage = chunk.get("usage") or usage
                    if choices := chunk.get("choices"):
                        times.append(time.monotonic())
                        new = choices[0].get("token_ids") or ()
                        tokens += new
                        counts.append(max(1, len(new)))
        answered = int(usage.get("completion_tokens", 0))
        if not done or not times or answered != wanted:
            raise _Failed(f"the answer ended after {answered or len(times)} of {wanted} tokens")
        for stats in self._counts():
            stats.ok += 1
            stats.prompt_tokens += len(prompt)
            stats.output_tokens += answered
            stats.first_token.append(times[0] - sent)
            # An event may bring several tokens. Divide the time since the last event equally among them.
            for (a, b), count in zip(pairwise(times), counts[1:], strict=True):
                stats.between_tokens.extend([(b - a) / count] * count)
        return tokens


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise _Failed(f"not JSON: {data[:100].decode(errors='replace')}") from error
    if not isinstance(chunk, dict) or "error" in chunk:
        raise _Failed(f"the engine failed: {data[:300].decode(errors='replace')}")
    return chunk


async def _run(args: argparse.Namespace) -> int:
    load = Load(
        args.url, args.model, users=args.users, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens
    )
    await load.start()
    ends = time.monotonic() + args.seconds
    try:
        while (left := ends - time.monotonic()) > 0:
            await asyncio.sleep(min(5.0, left))
            print(load.summary(), flush=True)
    finally:
        await load.stop()
    print(load.summary())
    for failure in load.stats.failures:
        print(failure, file=sys.stderr)
    return 1 if load.stats.failed else 0


def main() -> int:
    """Run the load from a shell. Return 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="kvpilot_demo.load", description="A closed-loop load on an engine.")
    parser.add_argument("url", help="the Service's address, http://host:port")
    parser.add_argument("model", help="the model's served name")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    try:
        return asyncio.run(_run(parser.parse_args()))
    except LoadError as error:
        print(f"load: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
