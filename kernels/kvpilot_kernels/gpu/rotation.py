"""Rotation of rows by Hadamard matrices, in the order in which a row is packed.

A row is rotated by sums and differences of its elements. H of 96 and of 192 is made of a matrix of 12 as well: a row of
96 is 12 eights, each rotated so, and one product with 12 x 12 signs is left, for each of the eight places in them. A
row is packed from `slots`: each group is padded to 64, so that a tile of slots divides into planes and groups by powers
of two. Only rows of 96 and 192 elements (groups of 48) have slots that hold nothing, whole eights of them; their signs
are zero. Signs are +-1, which bfloat16 holds exactly; `rotate` divides by the square root of D. Off the GPU, where
Triton's interpreter runs, they are float32: it cannot round to bfloat16.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kvpilot_kernels.reference.hadamard import hadamard

BASE = tl.constexpr(128)
"""Slots of a row of 96 elements, of which a row of 192 is two."""

EIGHT = tl.constexpr(8)
"""Elements that the signs do not part, and that slots keep together."""


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
    return _padded(dim, min(slots(dim), BASE.value))


def _padded(dim: int, part: int) -> torch.Tensor:
    """Elements in order, each part of the slots padded as the whole row is."""
    at, real = torch.arange(slots(dim)), dim * part // slots(dim)
    return torch.where(at % part < real, at // part * real + at % part, -1)


@cache
def packing_signs(dim: int, bits: int, device: torch.device) -> torch.Tensor | None:
    """[16, 16]: signs of the matrix of 12, rows by eights of plain slots, columns by those of packed ones.

    Zero where there is no element. None for a power of two, where H is made of twos alone.
    """
    return _signs(dim, packing_order(dim, bits), device)


@cache
def plain_signs(dim: int, device: torch.device) -> torch.Tensor | None:
    """[16, 16]: as `packing_signs`, rows and columns by eights of plain slots."""
    return _signs(dim, plain_order(dim), device)


def _signs(dim: int, columns: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    if dim % 3:
        return None
    row, column = (order[: BASE.value : EIGHT.value] // EIGHT.value for order in (plain_order(dim), columns))
    signs = hadamard(12).sign()[row.clamp(min=0)][:, column.clamp(min=0)]
    signs = torch.where((row >= 0)[:, None] & (column >= 0), signs, 0.0)
    return signs.to(torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)


@triton.jit
def plain_slots(D: tl.constexpr, WIDE: tl.constexpr):
    """`plain_order`: the element in each slot, and whether there is one, [WIDE] each."""
    slot = tl.arange(0, WIDE)
    PART: tl.constexpr = min(WIDE, BASE)
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
def rotate(x, signs, D: tl.constexpr):
    """x H for float32 x [T, slots], with what `load_signs` has of H.

    H of a power of two is [[B, B], [B, -B]], and B likewise down to 1: each time neighbours become their sum and their
    difference, to 2^-23 in all. With signs that stops at eights; a row is multiplied by signs as the sum of two
    bfloat16, to 2^-17, and where it is two rows of 96, one sum and difference is left.
    """
    T: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.shape[1]
    TWOS: tl.constexpr = WIDE if signs is None else EIGHT
    for i in tl.static_range(9):
        if 2 << i <= TWOS:
            x = by_twos(x, T * WIDE // (2 << i), 1 << i)
    if signs is not None:
        x = by_twelves(x, signs, T, WIDE // BASE)
        if WIDE > BASE:
            x = by_twos(x, T, BASE)
    return tl.reshape(x, [T, WIDE]) * (1.0 / D**0.5)


@triton.jit
def by_twelves(y, signs, T: tl.constexpr, PARTS: tl.constexpr):
    """The eights of T times PARTS rows of 96, in their slots, added up by signs.

    Tokens are the fastest along M: then four threads have a row, as many as hold one of a product's rows.
    """
    BY: tl.constexpr = signs.shape[0]
    y = tl.reshape(tl.permute(tl.reshape(y, [T, PARTS, BY, EIGHT]), [3, 1, 0, 2]), [EIGHT * PARTS * T, BY])
    if signs.dtype == tl.float32:
        y = tl.dot(y, signs, input_precision="ieee")
    else:
        upper = y.to(tl.bfloat16)
        lower = (y - upper.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(lower, signs, tl.dot(upper, signs))
    return tl.permute(tl.reshape(y, [EIGHT, PARTS, T, BY]), [2, 1, 3, 0])


@triton.jit
def by_twos(y, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each pair of neighbours of WIDTH numbers their sum and their difference, [PAIRS, 2 * WIDTH]."""
    y = tl.reshape(y, [PAIRS, 2, WIDTH])
    # One sum crosses threads: a - b is a + b less twice what the second one holds.
    twice = tl.where(tl.arange(0, 2) == 1, -2.0, 0.0)[None, :, None]
    return tl.reshape(tl.sum(y, 1)[:, None, :] + twice * y, [PAIRS, 2 * WIDTH])


@triton.jit
def load_signs(signs_ptr, BACK: tl.constexpr):
    """Signs [16, 16] as `rotate` takes them, with BACK their transpose, to rotate back; None where there are none."""
    if signs_ptr is None:
        signs = None
    else:
        BY: tl.constexpr = BASE // EIGHT
        row = tl.arange(0, BY)[:, None]
        column = tl.arange(0, BY)[None, :]
        signs = tl.load(signs_ptr + (column * BY + row if BACK else row * BY + column))
    return signs
