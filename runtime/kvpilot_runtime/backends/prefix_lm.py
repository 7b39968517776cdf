"""Images whose tokens attend to each other in both directions, as in Gemma 3 and PaliGemma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Spans = list[tuple[int, int]]
"""Ranges [begin, end) of two or more tokens, relative to a sequence's first new token."""


def ranges(common: Any) -> Mapping[int, Sequence[tuple[int, int]]]:
    """Return the first and last token of each image, by the sequence's index in the batch."""
    return common.mm_req_doc_ranges or {}


def spans(common: Any, sequences: Sequence[tuple[int, int, int]]) -> dict[int, Spans]:
    """Return the spans of a batch, vLLM's `CommonAttentionMetadata`, by sequence. Leave out sequences without spans.

    Args:
        sequences: for each sequence its index in the batch, the tokens before its new ones, and the number of new ones.

    Image tokens in the context need no spans, because they were computed together with the whole image.
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
    """Attention of image tokens to later tokens of their image, in the form of causal attention.

    Reversing the order makes later tokens come first. For tokens a to z, queries run from y to a and keys from z to b.

    Attributes:
        queries, keys: int64 [tokens], rows. starts: int32 [spans + 1], where each span begins in them.
        longest: tokens of the longest span.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    starts: torch.Tensor
    longest: int


def later_tokens(rows: Sequence[tuple[int, int, int]]) -> LaterTokens:
    """Return the later tokens of spans, each given by the rows of its first query and first key, and its length."""
    counts = torch.tensor([tokens - 1 for _, _, tokens in rows])
    queries = torch.cat([query + torch.arange(tokens - 2, -1, -1) for query, _, tokens in rows])
    keys = torch.cat([key + torch.arange(tokens - 1, 0, -1) for _, key, tokens in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return LaterTokens(queries, keys, starts, int(counts.max()))
