"""Capture a baseline and measure a candidate against it, by teacher-forced decode (docs/decisions/0003).

Probes decode, because a prefill may attend to fresh 16-bit keys and show no damage. Decode always reads the stored KV
pages. The candidate continues each prompt greedily. While its tokens equal the baseline's, the two distributions at a
position can be compared. After a divergence, a new request resumes from the baseline's tokens up to that position.

A first request sends only the first half of a prompt. The full prompt is then prefilled onto cached pages, like the
next turn of a chat. A cache can be wrong in that case even if it is right for new prompts.
"""

import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import zip_longest

from kvpilot_formats.untrusted import lines
from kvpilot_probes import chats, reread, stats, tasks
from kvpilot_probes.client import EngineClient
from kvpilot_probes.codec import Baseline, BaselinePrompt, check_limits
from kvpilot_probes.errors import BaselineUnfit, EnginesDiffer, MalformedAnswer
from kvpilot_probes.generated import (
    IMAGES,
    Rendered,
    check_alike,
    fingerprint,
    most_resumes,
    rendered,
    sent_first,
)
from kvpilot_probes.in_flight import bounded
from kvpilot_probes.packs import ProbePrompt
from kvpilot_probes.results import LEAST_COPIED, Done, Task, compared_tasks, copied
from kvpilot_probes.sequential import Allowed, Answer, Seen, decide
from kvpilot_probes.session import TOP_K, USUAL, Settings, Throttle, allow, probing

Judged = tuple[list[stats.Compared], int]

TASKS = "tasks"  # Bucket that the result names as not covered if time ran out before all tasks were solved.
MIN_HALF_TOKENS = 16  # vLLM's pages hold at least 16 tokens, so a shorter half of a prompt would fill no page.


async def capture(
    base_url: str,
    model: str,
    prompts: Sequence[ProbePrompt],
    *,
    identity: str,
    dtype: str,
    settings: Settings = USUAL,
) -> Baseline:
    """Return the answers of the 16-bit engine at `base_url` to `prompts`. Raise a `ProbeError` if the probe fails."""
    async with probing(base_url, model, settings) as (engine, throttle, deadline):

        async def answered(item: Rendered) -> BaselinePrompt:
            return await throttle.beside_users(engine, lambda one: _answer(one, throttle, item))

        tokenizer, context = await fingerprint(engine)
        found, left_out = await rendered(engine, prompts, context, settings, lambda: allow(deadline, settings, 0, 0))
        positions = sum(r.answer for r in found)
        check_limits([r.tokens for r in found if r.image is None], positions)
        allow(deadline, settings, sum(len(r.tokens) for r in found), positions + tasks.cost(r.task for r in found))
        answers = await bounded(found, answered, settings.concurrency, lambda r: _size(r.tokens, r.answer, r.task))
    asked, right = copied((one.task, one.done) for one in answers)
    if right < LEAST_COPIED * asked:
        raise BaselineUnfit(
            f"{base_url}: the 16-bit engine copied {right} of {asked} facts from its prompts, and a sound one copies "
            f"at least {math.ceil(LEAST_COPIED * asked)}. Look for its fault (GPU, image, arguments)"
        )
    return Baseline(identity, model, dtype, tuple(answers), left_out, tokenizer=tokenizer)


async def measure(
    base_url: str, model: str, baseline: Baseline, *, allowed: Allowed | None = None, settings: Settings = USUAL
) -> stats.Measurement:
    """Return the damage of the engine at `base_url` against `baseline`. Raise a `ProbeError` if the probe fails.

    The run takes prompts from all buckets round-robin. If `allowed` is given, it stops as soon as the sequential test
    fails the engine. If `settings.brief` is set, too, it skips the remaining prompts of a sound bucket. Runs with
    another `settings.turn` send those prompts. After `settings.budget_seconds` it skips all remaining prompts.
    """
    order = in_turns(baseline, settings.turn)
    return await _measure(base_url, model, baseline, order, settings, allowed)


async def control(base_url: str, model: str, baseline: Baseline, *, settings: Settings = USUAL) -> stats.Measurement:
    """Return the 16-bit engine's damage against its own baseline: the noise to subtract from a candidate's damage.

    Send the prompts in reverse order and with up to twice the concurrency, so that batches differ as in production.
    """
    twice = replace(settings, concurrency=min(2 * settings.concurrency, 64), tasks=False)
    return await _measure(base_url, model, baseline, range(len(baseline.prompts))[::-1], twice)


