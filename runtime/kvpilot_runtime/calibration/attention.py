"""Attention for the calibration pass: each sequence attends to its own tokens, and statistics are collected."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from kvpilot_kernels.fit import Observed
from kvpilot_kernels.softmax import attention, softmax

_ROWS = 1024
"""Number of queries that are computed at once, to limit the memory of scores and masks."""


class Chunk:
    """Replacement of a layer's attention, in which each sequence of the chunk attends only to itself.

    The chunk begins with sequences of `lengths` tokens. Each token after them is a sequence of its own. `seen` collects
    statistics of queries, keys and values. It is None for layers without factors.
    """

    def __init__(self, impl: Any, sliding_window: int | None, seen: Observed | None, lengths: list[int]) -> None:
        self.scale, self.sinks = float(impl.scale), getattr(impl, "sinks", None)
        # Backends call the soft cap on scores `softcap` or `logits_soft_cap`. 0 or None means that there is no cap.
        self.softcap = float(getattr(impl, "softcap", 0.0) or getattr(impl, "logits_soft_cap", 0.0) or 0.0)
        self.window, self.seen, self.lengths = sliding_window, seen, lengths

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: None, output: torch.Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """Compute attention. Query and output are [tokens, heads, D], key and value [tokens, kv_heads, D]."""
        how = self.scale, self.softcap, self.window, self.sinks
        out = output.view(query.shape)
        start = 0
        for length in self.lengths:
            rows = slice(start, start + length)
            if self.seen is not None:
                self.seen.add(query[rows], key[rows], value[rows], *how)
            out[rows] = causal(query[rows], key[rows], value[rows], *how)
            start += length
        if self.seen is not None:
            self.seen.add_first(key[start:])
        alone, repeat = slice(start, None), query.shape[1] // value.shape[1]
        key, value = (x[alone].repeat_interleave(repeat, 1) for x in (key, value))
        scores = (query[alone] * key).sum(-1, keepdim=True).float() * self.scale
        scores = (scores / self.softcap).tanh() * self.softcap if self.softcap else scores
        out[alone] = softmax(scores, None if self.sinks is None else self.sinks[:, None]).to(value.dtype) * value
        return output


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float = 0.0,
           window: int | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """Return causal attention of a sequence to itself, [tokens, heads, D]. Key and value are [tokens, kv_heads, D].

    Args:
        scale: factor on the scores.
        softcap: cap of the scores, which become cap * tanh(score / cap); 0 for none.
        window: number of last tokens that a query attends to, including its own; None for all.
        sinks: [heads], a logit per head that takes part in the softmax but has no value; None without sinks.
    """
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    if not softcap and window is None and sinks is None:
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    outs, tokens = [], q.shape[1]
    for start in range(0, tokens, _ROWS):
        end = min(start + _ROWS, tokens)
        first = 0 if window is None else max(0, start - window + 1)
        ago = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        seen = (ago >= 0) if window is None else (ago >= 0) & (ago < window)
        some_k, some_v = (x[None, :, first:end] for x in (k, v))
        outs.append(attention(q[None, :, start:end], some_k, some_v, seen, scale, softcap, sinks)[0])
    return torch.cat(outs, 1).transpose(0, 1).to(query.dtype)


@contextmanager
def attending_to_itself(config: Any, seen: dict[str, Observed], lengths: list[int]) -> Iterator[None]:
    """Replace the attention of every layer with a `Chunk` inside the `with` block, and restore it afterwards."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(config, Attention)
    kept = {name: layer.impl for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.impl = Chunk(kept[name], layer.sliding_window, seen.get(name), lengths)
        yield
    finally:
        for name, layer in layers.items():
            layer.impl = kept[name]
