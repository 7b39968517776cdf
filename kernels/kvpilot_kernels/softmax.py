"""Attention with capped scores and sinks, which torch's `scaled_dot_product_attention` does not support.

A sink is a learned logit of a head. It takes part of the softmax weight but has no value.
"""

import torch


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax over the last dimension. The logits `sinks`, broadcast to [..., 1], enlarge its divisor."""
    if sinks is None:
        return scores.softmax(-1)
    one_more = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, one_more], -1).softmax(-1)[..., :-1]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return attention to the keys where `seen`, bool [tokens, keys], is True: float32 [1, heads, tokens, D].

    Args:
        q: [1, heads, tokens, D], any float dtype.
        k, v: [1, kv_heads, keys, D], any float dtype.
        scale: factor on the scores.
        softcap: 0 for none.
        sinks: [heads], or None.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(repeat, 1), v.float().repeat_interleave(repeat, 1)
    scores = q.float() @ k.transpose(-1, -2) * scale
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return softmax(scores.masked_fill(~seen, -torch.inf), None if sinks is None else sinks[:, None, None]) @ v
