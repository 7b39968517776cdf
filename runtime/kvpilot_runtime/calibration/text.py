"""Built-in calibration text, and the sequences that an engine makes of it. This module does not import vLLM.

`text.txt` holds prose, code, tables, chats and several scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXT = Path(__file__).with_name("text.txt")
_SEPARATOR = "\n%%\n"

LONGEST = 8192
"""Largest number of tokens to read. A quarter of it gave the same factors within noise."""

SHORTEST = 128
"""Smallest number of tokens to read. With fewer, hardly any query is far from the keys that it reads."""

_LOG_FROM = 1024
"""Position from which every doubling of the context gets equal weight. Lower positions get about equal weight each."""

_SHORT = 4
"""Number of sequences that share the second half of the tokens."""

_LONE, _LONE_SHARE = 64, 16
"""Largest number of tokens that each stand alone at position 0, and the largest share: one token in `_LONE_SHARE`."""


class NoTokensError(ValueError):
    """Error for a tokenizer that returns nothing for text."""


def text_ids(tokenizer: Any, length: int) -> list[int]:
    """Return `length` tokens of the built-in text, which begin like a prompt. A shorter text is repeated.

    The last `lone(length)` tokens are possible first tokens of a prompt: the tokenizer's first special token, or any.
    """
    ids: list[int] = []
    while len(ids) < length:
        before = len(ids)
        for passage in TEXT.read_text(encoding="utf-8").split(_SEPARATOR):
            ids += tokenizer.encode(passage + "\n\n", add_special_tokens=not ids)
        if len(ids) == before:
            raise NoTokensError("the tokenizer gives no tokens for text")
    ids, count = ids[:length], lone(length)
    return ids[: length - count] + beginnings(tokenizer, ids, count)


def beginnings(tokenizer: Any, ids: Sequence[int], count: int) -> list[int]:
    """Return `count` tokens that may begin a prompt like `ids`, a text with the tokenizer's special tokens."""
    if tokenizer.encode("a", add_special_tokens=True)[:1] != tokenizer.encode("a", add_special_tokens=False)[:1]:
        return [ids[0]] * count
    return [ids[i * len(ids) // count] for i in range(count)]


def lone(tokens: int) -> int:
    """Return how many of the last `tokens` are read alone at position 0. They give the mean of the first key."""
    return min(_LONE, tokens // _LONE_SHARE)


def passes(tokens: int, context: int) -> list[tuple[int, int]]:
    """Return the sequences to read, as (tokens, position of the first), for all of `tokens` but the last `lone`.

    RoPE rotates a channel's mean with the position, and one static mean has to serve all positions of the context. So
    only half of the text is one sequence from position 0, in which queries also see distant tokens. The rest is four
    sequences that begin at positions all over the context. Attention depends only on distances, so these positions do
    not change it.

    Args:
        context: number of served positions, at least `tokens`.
    """
    tokens -= lone(tokens)
    short = tokens // (2 * _SHORT)
    reach = context / _LOG_FROM + 1
    starts = [min(int(_LOG_FROM * (reach ** (i / _SHORT) - 1)), context - short) for i in range(_SHORT)]
    return [(tokens - _SHORT * short, 0), *((short, start) for start in starts)]
