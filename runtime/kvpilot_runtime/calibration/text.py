"""Built-in calibration text (`text.txt`), and its division into sequences. This module does not import vLLM.

The text has prose, code, tables, chats and several writing systems.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXT = Path(__file__).with_name("text.txt")
_SEPARATOR = "\n%%\n"

LONGEST = 8192
"""Largest number of tokens that an engine calibrates on. A quarter of this number gave about the same factors."""

SHORTEST = 128
"""Smallest number of tokens to calibrate on. With fewer, most keys lie in a query's recent window and do not count."""

_LOG_FROM = 1024
"""Position up to which the starts of short sequences are evenly spaced. Beyond it, they are spaced logarithmically."""

_SHORT = 4
"""Number of short sequences. Together they get the second half of the tokens."""

_LONE, _LONE_SHARE = 64, 16
"""Limits on the number of tokens that run alone at position 0: `_LONE`, and one in `_LONE_SHARE` tokens."""


class NoTokensError(ValueError):
    """Error for a tokenizer that returns nothing for text."""


def text_ids(tokenizer: Any, length: int) -> list[int]:
    """Return `length` token ids of the built-in text, which begin like a prompt. Repeat the text if it is too short.

    The last `lone(length)` ids are not text, but possible first tokens of a prompt (`beginnings`).
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
    """Return `count` possible first tokens of a prompt.

    If the tokenizer puts a special token first, repeat this token. Otherwise any token may be first, so take tokens of
    `ids`.
    """
    if tokenizer.encode("a", add_special_tokens=True)[:1] != tokenizer.encode("a", add_special_tokens=False)[:1]:
        return [ids[0]] * count
    return [ids[i * len(ids) // count] for i in range(count)]


def lone(tokens: int) -> int:
    """Return how many tokens at the end of the text run alone, each as a sequence of one token at position 0.

    The mean of their keys becomes `key_first`.
    """
    return min(_LONE, tokens // _LONE_SHARE)


def passes(tokens: int, context: int) -> list[tuple[int, int]]:
    """Return the sequences to run, as (tokens, position of the first token). Leave out the last `lone` tokens.

    RoPE rotates the mean of keys with the position, and one static mean must serve all positions of the context. So the
    first half of the text is one sequence that begins at position 0, in which queries also see distant tokens. The
    second half is four sequences that begin at positions all over the context. RoPE attention depends only on the
    distance between tokens, so a sequence gives the same outputs wherever it begins.

    Args:
        context: number of served positions, at least `tokens`.
    """
    tokens -= lone(tokens)
    short = tokens // (2 * _SHORT)
    reach = context / _LOG_FROM + 1
    starts = [min(int(_LOG_FROM * (reach ** (i / _SHORT) - 1)), context - short) for i in range(_SHORT)]
    return [(tokens - _SHORT * short, 0), *((short, start) for start in starts)]
