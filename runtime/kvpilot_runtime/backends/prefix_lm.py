"""Tokens of an image that attend to each other both ways, as Gemma 3 and PaliGemma have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Spans = list[tuple[int, int]]
"""Of a sequence's new tokens, counted from the first one: [begin, end) of two tokens and more."""


def ranges(common: Any) -> Mapping[int, Sequence[tuple[int, int]]]:
    """First and last tokens of the images of each sequence that has some, by its place in the batch."""
    return getattr(common, "mm_req_doc_ranges", None) or {}


def spans(common: Any, sequences: Sequence[tuple[int, int, int]]) -> dict[int, Spans]:
    """What a batch, vLLM's `CommonAttentionMetadata`, has of them; sequences without any are left out.

    Args:
        sequences: each one's place in the batch, the tokens before its new ones, and how many are new.

    Tokens of an image that are in the context need nothing more: they were computed with the image whole.
    """
    images = ranges(common)
    found: dict[int, Spans] = {}
    for sequence, context, new in sequences:
        cut = [(max(first - context, 0), min(last + 1 - context, new)) for first, last in images.get(sequence, ())]
        if own := [(begin, end) for begin, end in cut if end - begin > 1]:
            found[sequence] = own
    return found


@dataclass
class LaterTokens:
    """For each token of spans but the last one of each: what it sees beyond a causal mask, as causal attention itself.

    Backwards, the later tokens come first: of tokens a to z, queries y to a see keys z to b.

    Attributes:
        queries, keys: int64 [tokens], rows. starts: int32 [spans + 1], where each span begins in them.
        longest: tokens of a span here, at most.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    starts: torch.Tensor
    longest: int


def later_tokens(rows: Sequence[tuple[int, int, int]]) -> LaterTokens:
    """Of spans, each by the rows of its first query and its first key, and its tokens."""
    counts = torch.tensor([tokens - 1 for _, _, tokens in rows])
    queries = torch.cat([query + torch.arange(tokens - 2, -1, -1) for query, _, tokens in rows])
    keys = torch.cat([key + torch.arange(tokens - 1, 0, -1) for _, key, tokens in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return LaterTokens(queries, keys, starts, int(counts.max()))
