"""What an engine should have answered: the same weights and codec in plain transformers, without pages or batches.

All keys and values go through the codec as whole tensors, and one causal pass over prompt and answer gives the logits
of each step. An engine computes the same token by token from its pages when chunks read themselves back
(KVPILOT_PREFILL_FROM_PAGES), since every token is quantized on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpilot_kernels import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import round_trip

_NAME = "kvpilot_oracle"


class Oracle:
    """A model in float32 whose full-attention layers see keys and values as the codec gives them back.

    Args:
        folder: the model. dtype: a format of ours, or `auto` for no codec. Sliding-window layers never have one.
        factors: a calibration, layer by layer.
    """

    def __init__(self, folder: Path, dtype: str, factors: Sequence[Factors] | None = None) -> None:
        # As the engine under test: more threads sum in another order, and values on an edge flip.
        torch.set_num_threads(1)
        self._factors = factors
        self._format = None if dtype == "auto" else formats.parse(dtype)
        self._random, self._jitter = torch.Generator().manual_seed(0), 0.0
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attention)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=_NAME)

    @torch.inference_mode()
    def shortfalls(self, prompt: list[int], answer: list[int], jitter: float = 0.0) -> list[float]:
        """How far each token of an answer is below the best of its step, in logits; 0 where it is the best itself.

        `jitter` moves what is quantized by this relative amount, at random. Another order of sums does so, too, and it
        shows where a value lies on the edge between two codes.
        """
        self._jitter = jitter
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attention)
        tokens = torch.tensor([prompt + answer[:-1]])
        logits = self._model(tokens, use_cache=False, logits_to_keep=len(answer)).logits[0].double()
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        below: list[float] = (logits.amax(1) - chosen).tolist()
        return below

    def explains(self, prompt: list[int], answer: list[int], slack: float) -> bool:
        """Whether rounding alone can make this answer the best one up to `slack` logits.

        1e-5 of a value is what two float32 implementations of the layers below a key were seen to differ by.
        """
        return any(max(self.shortfalls(prompt, answer, jitter=1e-5)) <= slack for _ in range(64))

    def _attention(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, scaling: float,
        sliding_window: int | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Causal attention, [1, heads, tokens, D] in and [1, tokens, heads, D] out."""
        window = sliding_window or getattr(layer, "sliding_window", None)
        if self._format is not None and window is None:
            factors = self._factors[layer.layer_idx] if self._factors else None
            key, value = (
                round_trip(self._moved(x).transpose(1, 2), self._format, side, factors).transpose(1, 2).float()
                for side, x in (("key", key), ("value", value))
            )
        far = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None, :]
        seen = (far >= 0) & (far < (window or far.numel() + 1))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return x + x * torch.randn(x.shape, generator=self._random) * self._jitter if self._jitter else x
