"""KIVI in plain torch (arXiv 2402.02750): keys per channel over groups of tokens, values per token, without a rotation.

Some channels of keys are large in every token. So each channel of a group of G = 32 tokens has its own step and
minimum. Values have no such channels, so G = 32 neighbouring channels of one token share a step and a minimum. Steps
and minima are float16.

The original keeps the last tokens in 16 bits until a group is full. Here they are quantized as a short group.
"""

import torch

from benchmarks.accuracy.codec import Codec, half, min_max

GROUP = 32


def kivi(bits: int) -> Codec:
    """Return the codec of KIVI with `bits` bits for keys and for values. The published one is `kivi(2)`."""
    return Codec(
        f"kivi_{bits}bit",
        lambda x: _keys(x, bits),
        lambda x: _values(x, bits),
        lambda _dim: bits + 32 / GROUP,
        lambda _dim: bits + 32 / GROUP,
        tile=GROUP,
    )


def _keys(x: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([_read_back(*min_max(part, bits, 0)) for part in torch.split(x.float(), GROUP)])


def _values(x: torch.Tensor, bits: int) -> torch.Tensor:
    return _read_back(*min_max(x.float().reshape(*x.shape[:-1], -1, GROUP), bits, -1)).flatten(-2)


def _read_back(codes: torch.Tensor, step: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return codes * half(step) + half(low)
