"""What every codec of the accuracy table is: a way to read a cache back, and the bits that it takes.

A codec is judged by what attention sees. `key` and `value` turn one layer's fresh vectors of one sequence, in order,
into what its cache would give back for them; per-token codecs ignore the order, codecs with tiles do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

RoundTrip = Callable[[torch.Tensor], torch.Tensor]
"""float32 [tokens, kv_heads, D] to the same shape: what is read back."""


@dataclass(frozen=True)
class Codec:
    """A KV-cache codec.

    Attributes:
        name: as in the tables.
        key, value: the round trip of keys (after RoPE) and of values.
        key_bits, value_bits: bits per element at a head_dim, scales and zero points counted.
        tile: tokens that are quantized together; 1 for codecs that take each token on its own.
        exact_ends: the sequence's first `tile` tokens and its open tile stay in 16 bits, outside `bits`.
    """

    name: str
    key: RoundTrip
    value: RoundTrip
    key_bits: Callable[[int], float]
    value_bits: Callable[[int], float]
    tile: int = 1
    exact_ends: bool = False

    def bits(self, head_dim: int) -> float:
        """Bits per element over keys and values together."""
        return (self.key_bits(head_dim) + self.value_bits(head_dim)) / 2


def min_max(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric round-to-nearest over `dim`: codes (float), and step and minimum with that dimension kept as 1.

    step = (max - min) / (2^b - 1)        code = round((x - min) / step)        x' = code * step + min
    """
    low = x.amin(dim, keepdim=True)
    step = ((x.amax(dim, keepdim=True) - low) / ((1 << bits) - 1)).clamp_min(1e-8)
    return ((x - low) / step).round().clamp_(0, (1 << bits) - 1), step, low


def half(x: torch.Tensor) -> torch.Tensor:
    """What a float16 number stored beside the codes gives back, in float32."""
    return x.half().float()
