"""Make prose from a seed: sentences without meaning, with facts that prompts can ask for."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

_PLACES = ("harbour", "orchard", "station", "library", "mill", "observatory", "quarry", "market", "bridge", "school")
_PEOPLE = ("the keeper", "a young surveyor", "the baker", "two porters", "the clerk", "an old gardener", "the captain")
_DEEDS = (
    "counted the crates that had come in overnight",
    "wrote the height of the water into the ledger",
    "repaired the latch on the eastern door",
    "waited for the post and spoke about the weather",
    "marked the boundary stones with white paint",
    "lent a ladder to the neighbours",
    "sorted the letters by street and then by number",
    "tested the lamp twice before the fog came",
    "carried four sacks of flour up the stairs",
)
_WHEN = ("In the morning", "Before noon", "At the end of the day", "On the following day", "After the rain")


class Chapter(NamedTuple):
    """Text that contains one fact: the locker `number` has the code `code`."""

    text: str
    number: int
    code: int


def chapters(seed: int, words: int) -> Iterator[Chapter]:
    """Yield chapters of at least `words` words. Each chapter has the code of another locker."""
    rng = Random(seed)  # noqa: S311 - repeatable texts, nothing secret
    number = 100
    while True:
        sentences: list[str] = []
        count = 0
        while count < words:
            when, place, person, deed = (rng.choice(words) for words in (_WHEN, _PLACES, _PEOPLE, _DEEDS))
            sentences.append(f"{when}, at the {place}, {person} {deed}.")
            count += len(sentences[-1].split())
        number += rng.randint(1, 9)
        code = rng.randint(10_000, 99_999)
        sentences.insert(len(sentences) // 2, f"The code of locker {number} is {code}.")
        yield Chapter(" ".join(sentences), number, code)
