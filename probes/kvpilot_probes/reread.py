"""Let an engine write long answers, send them back to it as prompts, and compare the distributions of both passes.

In the other probes, an answer continues from the baseline's token after each difference (teacher forcing), so no engine
decodes far on its own. Here the engine writes a long answer on its own. It then reads the tokens up to some positions
of that answer like a prompt, without a cached page. Both times, a sound engine has the same distribution of the next
token. If decoding has stored or read a wrong page, the two distributions differ.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from secrets import token_hex
from typing import NamedTuple

from kvpilot_probes import stats
from kvpilot_probes.client import EngineClient
from kvpilot_probes.codec import Baseline
from kvpilot_probes.session import TOP_K, Throttle

BUCKETS = GENERATION, ADAPTERS = "generation", "adapters"
# An engine writes long answers only if the baseline has this pack.
_PACK = "builtin/long-context"
# Number of long answers, and number of equally spaced positions of each that are compared.
ANSWERS, SPOTS = 8, 16
# Longest prompt to continue, in tokens.
LONGEST_PROMPT = 512
# Greedy answers of small models repeat themselves, and then hardly read the cache.
# No seed: on a CPU, vLLM 0.32 crashes if a request with a seed has its prompt in chunks.
_SAMPLED: dict[str, object] = {"temperature": 0.7}


class Long(NamedTuple):
    """Long answer to write: its bucket, the model or adapter that writes it, and the baseline's prompt by its index."""

    bucket: str
    model: str
    number: int


def long_answer(context: int) -> int:
    """Return the length of a long answer in tokens: an eighth of the context, but at least 256 and at most 3,072."""
    return min(3072, max(256, context // 8))


def chosen(baseline: Baseline, order: Iterable[int], room: int) -> list[int]:
    """Return the indices of the prompts to answer: the first ANSWERS of `order` with at most `room` tokens.

    `room` leaves space for the answer in the context. Skip prompts with an image. Return none without prompts of the
    pack `builtin/long-context`.
    """
    if not any(prompt.name.startswith(f"{_PACK}/") for prompt in baseline.prompts):
        return []
    texts = (i for i in order if baseline.prompts[i].image is None)
    return [i for i in texts if len(baseline.prompts[i].tokens) <= min(LONGEST_PROMPT, room)][:ANSWERS]


def planned(indices: Sequence[int], model: str, adapters: Sequence[str]) -> tuple[list[Long], list[Long]]:
    """Return the long answers of the model, one to each prompt, and those of its adapters.

    Adapters take turns, and each writes at least one answer. Both lists are empty without prompts.
    """
    count = max(len(indices), len(adapters)) if indices and adapters else 0
    others = (Long(ADAPTERS, adapters[i % len(adapters)], indices[i % len(indices)]) for i in range(count))
    return [Long(GENERATION, model, index) for index in indices], list(others)


async def compare(
    engine: EngineClient, throttle: Throttle, long: Long, prompt: Sequence[int], length: int, over: Callable[[], bool]
) -> tuple[list[stats.Compared], int]:
    """Let the engine write the answer `long`, of `length` tokens. Return the compared positions and the request count.

    `over` returns True if the run's time is used up. If that happens before the last comparison, return no positions.
    """
    engine = replace(engine, model=long.model)
    spots = {len(prompt) + length * (spot + 1) // SPOTS - 1 for spot in range(SPOTS)}
    tokens, decoded = array("I", prompt), dict[int, stats.Logprobs]()
    throttle.spent += len(prompt) + length
    async with aclosing(engine.decode(prompt, length, TOP_K, past_end=True, sampling=_SAMPLED)) as steps:
        async for step in steps:
            if over():
                return [], 1
            if len(tokens) in spots:
                decoded[len(tokens)] = stats.Logprobs(step.logprobs.token, _likeliest(step.logprobs.top))
            tokens.append(step.logprobs.token)
    # The salt makes the engine compute this prompt, instead of using the pages that decoding has stored.
    again = {**_SAMPLED, "cache_salt": token_hex(8)}
    compared: list[stats.Compared] = []
    for at, one in decoded.items():
        if over():
            return [], 1 + len(compared)
        throttle.spent += at + 1
        async with aclosing(engine.decode(tokens[:at], 1, TOP_K, past_end=True, sampling=again)) as steps:
            async for step in steps:
                top = _likeliest(step.logprobs.top)
                # The written token agrees if it is one of the likeliest.
                read = stats.Logprobs(one.token if one.token in top else -1, top)
                compared.append(stats.compare(long.number, read, one, long.bucket))
    return compared, 1 + len(compared)


def _likeliest(top: Mapping[int, float]) -> dict[int, float]:
    """Return the TOP_K likeliest tokens. vLLM also reports the sampled token, which may not be one of them."""
    return dict(sorted(top.items(), key=lambda item: -item[1])[:TOP_K])
