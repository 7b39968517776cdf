"""Compute, without an engine, the calibration factors that an engine should find in the built-in text."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Observed
from kvpilot_runtime.calibration.text import lone, passes, text_ids


def factors_of(folder: Path, chunk: int, context: int) -> list[Factors]:
    """Compute the factors from the first `chunk` tokens, in plain transformers and float32.

    `context` is the number of positions that the engine serves.
    """
    seen: dict[int, Observed] = {}
    tokens = torch.tensor(text_ids(AutoTokenizer.from_pretrained(folder), chunk))

    def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, *, scaling: float,
               sliding_window: int | None = None, **_: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
        window = sliding_window or getattr(layer, "sliding_window", None)
        found = seen.setdefault(layer.layer_idx, Observed(key.shape[1], key.shape[3]))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if len(key) > 1:
            found.add_first(key[:, :, 0])
        else:
            found.add(q, k, v, scaling, sliding_window=window)
        length = query.shape[2]
        ago = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen_by = (ago >= 0) & (ago < (window or length))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen_by, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("kvpilot_observed", attend)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="kvpilot_observed")
    at = 0
    for length, first in passes(chunk, context):
        with torch.inference_mode():
            model(
                tokens[None, at : at + length], position_ids=torch.arange(first, first + length)[None], use_cache=False
            )
        at += length
    assert chunk - at == lone(chunk)  # run the tokens after the last whole chunk one by one
    with torch.inference_mode():
        model(tokens[at:, None], use_cache=False)
    return [seen[layer].factors() for layer in sorted(seen)]
