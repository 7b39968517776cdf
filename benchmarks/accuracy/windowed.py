"""Attention of whole sequences with a recent window, in plain torch."""

import torch

_PIECE = 512
"""Number of queries whose scores are in memory at once."""

Sides = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [sequences, kv_heads, tokens, D] each."""


def windowed(
    query: torch.Tensor, pages: Sides, fine: Sides, scale: float, newest: int, *, block: int = 1, since: int = 0,
    sliding_window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return causal attention with a recent window.

    A query reads the `newest` blocks, including its own, from `fine`, and all earlier tokens from `pages`.

    Args:
        query: [sequences, heads, tokens, D]; heads is a multiple of kv_heads.
        scale: factor on the scores.
        block: number of tokens in a block.
        since: position before which all tokens are read from `pages`.
        sliding_window: number of last tokens that a query attends to; None for all.

    Returns:
        [sequences, heads, tokens, D].
    """
    group = query.shape[1] // pages[0].shape[1]
    far, near = (tuple(x.repeat_interleave(group, 1) for x in side) for side in (pages, fine))
    return torch.cat([
        _piece(query, far, near, start, scale, newest, block, since, sliding_window)
        for start in range(0, query.shape[2], _PIECE)
    ], 2)  # fmt: skip


def _piece(
    query: torch.Tensor, far: tuple[torch.Tensor, ...], fine: tuple[torch.Tensor, ...], start: int, scale: float,
    newest: int, block: int, since: int, sliding_window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of up to `_PIECE` queries, from `start` on."""
    (key, value), (near_key, near_value) = far, fine
    end = min(start + _PIECE, query.shape[2])
    begin = min(max(0, (start // block - newest + 1) * block), end)  # first key that any query reads from `fine`
    at, queries = torch.arange(end, device=query.device), torch.arange(start, end, device=query.device)[:, None]
    ago = queries - at
    near = (ago >= 0) & (queries // block - at // block < newest) & (at >= since)
    hidden = ago < 0 if sliding_window is None else (ago < 0) | (ago >= sliding_window)
    q = query[:, :, start:end]
    far_scores = q @ key[:, :, :end].transpose(-1, -2)
    near_scores = q @ near_key[:, :, begin:end].transpose(-1, -2)
    merged = torch.where(near[:, begin:], near_scores, far_scores[..., begin:])
    scores = torch.cat([far_scores[..., :begin], merged], -1).float() * scale
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype)
    return p.masked_fill(near, 0) @ value[:, :, :end] + (p * near)[..., begin:] @ near_value[:, :, begin:end]