def in_turns(baseline: Baseline, turn: int) -> list[int]:
    """Return the indices of the prompts in round-robin order: the first of each bucket, then the second, and so on.

    `turn` rotates the order of the prompts within each bucket.
    """
    buckets: dict[str, list[int]] = {}
    for index, prompt in enumerate(baseline.prompts):
        buckets.setdefault(prompt.bucket, []).append(index)
    turned = [indices[turn % len(indices) :] + indices[: turn % len(indices)] for indices in buckets.values()]
    return [index for row in zip_longest(*turned) for index in row if index is not None]


async def _measure(
    base_url: str,
    model: str,
    baseline: Baseline,
    order: Sequence[int],
    settings: Settings,
    allowed: Allowed | None = None,
) -> stats.Measurement:
    began = time.monotonic()
    # If the 16-bit engine takes no images, plan their bucket all the same: the result then names it as not covered.
    refused = [IMAGES.partition("/")[2] for name in baseline.left_out if name.startswith(IMAGES)]
    planned = tuple(dict.fromkeys([*(prompt.bucket for prompt in baseline.prompts), *refused]))
    compared: list[stats.Compared] = []
    seen: list[Seen] = []
    requests = 0

    def over() -> bool:
        return time.monotonic() - began >= settings.budget_seconds

    def skipped(bucket: str) -> bool:
        if over() or allowed is None:
            return over()
        outcome = decide(seen, planned, allowed)
        return outcome.answer == Answer.FAILED or (settings.brief and bucket in outcome.sound)

    async with probing(base_url, model, settings) as (engine, throttle, deadline):
        context = await check_alike(engine, baseline)
        length = reread.long_answer(context)
        begun = reread.chosen(baseline, order, context - length) if not settings.brief else []
        own, others = reread.planned(begun, model, settings.adapters)
        long = [*own, *others]
        planned = tuple(dict.fromkeys((*planned, *(one.bucket for one in long))))
        wanted = [p.task if settings.tasks else None for p in baseline.prompts]
        steps = baseline.positions + tasks.cost(wanted) + len(long) * length
        again = len(long) * reread.SPOTS * (reread.LONGEST_PROMPT + length)
        allow(deadline, settings, sum(len(p.tokens) for p in baseline.prompts) + again, steps)

        async def solved(prompt: BaselinePrompt) -> tuple[str, Done | None, Done | None]:
            task = prompt.task if settings.tasks and not over() else None
            return prompt.bucket, prompt.done, await tasks.done(engine, throttle, prompt.tokens, task)

        async def judged(bucket: str, ask: Callable[[EngineClient], Awaitable[Judged]]) -> None:
            nonlocal requests
            if not skipped(bucket):
                found, asked = await throttle.beside_users(engine, ask)
                compared.extend(found)
                seen.extend(stats.by_bucket(found))
                requests += asked

        async def followed(index: int) -> None:
            prompt = baseline.prompts[index]
            await judged(prompt.bucket, lambda one: follow(one, throttle, index, prompt, settings.max_resumes))

        async def continued(long: reread.Long) -> None:
            tokens = baseline.prompts[long.number].tokens
            await judged(long.bucket, lambda one: reread.compare(one, throttle, long, tokens, length, over))

        sizes = [_size(p.tokens, len(p.answer)) for p in baseline.prompts]
        await bounded(order, followed, settings.concurrency, sizes.__getitem__)
        # Ask adapters last: on a CPU, vLLM changes an answer of the model in a step with an adapter (docs/lora.md).
        for answers in (own, others):
            await bounded(answers, continued, settings.concurrency)
        failed = allowed is not None and decide(seen, planned, allowed).answer == Answer.FAILED
        results = await bounded(
            () if failed else baseline.prompts, solved, settings.concurrency, lambda p: _size(p.tokens, 0, p.task)
        )
        sample = None
        if (worst := stats.worst_prompt(c for c in compared if c.bucket not in reread.BUCKETS)) is not None:
            shown = baseline.prompts[worst]
            sample = await throttle.beside_users(engine, lambda one: _sample(one, throttle, shown))
    return stats.summarise(
        compared,
        requests=requests + (sample is not None),
        tokens=throttle.spent,
        milliseconds=round((time.monotonic() - began) * 1000),
        sample=sample,
        planned=(*planned, TASKS) if over() and any(wanted) else planned,
        tasks=compared_tasks(results),
        cut=over(),
        refused=sum(name.startswith(f"{IMAGES}/") for name in baseline.left_out),
    )


