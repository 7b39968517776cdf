"""Plain attention with what `scaled_dot_product_attention` does not have: capped scores, and sinks."""

from __future__ import annotations

import torch

from kvpilot_kernels.softmax import softmax


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention with capped scores or sinks to the keys that are `seen`, bool [tokens, keys]; [1, heads, tokens, D],
    float32.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(repeat, 1), v.float().repeat_interleave(repeat, 1)
    scores = q.float() @ k.transpose(-1, -2) * scale
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return softmax(scores.masked_fill(~seen, -torch.inf), None if sinks is None else sinks[:, None, None]) @ v
