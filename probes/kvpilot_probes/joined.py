"""Store prompts so that a long prefix that several of them share is in memory only once."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

# Shortest prefix to share, in tokens. Sharing a shorter one would save little.
_MIN_SHARED = 1024


class Joined(Sequence[int]):
    """Sequence of the first `size` tokens of a document, then a tail. Prompts of one document share its memory."""

    __slots__ = ("_document", "_size", "_tail")

    def __init__(self, document: Sequence[int], size: int, tail: Sequence[int]) -> None:
        self._document, self._size, self._tail = document, size, tail

    def __len__(self) -> int:
        return self._size + len(self._tail)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._document, self._size), self._tail)

    def __getitem__(self, index: Any) -> Any:
        """Return a token, or an array of the tokens of a slice."""
        if isinstance(index, slice):
            return array("I", self)[index]
        at = range(len(self))[index]
        return self._document[at] if at < self._size else self._tail[at - self._size]


def shared(first: "array[int]", second: "array[int]") -> int:
    """Return the length of the longest common prefix, in tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


class Prefix(NamedTuple):
    """Shared prefix: the first `size` tokens of prompt number `document`, which is -1 if there is none."""

    document: int
    size: int


def prefixes(prompts: Sequence[Sequence[int]]) -> list[Prefix]:
    """Return the longest prefix that each prompt shares with an earlier prompt."""
    found: list[Prefix] = []
    long: list[tuple[int, array[int]]] = []
    for index, prompt in enumerate(prompts):
        best = Prefix(-1, 0)
        if len(prompt) >= _MIN_SHARED:
            tokens = array("I", prompt)
            for other, document in long:
                if (size := shared(document, tokens)) >= max(_MIN_SHARED, best.size + 1):
                    best = Prefix(other, size)
            long.append((index, tokens))
        found.append(best)
    return found
