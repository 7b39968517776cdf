"""Let an engine solve tasks, and check its answers exactly. `results` compares them with the 16-bit engine's."""

import json
from collections.abc import Iterable, Sequence
from functools import partial

from kvpilot_probes.client import EngineClient
from kvpilot_probes.results import Done, Task
from kvpilot_probes.schemas import matches
from kvpilot_probes.session import Throttle

# Each task gets two answers: a greedy one, and a sampled one.
SAMPLINGS: tuple[dict[str, object], ...] = ({"temperature": 0}, {"temperature": 0.7})


def cost(tasks: Iterable[Task | None]) -> int:
    """Return the largest number of tokens that all answers to these tasks can have together."""
    return len(SAMPLINGS) * sum(task.tokens for task in tasks if task is not None)


async def done(engine: EngineClient, throttle: Throttle, prompt: Sequence[int], task: Task | None) -> Done | None:
    """Let the engine solve a task, and return its results, or None without a task. `prompt` has token ids."""
    if task is None:
        return None
    solved = 0
    for sampling in SAMPLINGS:
        throttle.spent += len(prompt) + task.tokens
        ask = partial(EngineClient.text, prompt=prompt, tokens=task.tokens, sampling=sampling)
        solved += checked(task, await throttle.beside_users(engine, ask))
    return Done(len(SAMPLINGS), solved)


def checked(task: Task, text: str) -> bool:
    """Return True if the answer solves the task."""
    wanted = json.loads(task.wanted)
    return is_call(text, wanted) if task.kind == "call" else str(wanted).lower() in " ".join(text.lower().split())


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
