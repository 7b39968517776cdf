"""Fill a canary before its users do: its context with one prompt, and then its pool of KV pages with many prompts.

Buffers of attention grow with the context, so an engine may run out of memory only at a full context. An engine with a
full pool evicts and preempts, which can damage answers that are right on an idle engine. So the baseline's prompts are
judged again while long prompts, the fillers, keep the pool full.
"""

import asyncio
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, count, cycle, islice
from typing import NamedTuple

from kvpilot_probes.client import EngineClient, Progress
from kvpilot_probes.codec import Baseline
from kvpilot_probes.errors import ContextNotHeld, EngineRefused, EngineUnreachable, MalformedAnswer
from kvpilot_probes.in_flight import bounded
from kvpilot_probes.packs import Message
from kvpilot_probes.run import follow
from kvpilot_probes.sequential import Allowed, Answer, Seen, decide
from kvpilot_probes.session import USUAL, Settings, Throttle, probing
from kvpilot_probes.stats import Compared, Measurement, by_bucket

PRESSURE = "pressure"
# Largest prompt that fills a context, in tokens. Its JSON takes 2 MiB of the operator's memory.
MAX_FILLED_TOKENS = 262_144
FILL_ANSWER_TOKENS = 8
FILL_SECONDS = 600.0
# Largest pool that is filled, in tokens. To fill a larger one would take longer than PRESSURE_SECONDS. One H200 holds
# 3.3 million tokens of an 8B model in k4v4, and computes 34,000 prompt tokens a second
# (docs/benchmarks/h200-engine-window.md).
MAX_POOL_TOKENS = 4_194_304
PRESSURE_SECONDS = 180.0
# After this time, the share of used pages shows when the pool will be full. If that is too late, the test ends.
TREND_SECONDS = 30.0
# Share of the pool that the fillers' prompts take. The fillers' answers take the rest, and so cause preemptions.
FILLED = 0.95
FULL = 0.9
# Largest length of a filler's answer, in tokens: the engine holds the filler's pages that long. In short contexts, the
# answer has a quarter of the context.
HOLD_TOKENS = 512
# Number of judged prompts in flight. They must fit into the rest of the pool, before the fillers' answers take it.
JUDGED_AT_ONCE = 8
LOOK_SECONDS = 0.5
# Number of answers of a filler after which the test gives up if the pool is still not full.
MAX_TURNS = 3


class Pool(NamedTuple):
    """Capacity of an engine's KV pages in tokens (0 if unknown), and the share of the pages in use (0 to 1)."""

    tokens: int
    usage: float


class Filled(NamedTuple):
    """Results of filling a canary's context and pool.

    - `context`: tokens of the prompt that filled the context.
    - `compared`: positions that were compared while the pool was full.
    - `tokens`: tokens that the fillers and the judged prompts took, answers included.
    - `milliseconds`: duration of the test.
    """

    context: int
    compared: tuple[Compared, ...] = ()
    tokens: int = 0
    milliseconds: int = 0

    @property
    def seen(self) -> tuple[Seen, ...]:
        """Return the damage to each prompt while the pool was full."""
        return by_bucket(self.compared)

    def added_to(self, found: Measurement) -> Measurement:
        """Return the measurement of the canary, extended by these results as the bucket `pressure`."""
        return found.extended(PRESSURE, self.compared, self.tokens, self.milliseconds)


Look = Callable[[], Awaitable[Pool]]


