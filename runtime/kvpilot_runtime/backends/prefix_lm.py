"""Attention in both directions within an image's tokens, as in Gemma 3 and PaliGemma."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Spans = list[tuple[int, int]]
"""Ranges [begin, end) of two or more tokens, relative to a sequence's first new token."""


def ranges(common: Any) -> Mapping[int, Sequence[tuple[int, int]]]:
    """Return each image's first and last token, as positions in the sequence, by the sequence's index in the batch."""
    return common.mm_req_doc_ranges or {}


def spans(common: Any, sequences: Sequence[tuple[int, int, int]]) -> dict[int, Spans]:
    """Return the parts of images among new tokens, by sequence. Leave out sequences without images.

    Args:
        common: vLLM's `CommonAttentionMetadata`.
        sequences: (index in the batch, tokens of context, new tokens) of each sequence.
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
    """Attention of image tokens to later tokens of their image, expressed as causal attention.

    Backends support only causal attention to earlier tokens. So tokens are listed in reverse order: for an image of
    tokens a to z, queries are y to a and keys are z to b.

    Attributes:
        queries: int [tokens], rows of the queries.
        keys: int [tokens], rows of the keys.
        starts: int32 [spans + 1], each span's first place in `queries`.
        longest: largest number of queries of a span.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    starts: torch.Tensor
    longest: int


def later_tokens(rows: Sequence[tuple[int, int, int]]) -> LaterTokens:
    """Return the causal form of attention to later tokens, for spans of image tokens.

    `rows` has for each span: row of its first query, row of its first key, and number of tokens.
    """
    counts = torch.tensor([tokens - 1 for _, _, tokens in rows])
    queries = torch.cat([query + torch.arange(tokens - 2, -1, -1) for query, _, tokens in rows])
    keys = torch.cat([key + torch.arange(tokens - 1, 0, -1) for _, key, tokens in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return LaterTokens(queries, keys, starts, int(counts.max()))
