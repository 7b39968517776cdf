"""The Hadamard matrices as the kernels want them: elements in the order in which a row is packed.

A row is packed from `slots`: each group is padded to 64, so that a tile of slots divides into planes and groups by
powers of two. Only head_dim 96 (groups of 48) has slots that hold nothing; their columns are zero.
The matrices hold +-1, which bfloat16 holds exactly; `rotate` divides by the square root of D. Off the GPU, where
Triton's interpreter runs, they are float32: it cannot round to bfloat16.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kvpilot_kernels.reference.hadamard import hadamard


def slots(dim: int) -> int:
    """Slots of a row of `dim` elements."""
    return 128 if dim == 96 else dim


@cache
def packing_order(dim: int, bits: int) -> torch.Tensor:
    """int64 [slots]: the element in each slot, -1 where there is none."""
    wide, planes = slots(dim), 8 // bits
    at = torch.arange(wide)
    if wide == dim:
        return at
    if bits == 8:  # one plane: the groups lie side by side
        return torch.where(at % 64 < 48, at // 64 * 48 + at % 64, -1)
    row, part = dim // planes, wide // planes
    return torch.where(at % part < row, at // part * row + at % part, -1)


@cache
def packing_rotation(dim: int, bits: int, device: torch.device) -> torch.Tensor:
    """[slots, slots]: the signs of H, its columns in slots; zero where there is no element."""
    order, wide = packing_order(dim, bits), slots(dim)
    rotation = torch.zeros(wide, wide, dtype=_dtype(device))
    rotation[:dim] = torch.where(order >= 0, hadamard(dim).sign()[:, order.clamp(min=0)], 0.0)
    return rotation.to(device)


@cache
def plain_rotation(dim: int, device: torch.device) -> torch.Tensor:
    """[slots, slots]: the signs of H in the order of elements, padded with zeros."""
    rotation = torch.zeros(slots(dim), slots(dim), dtype=_dtype(device))
    rotation[:dim, :dim] = hadamard(dim).sign()
    return rotation.to(device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@triton.jit
def rotate(x, rotation, D: tl.constexpr):
    """x H for float32 x [T, slots] and a matrix of signs [slots, slots]: x as the sum of two bfloat16, to 2^-17."""
    if rotation.dtype == tl.float32:
        return tl.dot(x, rotation, input_precision="ieee") * (1.0 / D**0.5)
    upper = x.to(tl.bfloat16)
    lower = (x - upper.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(lower, rotation, tl.dot(upper, rotation)) * (1.0 / D**0.5)