async def fill(
    base_url: str, model: str, baseline: Baseline, *, look: Look, allowed: Allowed, settings: Settings = USUAL
) -> Filled:
    """Fill the context, and then the pool if `look` returns its size. Raise `ContextNotHeld` if the engine fails."""
    began = time.monotonic()
    fixed = replace(settings, deadline_seconds=FILL_SECONDS)
    async with probing(base_url, model, fixed) as (usual, throttle, _):
        length = (await usual.tokenize((Message("user", "."),))).max_model_len
        size = max(1, min(length - FILL_ANSWER_TOKENS, MAX_FILLED_TOKENS))
        patient = replace(usual, read_seconds=FILL_SECONDS)
        working = asyncio.create_task(_report(settings.progress))
        try:
            await _hold(patient, _other_tokens(baseline, size), FILL_ANSWER_TOKENS)
            compared = await _press(patient, throttle, baseline, size, look, allowed, settings.max_resumes)
        except (EngineRefused, EngineUnreachable, MalformedAnswer) as error:
            raise ContextNotHeld(
                f"the engine failed at a prompt of {size} tokens in its context of {length}, or while such prompts "
                f"filled its KV cache: {error}; lower spec.model.maxModelLen, or leave it more memory by "
                "--gpu-memory-utilization or --max-num-batched-tokens in spec.engine.extraArgs"
            ) from error
        finally:
            working.cancel()
    return Filled(size, compared, throttle.spent, round((time.monotonic() - began) * 1000))


async def _press(
    engine: EngineClient,
    throttle: Throttle,
    baseline: Baseline,
    size: int,
    look: Look,
    allowed: Allowed,
    max_resumes: int,
) -> tuple[Compared, ...]:
    """Compare answers to the baseline's prompts while the engine's pool of KV pages is full.

    The result is empty if the pool does not become full in time, or if its size is unknown or too large.
    """
    room, compared = await look(), list[Compared]()
    if not 0 < room.tokens <= MAX_POOL_TOKENS:
        return ()
    hold = min(HOLD_TOKENS, size // 4)
    fillers = math.ceil(FILLED * room.tokens / (size - hold))
    each = int(FILLED * room.tokens / fillers)
    # Each filler begins at a different token, so its prompt differs from all others. All fillers share this memory.
    tokens = memoryview(_other_tokens(baseline, each + fillers))
    full = asyncio.Event()

    async def fill_again(number: int) -> None:
        turns = count()
        while full.is_set() or next(turns) < MAX_TURNS:
            throttle.spent += each + hold
            await _hold(engine, tokens[number : number + each], hold)

    async def judge(index: int) -> None:
        if decide(by_bucket(compared), (PRESSURE,), allowed).answer == Answer.GO_ON:
            prompt = replace(baseline.prompts[index], bucket=PRESSURE)
            compared.extend((await follow(engine, throttle, index, prompt, max_resumes))[0])

    async def judge_all() -> None:
        began = time.monotonic()
        while (usage := (await look()).usage) < FULL:
            took = time.monotonic() - began
            if took > TREND_SECONDS and took * FULL > usage * PRESSURE_SECONDS:
                return
            await asyncio.sleep(LOOK_SECONDS)
        full.set()
        shortest = sorted(range(len(baseline.prompts)), key=lambda index: len(baseline.prompts[index].tokens))
        await bounded(shortest, judge, JUDGED_AT_ONCE)

    tasks = [asyncio.create_task(work) for work in (judge_all(), *(fill_again(n + 1) for n in range(fillers)))]
    try:
        done, _ = await asyncio.wait(tasks, timeout=PRESSURE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tuple(compared)


def _other_tokens(baseline: Baseline, size: int) -> "array[int]":
    """Return `size` tokens of the baseline's prompts in reverse order.

    The result shares no prefix with the prompts, so the prefix cache does not shorten the work. Engines may not expect
    the tokens of an image without the image, so take the tokens of the answer to such a prompt.
    """
    prompts = ((p.tokens if p.image is None else [one.token for one in p.answer]) for p in baseline.prompts)
    tokens = cycle(chain.from_iterable(map(reversed, prompts)))
    return array("I", islice(tokens, size))


async def _hold(engine: EngineClient, prompt: Sequence[int], answer: int) -> None:
    """Send a prompt, and read an answer of `answer` tokens."""
    async with aclosing(engine.decode(prompt, answer, 1, past_end=True)) as steps:
        if not all([bool(step.logprobs.top) async for step in steps]):
            raise MalformedAnswer(f"{engine.base_url}: the logprobs are not numbers")


async def _report(progress: Progress) -> None:
    """Call `progress` each second, because an engine sends nothing while it prefills a long prompt."""
    while True:
        progress()
        await asyncio.sleep(1.0)
