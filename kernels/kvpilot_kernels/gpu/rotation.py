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
    """x H for float32 x [T, slots] and signs [BASE, BASE]: x as the sum of two bfloat16, to 2^-17.

    `load_rotation` says what BASE is. Where a row is two of them, H is [[B, B], [B, -B]], and so on by twos.
    """
    T: tl.constexpr = x.shape[0]
    BASE: tl.constexpr = rotation.shape[0]
    PARTS: tl.constexpr = x.shape[1] // BASE
    x = tl.reshape(x, [T * PARTS, BASE])
    if rotation.dtype == tl.float32:
        y = tl.dot(x, rotation, input_precision="ieee")
    else:
        upper = x.to(tl.bfloat16)
        lower = (x - upper.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(lower, rotation, tl.dot(upper, rotation))
    if PARTS > 1:
        y = by_twos(y, T * PARTS // 2, BASE)
    if PARTS > 2:
        y = by_twos(y, T * PARTS // 4, 2 * BASE)
    return tl.reshape(y, [T, PARTS * BASE]) * (1.0 / D**0.5)


@triton.jit
def by_twos(y, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each pair of neighbours of WIDTH numbers their sum and their difference, [PAIRS, 2 * WIDTH]."""
    y = tl.reshape(y, [PAIRS, 2, WIDTH])
    second = (tl.arange(0, 2) == 1)[None, :, None]
    less = tl.sum(tl.where(second, -y, y), 1)
    return tl.reshape(tl.where(second, less[:, None, :], tl.sum(y, 1)[:, None, :]), [PAIRS, 2 * WIDTH])


@triton.jit
def load_rotation(rotation_ptr, WIDE: tl.constexpr, BACK: tl.constexpr):
    """The signs that `rotate` takes, [BASE, BASE] of a matrix [WIDE, WIDE]; BACK: of its transpose.

    Of more than 128 slots a part, as a matrix of 128 KiB is more than the shared memory of many GPUs.
    """
    BASE: tl.constexpr = min(WIDE, 128)
    row = tl.arange(0, BASE)[:, None]
    column = tl.arange(0, BASE)[None, :]
    return tl.load(rotation_ptr + (column * WIDE + row if BACK else row * WIDE + column))
