"""Make the pack `builtin/reasoning` from a seed: short tasks with exact answers."""

import json
from collections.abc import Sequence
from random import Random

from kvpilot_probes.packs import Message
from kvpilot_probes.results import Task

SHORT_TOKENS = 48
# Number of tasks of each short kind.
EACH = 4
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "junco", "karst", "lilac")


# Prompt of the pack: its name, its chat and its task.
Made = tuple[str, tuple[Message, ...], Task]


def tasks(seed: int) -> list[Made]:
    """Return the pack's prompts."""
    rng = Random(seed)  # noqa: S311 - repeatable texts, nothing secret
    return [made for i in range(EACH) for made in (_sum(rng, i), _sorting(rng, i), _retrieval(rng, i))]


def _shown(name: str, rows: Sequence[tuple[str, str]], fact: str = "") -> Made:
    """Return a chat that shows all `rows` but the last as solved examples, and asks for the solution of the last.

    A row is a question and its solution. With a `fact`, an answer that has it counts as solved.
    """
    turns = [(Message("user", asked), Message("assistant", solved)) for asked, solved in rows]
    asked, wanted = rows[-1]
    chat = (*(message for turn in turns[:-1] for message in turn), Message("user", asked))
    return name, chat, Task("fact" if fact else "text", json.dumps(fact or wanted), SHORT_TOKENS)


def _sum(rng: Random, index: int) -> Made:
    pairs = [(rng.randint(10, 49), rng.randint(10, 49)) for _ in range(6)]
    return _shown(f"sum-{index}", [(f"What is {a} + {b}?", f"{a} + {b} = {a + b}") for a, b in pairs])


def _sorting(rng: Random, index: int) -> Made:
    rows = [rng.sample(range(1, 60), 4) for _ in range(6)]
    said = [(", ".join(map(str, row)), ", ".join(map(str, sorted(row)))) for row in rows]
    return _shown(f"sort-{index}", [(f"Sort from small to large: {row}", right) for row, right in said])


def _retrieval(rng: Random, index: int) -> Made:
    codes = {word: rng.randint(100, 999) for word in rng.sample(_WORDS, len(_WORDS))}
    facts = "\n".join(f"The number of {word} is {code}." for word, code in codes.items())
    asked = rng.sample(_WORDS, 4)
    rows = [(f"What is the number of {word}?", f"The number of {word} is {codes[word]}.") for word in asked]
    return _shown(f"find-{index}", [(f"{facts}\n\n{rows[0][0]}", rows[0][1]), *rows[1:]], str(codes[asked[-1]]))
