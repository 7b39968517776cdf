"""Let an engine solve tasks without teacher forcing, check the answers exactly, and find loops in long answers.

A teacher-forced answer resumes from the baseline's tokens after each difference, which hides errors that add up over a
generation. In an answer to a task, every token is the engine's own. The 16-bit engine solves the same tasks, so a
canary does not fail if even the model in 16 bits cannot solve them.
"""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial

from kvpilot_probes.client import EngineClient
from kvpilot_probes.results import Done, Task
from kvpilot_probes.schemas import matches
from kvpilot_probes.session import Throttle

# Each task gets two answers: a greedy one, and a sampled one with a fixed seed.
SAMPLINGS: tuple[dict[str, object], ...] = ({"temperature": 0}, {"temperature": 0.7, "seed": 20})
# Number of parts of a list that are checked separately, so that one error does not make the whole list wrong.
PARTS = 4
# Largest period in tokens, with which the end of an answer must repeat to count as a loop.
_PERIOD = 64
_LOOP_TOKENS = 192


def cost(tasks: Iterable[Task | None]) -> int:
    """Return the largest number of tokens that all answers to these tasks can have together."""
    return len(SAMPLINGS) * sum(task.tokens for task in tasks if task is not None)


async def done(engine: EngineClient, throttle: Throttle, prompt: Sequence[int], task: Task | None) -> Done | None:
    """Let the engine solve a task, and return its results, or None without a task. `prompt` has token ids."""
    if task is None:
        return None
    asked = solved = long = sound = 0
    for sampling in SAMPLINGS:
        throttle.spent += len(prompt) + task.tokens
        text, tokens = await throttle.beside_users(engine, partial(_generated, prompt, task.tokens, sampling))
        right = checked(task, text)
        asked, solved = asked + len(right), solved + sum(right)
        if task.kind in ("list", "open"):
            long, sound = long + 1, sound + (not loops(tokens))
    return Done(asked, solved, long, sound)


async def _generated(
    prompt: Sequence[int], length: int, sampling: dict[str, object], engine: EngineClient
) -> tuple[str, list[int]]:
    text, tokens = "", []
    async with aclosing(engine.decode(prompt, length, 1, sampling=sampling)) as steps:
        async for step in steps:
            text += step.text
            tokens.append(step.logprobs.token)
    return text, tokens


def checked(task: Task, text: str) -> list[bool]:
    """Return True or False for each part of a task: whether the answer solves it. An open task has no parts."""
    wanted = json.loads(task.wanted)
    if task.kind == "open":
        return []
    if task.kind in ("text", "fact"):
        return [str(wanted).lower() in " ".join(text.lower().split())]
    if task.kind == "call":
        return [is_call(text, wanted)]
    return right_parts(text, *wanted)


def is_call(text: str, wanted: dict[str, object]) -> bool:
    """Return True if the first JSON object of a text is the wanted call, and its arguments follow the tool's schema."""
    start = text.find("{")
    try:
        call, _ = json.JSONDecoder().raw_decode(text[start:]) if start >= 0 else (None, 0)
    except (ValueError, RecursionError):
        return False
    if not isinstance(call, dict) or call.get("name") != wanted["name"]:
        return False
    given, expected = call.get("arguments", call.get("parameters")), wanted["arguments"]
    if not isinstance(given, dict) or not isinstance(expected, dict) or not matches(wanted["schema"], given):
        return False
    return all(given.get(key) == value for key, value in expected.items())


def right_parts(text: str, first: int, step: int, count: int) -> list[bool]:
    """Return True for each of the PARTS parts of an arithmetic sequence that the text contains without error.

    The sequence has `count` numbers and begins with `first`. The text may begin up to 32 numbers later.
    """
    found = [int(number) for number in re.findall(r"\d{1,18}", text)]
    begin = found[0] if found and (found[0] - first) % step == 0 and 0 <= found[0] - first <= 32 * step else first
    part = max(1, count // PARTS)
    wanted = [begin + step * i for i in range(PARTS * part)]
    return [found[i : i + part] == wanted[i : i + part] for i in range(0, PARTS * part, part)]


def loops(tokens: Sequence[int]) -> bool:
    """Return True if the last 192 tokens of an answer repeat with a period of at most 64 tokens."""
    end = list(tokens[-_LOOP_TOKENS:])
    return len(end) == _LOOP_TOKENS and any(end[period:] == end[:-period] for period in range(1, _PERIOD + 1))
