"""A transformers model whose attention sees keys and values as a codec's cache would give them back.

Every key (after RoPE) and value that attention uses has been through the codec, the query's own token among them: what
a decode step sees, at every position of a text, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Sums
from kvpilot_kernels.reference.codec import Codec

ByLayer = Callable[[int], Codec]


class Probe:
    """The model, and the codec that its cache stands for."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        hook = f"kvpilot_probe_{id(self)}"
        AttentionInterface.register(hook, self._attend)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=hook)
        self.model = model.to(torch.get_default_device()).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.head = self.model.get_output_embeddings().weight
        self.codec: ByLayer | None = None
        self._sums: dict[int, Sums] | None = None
        self.rounded = False
        """Attention with probabilities rounded to the model's dtype: another kernel for the same formula."""

    @torch.inference_mode()
    def hidden(self, tokens: torch.Tensor, codec: ByLayer | None) -> torch.Tensor:
        """The last layer's states [tokens, hidden] of one sequence [tokens]; None is the model's own dtype."""
        self.codec = codec
        return self.model.model(tokens[None], use_cache=False).last_hidden_state[0]

    def self_calibrated(self, tokens: torch.Tensor) -> list[Factors]:
        """The factors of every layer as an engine finds them at start, from one pass over `tokens` [tokens]."""
        self._sums = {}
        self.hidden(tokens, None)
        found, self._sums = self._sums, None
        return [found[layer].factors() for layer in sorted(found)]

    @torch.inference_mode()
    def logits(self, states: torch.Tensor, chunk: int = 256) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits over the whole vocabulary, float32 [up to chunk, vocabulary], each with its first position."""
        for start in range(0, states.shape[0], chunk):
            yield start, (states[start : start + chunk] @ self.head.T).float()

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention hook: query [1, heads, tokens, D], key and value [1, kv_heads, tokens, D]."""
        scale, seen = options["scaling"], (key, value)
        if self._sums is not None:
            sums = self._sums.setdefault(module.layer_idx, Sums(key.shape[1], key.shape[3], key.device))
            sums.add(*(x[0].transpose(0, 1) for x in (query, key, value)))
        if self.codec is None:
            out = _rounded(query, key, value, scale) if self.rounded else _causal(query, key, value, scale)
        else:
            codec = self.codec(module.layer_idx)
            seen = tuple(side(x[0].transpose(0, 1)).transpose(0, 1)[None].contiguous().to(x.dtype)
                         for side, x in ((codec.key, key), (codec.value, value)))  # fmt: skip
            if codec.exact_ends:
                out = _exact_ends(query, (key, value), seen, scale, codec.tile)
            else:
                out = _causal(query, *seen, scale)
        return out.transpose(1, 2).contiguous(), None


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, piece: int = 512) -> torch.Tensor:
    """Attention as three plain steps, in pieces of queries; scores and probabilities are rounded to the dtype of q."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    outs = []
    for i in range(0, q.shape[2], piece):
        end = min(i + piece, q.shape[2])
        scores = q[:, :, i:end] @ k[:, :, :end].transpose(-1, -2) * scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(i + 1)
        p = scores.float().masked_fill_(future, -torch.inf).softmax(-1).to(q.dtype)
        outs.append(p @ v[:, :, :end])
    return torch.cat(outs, 2)


def _after(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """Attention of queries that follow `context` tokens."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril_(context)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _exact_ends(
    q: torch.Tensor, fresh: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...], scale: float, tile: int
) -> torch.Tensor:
    """Queries of a tile see that tile and the sequence's first one in 16 bits, and the tiles between quantized."""
    outs = []
    for i in range(0, q.shape[2], tile):
        k, v = (
            torch.cat([x[:, :, : min(i, tile)], y[:, :, min(i, tile) : i], x[:, :, i : i + tile]], 2)
            for x, y in zip(fresh, stored, strict=True)
        )
        outs.append(_after(q[:, :, i : i + tile], k, v, i, scale))
    return torch.cat(outs, 2)
