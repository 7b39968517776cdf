"""Send a closed-loop load: each user sends the next request as soon as the last one is answered.

    python -m kvpilot_demo.load http://127.0.0.1:8080 smollm2 --users 8 --prompt-tokens 400 --output-tokens 64

Each request opens its own connection, so that it reaches the pods that the Service selects at that moment. A failed
request is counted and not retried, because a real user would have seen the failure. Prompts are parts of Python's
documentation. They start at different tokens, because a shared prefix in the cache would save the memory that the load
should take.
"""

from __future__ import annotations

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

import httpx

from kvpilot_probes.stats import percentile

# Pause after a failure. Otherwise a user whose connection is refused would retry without end at full speed.
PAUSE_AFTER_FAILURE_SECONDS = 0.5
TIMEOUT = httpx.Timeout(900.0)
# The text has about 12,000 tokens, so there are as many different prompts. A demo uses fewer.
CORPUS_CHARACTERS = 60_000
KEPT_FAILURES = 100
KEPT_TIMES = 20_000


class LoadError(Exception):
    """Error that prevents the load from starting."""


@dataclass(slots=True)
class Stats:
    """Counts since the start. Of each duration, in seconds, it keeps the newest KEPT_TIMES values."""

    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_FAILURES))
    """Newest failures, each with its time and text."""
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    between_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))


class _Failed(Exception):
    """Error for a failed request."""


class Load:
    """Simulated users of an OpenAI-compatible engine at `url` (`http://host:port`)."""

    def __init__(
        self, url: str, model: str, *, users: int, prompt_tokens: int, output_tokens: int, seed: int = 0
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._users = users
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._random = random.Random(seed)  # noqa: S311 - a repeatable choice of prompts, no secret
        self._corpus: list[int] = []
        self._offsets: deque[int] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopping = False
        self._began = time.monotonic()
        self._http = httpx.AsyncClient(
            timeout=TIMEOUT, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self.stats = Stats()

    async def start(self) -> None:
        """Let the engine tokenize the text for prompts, and start the users.

        Raises:
            LoadError: the engine does not answer, or the prompts do not fit its context.
        """
        text = "\n\n".join(topics[key] for key in sorted(topics))[:CORPUS_CHARACTERS]
        try:
            answer = await self._http.post(f"{self._url}/tokenize", json={"model": self._model, "prompt": text})
            answer.raise_for_status()
            tokenized = answer.json()
            self._corpus = [int(t) for t in tokenized["tokens"]]
            longest = int(tokenized["max_model_len"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{self._url}/tokenize: {type(error).__name__}: {error}") from error
        longest_answer = self._output_tokens * 3 // 2
        if not 0 < self._prompt_tokens <= longest - longest_answer:
            raise LoadError(
                f"prompt_tokens: {self._prompt_tokens} and up to {longest_answer} of output do not fit the model's "
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
        await self._http.aclose()

    def summary(self) -> str:
        """Return the load's figures in one line."""
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
        while index < self._users and not self._stopping:
            try:
                await self._request()
            except _Failed as error:
                self._fail(str(error))
                await asyncio.sleep(PAUSE_AFTER_FAILURE_SECONDS)
            except Exception as error:
                # Count any other error, too. Otherwise the user's task would end without a trace.
                self._fail(f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_AFTER_FAILURE_SECONDS)
            except asyncio.CancelledError:
                self._fail("not answered before the load was stopped")
                raise

    def _fail(self, text: str) -> None:
        self.stats.failed += 1
        self.stats.failures.append(f"after {time.monotonic() - self._began:.1f} s: {text[:300]}")

    def _prompt(self) -> list[int]:
        """Return the next part of the text, which wraps around. No part repeats before all were used."""
        if not self._offsets:
            self._offsets.extend(self._random.sample(range(len(self._corpus)), len(self._corpus)))
        start = self._offsets.popleft()
        size = len(self._corpus)
        return [self._corpus[(start + i) % size] for i in range(self._prompt_tokens)]

    async def _request(self) -> None:
        # Answers have random lengths. Otherwise all users would end together and leave the cache empty.
        wanted = self._random.randint(self._output_tokens // 2 + 1, self._output_tokens * 3 // 2)
        body = {
            "model": self._model,
            "prompt": self._prompt(),
            "max_tokens": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.monotonic()
        times: list[float] = []
        usage: dict[str, Any] = {}
        done = False
        async with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise _Failed(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    chunk = _chunk(line[6:])
                    usage = chunk.get("usage") or usage
                    if chunk.get("choices"):
                        times.append(time.monotonic())
        answered = int(usage.get("completion_tokens", 0))
        if not done or not times or answered != wanted:
            raise _Failed(f"the answer ended after {answered or len(times)} of {wanted} tokens")
        self.stats.ok += 1
        self.stats.prompt_tokens += self._prompt_tokens
        self.stats.output_tokens += answered
        self.stats.first_token.append(times[0] - sent)
        self.stats.between_tokens.extend(b - a for a, b in pairwise(times))


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise _Failed(f"not JSON: {data[:100]}") from error
    if not isinstance(chunk, dict) or "error" in chunk:
        raise _Failed(f"the engine failed: {data[:300]}")
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
