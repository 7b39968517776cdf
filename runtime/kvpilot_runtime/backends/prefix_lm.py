"""Let tokens of an image attend to earlier and later tokens of the same image, as Gemma 3 and PaliGemma do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Spans = list[tuple[int, int]]
"""Token ranges [begin, end) of two or more tokens, counted from a sequence's first new token."""


def ranges(common: Any) -> Mapping[int, Sequence[tuple[int, int]]]:
    """Return the (first, last) position of each image in its sequence, by the sequence's index in the batch."""
    return common.mm_req_doc_ranges or {}


def spans(common: Any, sequences: Sequence[tuple[int, int, int]]) -> dict[int, Spans]:
    """Return which new tokens belong to images, by the sequence's index. Leave out sequences without images.

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
    """Attention of image tokens to later tokens of their image, written as causal attention.

    Attention kernels support only causal attention to earlier tokens. So the tokens are listed in reverse order: for an
    image of tokens a to z, the queries are y to a and the keys are z to b.

    Attributes:
        queries: int [tokens], row of each query in the batch.
        keys: int [tokens], row of each key.
        starts: int32 [spans + 1], index in `queries` where each span of image tokens begins.
        longest: largest number of queries of a span.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    starts: torch.Tensor
    longest: int


def later_tokens(rows: Sequence[tuple[int, int, int]]) -> LaterTokens:
    """Return the causal form of attention to later tokens, for spans of image tokens.

    `rows` has three numbers for each span: row of its first query, row of its first key, and number of tokens.
    """
    counts = torch.tensor([tokens - 1 for _, _, tokens in rows])
    queries = torch.cat([query + torch.arange(tokens - 2, -1, -1) for query, _, tokens in rows])
    keys = torch.cat([key + torch.arange(tokens - 1, 0, -1) for _, key, tokens in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return LaterTokens(queries, keys, starts, int(counts.max()))
