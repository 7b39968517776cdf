"""Model in transformers whose attention reads the keys and values that a KV cache would return.

For each row of the accuracy table (`accuracy_rows`), a `Reading` has the rules by which keys (after RoPE) and values
are quantized and read. These rules also apply to the query's own token. So one pass over a text computes the result
of a decode step at every position. Layers with a sliding window use a 16-bit cache, as in an engine with default
settings.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from benchmarks.accuracy.accuracy_rows import Reading
from benchmarks.accuracy.codec import Codec
from benchmarks.accuracy.windowed import Sides, windowed
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Observed
from kvpilot_runtime.calibration.text import passes

_PIECE = 512
"""Number of queries whose scores are in memory at the same time."""


class Probe:
    """Transformers model whose attention reads keys and values by the rules of a `Reading`."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        hook = f"kvpilot_probe_{id(self)}"
        AttentionInterface.register(hook, self._attend)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=hook)
        self.model = model.to(torch.get_default_device()).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.head = self.model.get_output_embeddings().weight
        self.reading: Reading | None = None
        self._seen: dict[int, Observed] | None = None
        self._lone = False
        self.rounded = False
        """True to round scores and probabilities to the model's dtype, as other attention kernels do."""

    @torch.inference_mode()
    def hidden(self, tokens: torch.Tensor, reading: Reading | None) -> torch.Tensor:
        """Return the last hidden states [tokens, hidden] of one sequence. Without a `reading` the cache is exact."""
        self.reading = reading
        return self.model.model(tokens[None], use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def self_calibrated(self, tokens: torch.Tensor, context: int) -> dict[int, Factors]:
        """Return, by layer, the factors that an engine would compute from `tokens` when it starts.

        `context` is the engine's longest context in tokens.
        """
        self._seen, self.reading, at = {}, None, 0
        for length, first in passes(tokens.numel(), context):
            ids, positions = tokens[at : at + length], torch.arange(first, first + length)
            self.model.model(ids[None], position_ids=positions[None], use_cache=False)
            at += length
        self._lone = True
        self.model.model(tokens[at:, None], use_cache=False)
        self._lone = False
        found, self._seen = self._seen, None
        return {layer: found[layer].factors() for layer in sorted(found)}

    @torch.inference_mode()
    def logits(self, states: torch.Tensor, chunk: int = 256) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first position, float32 logits [up to `chunk`, vocabulary]) for consecutive parts of the states."""
        for start in range(0, states.shape[0], chunk):
            yield start, (states[start : start + chunk] @ self.head.T).float()

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention. Transformers calls this function as a hook.

        Args:
            query: [1, heads, tokens, D].
            key, value: [1, kv_heads, tokens, D].
        """
        scale, window = options["scaling"], options.get("sliding_window")
        if self._seen is not None and window is None:
            seen = self._seen.setdefault(module.layer_idx, Observed(key.shape[1], key.shape[3], key.device))
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            if self._lone:
                seen.add_first(key[:, :, 0])
            else:
                seen.add(q, k, v, scale)
        if self.reading is None:
            out = (_rounded if self.rounded else _causal)(query, key, value, scale, window)
        elif window is not None:
            out = _causal(query, key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype), scale, window)
        else:
            out = _read(query, (key, value), self.reading, module.layer_idx, scale)
        return out.transpose(1, 2).contiguous(), None


def _read(query: torch.Tensor, fresh: Sides, reading: Reading, layer: int, scale: float) -> torch.Tensor:
    """Compute attention over keys and values as the cache of a `Reading` would return them.

    Args:
        query: [1, heads, tokens, D].
        fresh: exact keys and values, each [1, kv_heads, tokens, D].
        reading: rules by which the cache stores and returns them.
        layer: index of the layer, which selects its codec.
        scale: factor on scores.
    """

    def back(codec: Codec) -> Sides:
        key, value = (
            side(x[0].transpose(0, 1)).transpose(0, 1)[None].contiguous().to(x.dtype)
            for side, x in zip((codec.key, codec.value), fresh, strict=True)
        )
        return key, value

    codec = reading.pages(layer)
    pages = back(codec)
    if codec.exact_ends:
        return _exact_ends(query, fresh, pages, scale, codec.tile)
    pages = _with_first(pages, fresh, reading.first)
    if reading.newest:
        fine = _with_first(back(reading.fine(layer)), fresh, reading.first) if reading.fine else fresh
        refined = max(0, -(-reading.hit // reading.block) - reading.newest) * reading.block
        out = windowed(query, pages, fine, scale, reading.newest, block=reading.block, since=refined)
    else:
        out = _causal(query, *pages, scale)
    if reading.hit:
        q, k, v = (x[:, :, : reading.hit] for x in (query, *fresh))
        prefix = _causal(q, k, v, scale)
        out = torch.cat([prefix, out[:, :, reading.hit :]], 2)
    return out


def _with_first(stored: Sides, fresh: Sides, first: int) -> Sides:
    """Replace the first `first` tokens of `stored` by those of `fresh`."""
    key, value = (torch.cat([x[:, :, :first], y[:, :, first:]], 2) for x, y in zip(fresh, stored, strict=True))
    return key, value


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None) -> torch.Tensor:
    """Compute causal attention of `q`, [1, heads, tokens, D], to `k` and `v`, [1, kv_heads, tokens, D].

    If `window` is set, a query attends only to the last `window` tokens.
    """
    if window is not None and window < q.shape[2]:
        return windowed(q, (k, v), (k, v), scale, newest=0, sliding_window=window)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Compute the same as `_causal`, but round scores and probabilities to the dtype of `q`."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    outs = []
    for i in range(0, q.shape[2], _PIECE):
        end = min(i + _PIECE, q.shape[2])
        scores = q[:, :, i:end] @ k[:, :, :end].transpose(-1, -2) * scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(i + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril_(i - window)
        p = scores.float().masked_fill_(hidden, -torch.inf).softmax(-1).to(q.dtype)
        outs.append(p @ v[:, :, :end])
    return torch.cat(outs, 2)


def _after(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """Compute causal attention of queries that follow `context` earlier tokens."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril_(context)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _exact_ends(
    q: torch.Tensor, fresh: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...], scale: float, tile: int
) -> torch.Tensor:
    """Compute causal attention with exact ends (`Codec.exact_ends`).

    Each tile of queries reads its own tile and the sequence's first tile in 16 bits, and quantized tiles between them.
    `fresh` has exact keys and values, and `stored` has decoded ones. `tile` is the number of tokens of a tile.
    """
    outs = []
    for i in range(0, q.shape[2], tile):
        k, v = (
            torch.cat([x[:, :, : min(i, tile)], y[:, :, min(i, tile) : i], x[:, :, i : i + tile]], 2)
            for x, y in zip(fresh, stored, strict=True)
        )
        outs.append(_after(q[:, :, i : i + tile], k, v, i, scale))
    return torch.cat(outs, 2)
