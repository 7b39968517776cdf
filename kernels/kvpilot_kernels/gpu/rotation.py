"""Rotation of rows by Hadamard matrices, in the order in which a row is packed.

A row of a power of two is rotated by sums and differences of its elements. H of 96 and of 192 is made of a matrix of 12
too: their rows are multiplied by it. A row is packed from `slots`: each group is padded to 64, so that a tile of slots
divides into planes and groups by powers of two. Only rows of 96 and 192 elements (groups of 48) have slots that hold
nothing; their columns are zero. The matrices hold +-1, which bfloat16 holds exactly; `rotate` divides by the square
root of D. Off the GPU, where Triton's interpreter runs, they are float32: it cannot round to bfloat16.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kvpilot_kernels.reference.hadamard import hadamard

MOST = tl.constexpr(128)
"""Slots that one matrix product rotates, at most: a matrix of 128 KiB is more than the shared memory of many GPUs."""


def slots(dim: int) -> int:
    """Slots of a row of `dim` elements."""
    return dim if dim % 3 else dim // 48 * 64


@cache
def packing_order(dim: int, bits: int) -> torch.Tensor:
    """int64 [slots]: the element in each slot of a row that is packed, -1 where there is none: groups of 64 slots."""
    return _padded(dim, min(slots(dim) * bits // 8, 64))


@cache
def plain_order(dim: int) -> torch.Tensor:
    """int64 [slots]: the element in each slot of a row that is not, -1 where there is none: parts of `rotate`."""
    return _padded(dim, min(slots(dim), MOST.value))


def _padded(dim: int, part: int) -> torch.Tensor:
    """Elements in order, each part of the slots padded as the whole row is."""
    at, real = torch.arange(slots(dim)), dim * part // slots(dim)
    return torch.where(at % part < real, at // part * real + at % part, -1)


@cache
def packing_rotation(dim: int, bits: int, device: torch.device) -> torch.Tensor:
    """[slots, slots]: the signs of H, rows in plain slots, columns in packed ones; zero where there is no element."""
    return _signs(dim, packing_order(dim, bits), device)


@cache
def plain_rotation(dim: int, device: torch.device) -> torch.Tensor:
    """[slots, slots]: the signs of H, rows and columns in plain slots; zero where there is no element."""
    return _signs(dim, plain_order(dim), device)


def _signs(dim: int, columns: torch.Tensor, device: torch.device) -> torch.Tensor:
    rows = plain_order(dim)
    signs = hadamard(dim).sign()[rows.clamp(min=0)][:, columns.clamp(min=0)]
    signs = torch.where((rows >= 0)[:, None] & (columns >= 0), signs, 0.0)
    return signs.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)


@triton.jit
def plain_slots(D: tl.constexpr, WIDE: tl.constexpr):
    """`plain_order`: the element in each slot, and whether there is one, [WIDE] each."""
    slot = tl.arange(0, WIDE)
    PART: tl.constexpr = min(WIDE, MOST)
    REAL: tl.constexpr = D * PART // WIDE
    if REAL < PART and PART < WIDE:
        element = slot // PART * REAL + slot % PART
        real = slot % PART < REAL
    else:
        element = slot
        real = slot < D
    return element, real


@triton.jit
def packing_slots(slot, BITS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """`packing_order`: the element in each of these slots of a row that is packed, and whether there is one."""
    PART: tl.constexpr = min(WIDE * BITS // 8, 64)
    REAL: tl.constexpr = D * PART // WIDE
    return slot // PART * REAL + slot % PART, slot % PART < REAL


@triton.jit
def rotate(x, rotation, D: tl.constexpr):
    """x H for float32 x [T, slots], with what `load_rotation` has of H.

    H of a power of two is [[B, B], [B, -B]], and B likewise down to 1: each time neighbours become their sum and their
    difference, to 2^-23 in all. With signs [BASE, BASE] of B, x is multiplied as the sum of two bfloat16, to 2^-17, and
    where a row is two of BASE, one sum and difference is left.
    """
    T: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.shape[1]
    if rotation is None:
        for i in tl.static_range(9):
            if 2 << i <= WIDE:
                x = by_twos(x, T * WIDE // (2 << i), 1 << i)
    else:
        BASE: tl.constexpr = rotation.shape[0]
        PARTS: tl.constexpr = WIDE // BASE
        x = tl.reshape(x, [T * PARTS, BASE])
        if rotation.dtype == tl.float32:
            x = tl.dot(x, rotation, input_precision="ieee")
        else:
            upper = x.to(tl.bfloat16)
            lower = (x - upper.to(tl.float32)).to(tl.bfloat16)
            x = tl.dot(lower, rotation, tl.dot(upper, rotation))
        if PARTS == 2:
            x = by_twos(x, T, BASE)
    return tl.reshape(x, [T, WIDE]) * (1.0 / D**0.5)


@triton.jit
def by_twos(y, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each pair of neighbours of WIDTH numbers their sum and their difference, [PAIRS, 2 * WIDTH]."""
    y = tl.reshape(y, [PAIRS, 2, WIDTH])
    # One sum crosses threads: a - b is a + b less twice what the second one holds.
    twice = tl.where(tl.arange(0, 2) == 1, -2.0, 0.0)[None, :, None]
    return tl.reshape(tl.sum(y, 1)[:, None, :] + twice * y, [PAIRS, 2 * WIDTH])


@triton.jit
def load_rotation(rotation_ptr, D: tl.constexpr, WIDE: tl.constexpr, BACK: tl.constexpr):
    """What `rotate` takes of a matrix [WIDE, WIDE]: its signs [BASE, BASE]; BACK: of its transpose. None for a power of
    two, where H is made of twos alone."""
    BASE: tl.constexpr = min(WIDE, MOST)
    if D == WIDE:
        signs = None
    else:
        row = tl.arange(0, BASE)[:, None]
        column = tl.arange(0, BASE)[None, :]
        signs = tl.load(rotation_ptr + (column * WIDE + row if BACK else row * WIDE + column))
    return signs
