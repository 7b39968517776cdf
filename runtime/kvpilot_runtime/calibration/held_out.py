"""Measurement of the damage by a quantized cache, in a transformers model, on text that was held out of the fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Observed
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_kernels.reference.windowed import windowed
from kvpilot_runtime.calibration.text import passes

HOOK = "kvpilot_calibrate"
"""Name under which transformers knows our attention. Each function here registers its own."""
CHUNK = 256
"""Number of tokens whose logits are in memory at once."""


@dataclass(frozen=True)
class Attention:
    """Parameters of a layer's attention. `softcap` is 0 for none, and `sliding_window` is None for none."""

    scale: float
    softcap: float
    sliding_window: int | None

    @classmethod
    def of(cls, module: Any, options: dict[str, Any]) -> "Attention":
        """Read the parameters from a call of transformers' attention function."""
        window = options.get("sliding_window") or getattr(module, "sliding_window", None)
        return cls(float(options["scaling"]), float(options.get("softcap") or 0.0), window)


def exact(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend without quantization, with transformers' signature. The query is [sequences, heads, tokens, D]."""
    how, fresh = Attention.of(module, options), (key, value)
    out = windowed(
        query, fresh, fresh, how.scale, 0, softcap=how.softcap, sliding_window=how.sliding_window
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def hook() -> str:
    """Register our attention with transformers, and return the name to load a model with."""
    AttentionInterface.register(HOOK, exact)
    return HOOK


def first_keys(model: Any, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the keys of `tokens`, int64 [n], by layer: [n, kv_heads, D]. Each token is alone at position 0."""
    seen: dict[int, torch.Tensor] = {}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        seen[module.layer_idx] = key[:, :, 0]
        return exact(module, query, key, value, mask, **options)

    AttentionInterface.register(HOOK, attend)
    with torch.inference_mode():
        model.get_decoder()(tokens[:, None], use_cache=False)
    return seen


def self_calibrated(model: Any, tokens: torch.Tensor, context: int) -> dict[int, Factors]:
    """Return, by layer, the factors that an engine finds at start for a context of `context` tokens.

    `tokens` are token ids of the built-in text, int64 [tokens].
    """
    seen: dict[int, Observed] = {}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        how = Attention.of(module, options)
        if how.sliding_window is None:
            layer = seen.setdefault(module.layer_idx, Observed(key.shape[1], key.shape[3], key.device))
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            layer.add(q, k, v, how.scale, how.softcap)
        return exact(module, query, key, value, mask, **options)

    AttentionInterface.register(HOOK, attend)
    at = 0
    with torch.inference_mode():
        for length, first in passes(tokens.numel(), context):
            positions = torch.arange(first, first + length, device=tokens.device)[None]
            model.get_decoder()(tokens[None, at : at + length], position_ids=positions, use_cache=False)
            at += length
    with torch.inference_mode():
        for layer, keys in first_keys(model, tokens[at:]).items():
            if layer in seen:
                seen[layer].add_first(keys)
    return {layer: found.factors() for layer, found in seen.items()}


def damage(model: Any, pieces: Sequence[torch.Tensor], dtype: str, factors: dict[int, Factors], recent: int) -> float:
    """Return the mean KL divergence per token (nats x 1000) of a quantized cache from the unquantized model.

    Every token counts as a decode step.

    Args:
        pieces: token ids, int64 [tokens] each.
        recent: tokens of the recent window.
        factors: by layer; a layer without factors is not quantized.
    """
    fmt = formats.parse(dtype)

    def read_back(x: torch.Tensor, side: str, one: Factors, fine: bool) -> torch.Tensor:
        return round_trip(x[0].transpose(0, 1), fmt, side, one, fine).float().transpose(0, 1)[None].to(x.dtype)

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        if (one := factors.get(module.layer_idx)) is None:
            return exact(module, query, key, value, mask, **options)
        pages, fine = (
            (read_back(key, "key", one, near), read_back(value, "value", one, near)) for near in (False, True)
        )
        how = Attention.of(module, options)
        out = windowed(query, pages, fine, how.scale, recent, softcap=how.softcap)
        return out.transpose(1, 2).contiguous(), None

    total, tokens = 0.0, 0
    for piece in pieces:
        states = []
        for function in (exact, attend):
            AttentionInterface.register(HOOK, function)
            with torch.inference_mode():
                states.append(model.get_decoder()(piece[None], use_cache=False).last_hidden_state[0])
        for start in range(0, piece.numel(), CHUNK):
            with torch.inference_mode():
                p, q = (model.get_output_embeddings()(x[start : start + CHUNK]).float().log_softmax(-1) for x in states)
                total += float((p.exp() * (p - q)).sum())
        tokens += piece.numel()
    return 1000 * total / tokens
