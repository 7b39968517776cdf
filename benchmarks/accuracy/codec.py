"""Interface of the accuracy table's codecs: a round trip through a cache, and the number of bits that it needs.

The table judges a codec by the attention that results from it. `key` and `value` take one layer's exact vectors of one
sequence in order. They return the vectors that the codec's cache would return. The order matters only for codecs with
tiles, not for per-token codecs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpilot_formats.formats import Format
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import round_trip

RoundTrip = Callable[[torch.Tensor], torch.Tensor]
"""Function from float32 [tokens, kv_heads, D] to the values read back, in the same shape."""


@dataclass(frozen=True)
class Codec:
    """KV-cache codec.

    Attributes:
        name: name in the tables.
        key, value: round trip of keys (after RoPE) and of values.
        key_bits, value_bits: bits per element at a head_dim, including scales and zero points.
        tile: tokens that are quantized together; 1 for per-token codecs.
        exact_ends: True keeps the sequence's first `tile` tokens and its unfinished tile in 16 bits, which `bits`
            ignores.
    """

    name: str
    key: RoundTrip
    value: RoundTrip
    key_bits: Callable[[int], float]
    value_bits: Callable[[int], float]
    tile: int = 1
    exact_ends: bool = False

    def bits(self, head_dim: int) -> float:
        """Return the bits per element over keys and values together."""
        return (self.key_bits(head_dim) + self.value_bits(head_dim)) / 2


def min_max(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to the nearest code, asymmetrically over `dim`. Return codes (float), step and minimum.

    Step and minimum keep that dimension with length 1.

        step = (max - min) / (2^b - 1)        code = round((x - min) / step)        x' = code * step + min
    """
    low = x.amin(dim, keepdim=True)
    step = ((x.amax(dim, keepdim=True) - low) / ((1 << bits) - 1)).clamp_min(1e-8)
    return ((x - low) / step).round().clamp_(0, (1 << bits) - 1), step, low


def half(x: torch.Tensor) -> torch.Tensor:
    """Round to float16, in which caches store all numbers except codes. Return float32."""
    return x.half().float()


def own(fmt: Format, factors: Factors | None = None, recent: bool = False) -> Codec:
    """Return the codec of one layer in kvpilot's `fmt`. With `recent`, it includes the ring."""
    return Codec(
        fmt.name + ("+calibrated" if factors else ""),
        lambda x: _read_back(x, fmt, "key", factors, recent),
        lambda x: _read_back(x, fmt, "value", factors, recent),
        lambda dim: (fmt.key.bits * fmt.row_dim(dim) + 16 * fmt.groups(dim)) / dim,
        lambda dim: (fmt.value.bits * fmt.row_dim(dim) + 16 * fmt.groups(dim)) / dim,
    )


def _read_back(x: torch.Tensor, fmt: Format, side: str, factors: Factors | None, recent: bool) -> torch.Tensor:
    return round_trip(x, fmt, side, factors, recent).float()
