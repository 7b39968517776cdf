"""Control one probe run on an engine: settings, waits for users' requests, and the deadline."""

import asyncio
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvpilot_probes.client import READ_SECONDS, EngineClient, Progress, http_client, untold
from kvpilot_probes.errors import EngineUnreachable, ProbeTimeout
from kvpilot_probes.pace import MOST_SECONDS

T = TypeVar("T")

LOOK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Rule that makes a probe wait while users' requests are queued.

    - `load`: function that returns the numbers of queued and of running requests.
    - `seconds`: longest wait for queued requests in total.
    - `rests`: rest after each request while users' requests run, too (`pace.py`).
    """

    load: Callable[[], Awaitable[tuple[float, float]]]
    seconds: float
    rests: bool = False


class Throttle:
    """Throttle of one probe run. It waits for users' requests, and counts the tokens that the run has `spent`."""

    def __init__(self, give_way: GiveWay | None) -> None:
        self._give_way = give_way
        self._left = give_way.seconds if give_way is not None else 0.0
        self._yields = True
        self.spent = 0

    async def beside_users(self, engine: EngineClient, ask: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Call `ask` with the client to use, and return the answer.

        The run first waits until no users' requests are queued, and sends its own requests with low priority. If the
        queue never empties, an engine never serves requests of that priority. So the run stops waiting once its time
        for waits is used up, or a request of low priority gets no answer. From then on it sends requests like one more
        user.
        """
        await self._let_users_go_first(engine)
        if engine.priority is not None and self._yields:
            try:
                return await ask(engine)
            except EngineUnreachable:
                self._yields = False
        return await ask(engine if self._yields else replace(engine, priority=None))

    async def _let_users_go_first(self, engine: EngineClient) -> None:
        rule, began, queued = self._give_way, time.monotonic(), 1.0
        while rule is not None and queued and (self._yields or rule.rests):
            queued, running = await rule.load()
            engine.pace.see(running if rule.rests else 0.0)
            self._yields = self._yields and (not queued or time.monotonic() - began < self._left)
            if not self._yields:
                break
            await asyncio.sleep(LOOK_AGAIN_SECONDS if queued else 0)
        self._left -= time.monotonic() - began


# Length of an answer in tokens. 32 tokens reach past the first sentence, where a damaged cache starts to show.
DEFAULT_TOKENS = 32
MIN_TOKENS = 8
MAX_TOKENS = 128
# Number of logprobs to request at each position: vLLM's default --max-logprobs.
TOP_K = 20
# Largest number of resumed answers of a prompt. A 4-bit cache diverges from bf16 about every tenth token. Twelve
# resumes leave a margin, and limit the requests to an engine that answers garbage.
MAX_RESUMES = 12
# A deadline allows START_SECONDS, and then the time that the tokens take at the following speed: a third of the speed
# of a small model on two busy CPU cores (docs/accuracy-watch.md).
START_SECONDS = 60.0
PREFILL_TOKENS_PER_SECOND = 100
DECODE_TOKENS_PER_SECOND = 2
# Number of requests in flight on an engine without users. Some damage shows only in large batches.
CONCURRENCY = 24
# Largest number of tokens in flight, with answers. At the speed above, an engine reads them all within READ_SECONDS.
TOKENS_IN_FLIGHT = int(READ_SECONDS * PREFILL_TOKENS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one probe run.

    - `tokens`: number of decoded tokens of each prompt.
    - `concurrency`: most requests in flight; fewer if prompts are long (`in_flight.bounded`).
    - `deadline_seconds`: limit of the whole run; None derives it from the number of tokens.
    - `budget_seconds`: time after which a measurement sends no further prompt. Its result covers the prompts until
      then.
    - `max_resumes`: most new requests of a prompt after divergences.
    - `give_way`: rule by which the run waits for users' requests, or None.
    - `priority`: vLLM's priority of the requests; larger numbers are served later.
    - `api_key`: key of a gateway in front of the engine.
    - `progress`: callback after each token or other answer.
    - `seed`: seed of the texts that generated prompts contain.
    - `tasks`: let a measured engine solve the baseline's tasks, which takes most of the decoded tokens.
    - `brief`: skip the remaining prompts of a bucket that is sound, and long answers.
    - `adapters`: LoRA adapters that the engine serves and that write long answers, too.
    - `turn`: number that rotates the prompts of each bucket, so that brief runs send different prompts.
    """

    tokens: int = DEFAULT_TOKENS
    concurrency: int = CONCURRENCY
    deadline_seconds: float | None = None
    budget_seconds: float = math.inf
    max_resumes: int = MAX_RESUMES
    give_way: GiveWay | None = None
    priority: int | None = None
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    progress: Progress = untold
    brief: bool = False
    adapters: tuple[str, ...] = ()
    turn: int = 0
    seed: int = 20
    tasks: bool = True

    def __post_init__(self) -> None:
        bounds = (
            ("tokens", self.tokens, MIN_TOKENS, MAX_TOKENS),
            ("concurrency", self.concurrency, 1, 64),
            ("max_resumes", self.max_resumes, 0, MAX_TOKENS),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise ValueError(f"{name}: {value}; give {low} to {high}")


USUAL = Settings()


@asynccontextmanager
async def probing(
    base_url: str, model: str, settings: Settings
) -> AsyncIterator[tuple[EngineClient, Throttle, asyncio.Timeout]]:
    """Yield the client, the throttle and the deadline of a run. Raise `ProbeTimeout` at the deadline."""
    began = asyncio.get_running_loop().time()
    deadline = asyncio.timeout(settings.deadline_seconds or START_SECONDS)
    try:
        async with deadline, http_client(settings.api_key, settings.tls) as http:
            engine = EngineClient(base_url.rstrip("/"), model, http, settings.progress, settings.priority)
            yield engine, Throttle(settings.give_way), deadline
    except TimeoutError as error:
        raise ProbeTimeout(
            f"{base_url}: not probed within {(deadline.when() or began) - began:.0f} s; the engine is overloaded or "
            "hangs: name fewer probe packs or give it more time"
        ) from error


def allow(deadline: asyncio.Timeout, settings: Settings, prompt_tokens: int, answer_tokens: int) -> None:
    """Set the deadline to now plus the time that this many tokens may take, unless the settings fix the deadline."""
    if settings.deadline_seconds is None:
        needed = prompt_tokens / PREFILL_TOKENS_PER_SECOND + answer_tokens / DECODE_TOKENS_PER_SECOND
        rule = settings.give_way
        waits = rule.seconds + READ_SECONDS + MOST_SECONDS * rule.rests if rule is not None else 0.0
        deadline.reschedule(asyncio.get_running_loop().time() + START_SECONDS + needed + waits)