async def _answer(engine: EngineClient, throttle: Throttle, asked: Rendered) -> BaselinePrompt:
    prompt = asked.prompt
    answer: list[stats.Logprobs] = []
    text = ""
    async with aclosing(chats.decode(engine, asked.tokens, asked.image, (), asked.answer, TOP_K)) as steps:
        async for step in steps:
            if not step.logprobs.top:
                raise MalformedAnswer(
                    f"{engine.base_url}: prompt {prompt.name!r}: the logprobs after {len(answer)} tokens are "
                    "not numbers; a baseline needs a sound engine"
                )
            answer.append(step.logprobs)
            text += step.text
    if not answer:
        raise MalformedAnswer(
            f"{engine.base_url}: prompt {prompt.name!r}: no token in the answer; see the engine's log"
        )
    return BaselinePrompt(
        name=f"{prompt.pack}/{prompt.name}",
        tail=lines(prompt.messages[-1].content)[-stats.MAX_TEXT :],
        text=lines(text)[: stats.MAX_TEXT],
        tokens=asked.tokens,
        answer=stats.Answers(answer),
        bucket=prompt.bucket,
        task=asked.task,
        done=await tasks.done(engine, throttle, asked.tokens, asked.task),
        image=asked.image,
    )


async def follow(
    engine: EngineClient, throttle: Throttle, index: int, prompt: BaselinePrompt, max_resumes: int
) -> Judged:
    """Decode along the baseline's answer (teacher forcing). Return the compared positions, and the number of requests.

    `index` is the index of `prompt` in the baseline. After a divergence, a new request resumes from the baseline's
    tokens, at most `max_resumes` times.
    """
    answer = prompt.answer
    forced = array("I", (a.token for a in answer))
    compared: list[stats.Compared] = []
    requests = await _ask_half(engine, throttle, prompt)
    start, resumes = 0, -1
    most = most_resumes(len(prompt.tokens), max_resumes)
    while start < len(answer) and resumes < most:
        reached = start
        wanted = len(answer) - start
        throttle.spent += len(prompt.tokens) + len(answer)
        requests += 1
        resumes += 1
        # Decode past an end token: if the candidate ends earlier or later than the baseline, that is a divergence.
        steps = chats.decode(engine, prompt.tokens, prompt.image, forced[:start], wanted, TOP_K, past_end=True)
        try:
            async with aclosing(steps):
                async for step in steps:
                    judged = stats.compare(index, answer[reached], step.logprobs, prompt.bucket)
                    # The first token comes from a prefill, which may not have read any page. So count it only if it
                    # disagrees.
                    if reached > start or not judged.agrees:
                        compared.append(judged)
                    reached += 1
                    if not judged.agrees:
                        break
        except EnginesDiffer:
            # In a chat, the engine may split the text of an answer into other tokens. Go on one token later.
            if not start:
                raise
            reached += 1
        if reached == start:
            raise MalformedAnswer(
                f"{engine.base_url}: prompt {prompt.name!r}: no token in the answer; see the engine's log"
            )
        start = reached
    return compared, requests


async def _ask_half(engine: EngineClient, throttle: Throttle, prompt: BaselinePrompt) -> int:
    """Send the part of a prompt that the prefix cache should hold first. Return the number of requests, 0 or 1."""
    half = prompt.tokens if prompt.image is not None else sent_first(prompt.bucket, prompt.tokens)
    if len(half) < MIN_HALF_TOKENS:
        return 0
    throttle.spent += len(half) + 1
    await chats.text(engine, half, prompt.image, 1, past_end=True)
    return 1


async def _sample(engine: EngineClient, throttle: Throttle, prompt: BaselinePrompt) -> stats.AnswerPair:
    throttle.spent += len(prompt.tokens) + len(prompt.answer)
    text = await chats.text(engine, prompt.tokens, prompt.image, len(prompt.answer))
    return stats.AnswerPair(prompt=prompt.tail, stable=prompt.text, canary=lines(text)[: stats.MAX_TEXT])


def _size(prompt: Sequence[int], answer: int, task: Task | None = None) -> int:
    """Return the number of tokens of a prompt and its longest answer, either to the prompt itself or to its task."""
    return len(prompt) + max(answer, task.tokens if task is not None else 0)
