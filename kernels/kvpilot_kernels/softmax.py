"""Softmax of attention: some models have a sink, a learned logit of each head that takes weight and has no value."""

from __future__ import annotations

import torch


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension, with one more logit that nothing is returned for; `sinks` broadcasts to [..., 1]."""
    if sinks is None:
        return scores.softmax(-1)
    one_more = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, one_more], -1).softmax(-1)[..., :-1]
