"""Simple rival codecs in plain torch: fp8, and 4-bit integers per token and head with and without a rotation.

`fp8_e4m3`: each element is cast to an 8-bit float with 3 bits of mantissa (Micikevicius et al., arXiv 2209.05433). The
scale is 1, as in vLLM without a calibrated checkpoint. Values beyond 448 saturate.

`int4_raw`: asymmetric round-to-nearest per token and head, float16 step and minimum, no rotation.

`int4_per_token_head`: vLLM's dtype of this name (pull request 40835). A Hadamard rotation with random signs; then, per
token and head,

    step = (max - min) / 15        z = clamp(round(-min / step), 0, 15)        code = clamp(round(x / step) + z, 0, 15)

with z in the four lowest mantissa bits of the float32 step.
"""

import torch

from benchmarks.accuracy.codec import Codec, half, min_max
from benchmarks.accuracy.rivals.turboquant import signs
from kvpilot_kernels.reference.hadamard import hadamard


def bf16() -> Codec:
    """Return the codec of a 16-bit cache, the baseline of all others."""
    return Codec("bf16", _bf16, _bf16, lambda _dim: 16.0, lambda _dim: 16.0)


def fp8_e4m3() -> Codec:
    """Return the codec of vLLM's fp8 cache."""
    return Codec("fp8_e4m3", _fp8, _fp8, lambda _dim: 8.0, lambda _dim: 8.0)


def int4_raw() -> Codec:
    """Return a codec of 4-bit integers without a rotation."""
    return Codec("int4_raw", _raw, _raw, lambda dim: 4 + 32 / dim, lambda dim: 4 + 32 / dim)


def int4_per_token_head() -> Codec:
    """Return the codec of vLLM's 4-bit cache with a rotation."""
    return Codec("int4_per_token_head", _rotated, _rotated, lambda dim: 4 + 32 / dim, lambda dim: 4 + 32 / dim)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _raw(x: torch.Tensor) -> torch.Tensor:
    codes, step, low = min_max(x.float(), 4, -1)
    return codes * half(step) + half(low)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    dim = x.shape[-1]
    rotation = signs(dim)[:, None] * hadamard(dim)
    y = x.float() @ rotation
    low = y.amin(-1, keepdim=True)
    step = ((y.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-6)
    zero = (-low / step).round().clamp(0, 15)
    codes = (y / step + zero).round().clamp(0, 15)
    stored = (step.view(torch.int32) & -16).view(torch.float32)
    return (codes - zero) * stored @ rotation.T
