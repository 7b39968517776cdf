"""Interface of the accuracy table's codecs: a round trip through a cache, and the number of bits that the cache needs.

The table judges a codec by its effect on attention. The functions `key` and `value` take the exact vectors of one layer
and one sequence, in order. They return the vectors that the codec's cache would return. The order matters only for
codecs that quantize several tokens together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpilot_formats.formats import Format
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import round_trip

RoundTrip = Callable[[torch.Tensor], torch.Tensor]
"""Function that takes float32 [tokens, kv_heads, D] and returns the decoded vectors in the same shape."""


@dataclass(frozen=True)
class Codec:
    """Codec of a KV cache.

    Attributes:
        name: name in the tables.
        key, value: round trip of keys (after RoPE) and of values.
        key_bits, value_bits: functions that take head_dim and return bits per element, with scales and zero points.
        tile: number of tokens that are quantized together; 1 for per-token codecs.
        exact_ends: True to keep the sequence's first `tile` tokens and its unfinished tile in 16 bits. `bits` does not
            count these.
    """

    name: str
    key: RoundTrip
    value: RoundTrip
    key_bits: Callable[[int], float]
    value_bits: Callable[[int], float]
    tile: int = 1
    exact_ends: bool = False

    def bits(self, head_dim: int) -> float:
        """Return the mean of the bits per element of keys and of values, with all metadata."""
        return (self.key_bits(head_dim) + self.value_bits(head_dim)) / 2


def min_max(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize asymmetrically over the dimension `dim`, to the nearest code. Return codes (float), step and minimum.

    Step and minimum keep the dimension `dim`, with length 1.

        step = (max - min) / (2^b - 1)        code = round((x - min) / step)        x' = code * step + min
    """
    low = x.amin(dim, keepdim=True)
    step = ((x.amax(dim, keepdim=True) - low) / ((1 << bits) - 1)).clamp_min(1e-8)
    return ((x - low) / step).round().clamp_(0, (1 << bits) - 1), step, low


def half(x: torch.Tensor) -> torch.Tensor:
    """Round to float16, the dtype in which caches store everything except codes. Return float32."""
    return x.half().float()


def own(fmt: Format, factors: Factors | None = None, recent: bool = False) -> Codec:
    """Return the codec of our format `fmt` for one layer. With `recent`, it includes residuals."""
    return Codec(
        fmt.name + ("+calibrated" if factors else ""),
        lambda x: _read_back(x, fmt, "key", factors, recent),
        lambda x: _read_back(x, fmt, "value", factors, recent),
        lambda dim: (fmt.key.bits * fmt.row_dim(dim) + 16 * fmt.groups(dim)) / dim,
        lambda dim: (fmt.value.bits * fmt.row_dim(dim) + 16 * fmt.groups(dim)) / dim,
    )


def _read_back(x: torch.Tensor, fmt: Format, side: str, factors: Factors | None, recent: bool) -> torch.Tensor:
    return round_trip(x, fmt, side, factors, recent).float()
