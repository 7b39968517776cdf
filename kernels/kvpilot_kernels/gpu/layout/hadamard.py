"""Rotation of rows by Hadamard matrices, in the order in which a row is packed.

A row is one token's key, value or query of one head. If its length is a power of two, the rotation is a fast
Walsh-Hadamard transform: rounds of sums and differences (butterflies). Rows of 96 and 192 elements also need a Hadamard
matrix of order 12. A row of 96 elements has 12 blocks of 8 elements. First, butterflies rotate each block. Then the
matrix, 12 x 12 signs, mixes the blocks: element i of each block with element i of all other blocks.

Kernels hold a row in `slots`, 64 for each quantization group, so that powers of two divide it into planes and groups.
Only rows of 96 and 192 elements, whose groups have 48 elements, have empty slots. Empty slots form whole blocks of 8,
and have the sign 0. All other signs are +-1, which bfloat16 stores exactly. Triton's interpreter cannot round to
bfloat16, so its signs are float32. `rotate` divides by the square root of the row's length D.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kvpilot_kernels.reference.hadamard import hadamard

BASE = tl.constexpr(128)
"""Number of slots of a row of 96 elements. A row of 192 has twice as many."""

EIGHT = tl.constexpr(8)
"""Number of elements of a block. They share a sign, and have adjacent slots."""


def slots(dim: int) -> int:
    """Return the number of slots of a row of `dim` elements."""
    return dim if dim % 3 else dim // 48 * 64


@cache
def packing_order(dim: int, bits: int) -> torch.Tensor:
    """Return the element in each slot of a row in packing order (rotated), int64 [slots]; -1 for an empty slot."""
    return _padded(dim, min(slots(dim) * bits // 8, 64))


@cache
def plain_order(dim: int) -> torch.Tensor:
    """Return the element in each slot of a row in the order of `rotate`, int64 [slots]; -1 for an empty slot."""
    return _padded(dim, min(slots(dim), BASE.value))


def _padded(dim: int, part: int) -> torch.Tensor:
    """Return the element in each slot, int64 [slots]. Each part of `part` slots ends with padding, -1."""
    at, real = torch.arange(slots(dim)), dim * part // slots(dim)
    return torch.where(at % part < real, at // part * real + at % part, -1)


@cache
def packing_signs(dim: int, bits: int, device: torch.device) -> torch.Tensor | None:
    """Return the signs of the matrix of order 12, [16, 16], or None if `dim` is a power of two.

    Rows of the result are blocks of 8 slots in the order of `plain_order`, columns are blocks in that of
    `packing_order`. Empty slots have zeros.
    """
    return _signs(dim, packing_order(dim, bits), device)


@cache
def plain_signs(dim: int, device: torch.device) -> torch.Tensor | None:
    """Return signs like `packing_signs`, but with rows and columns in the order of `plain_order`."""
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
    """Return `plain_order`, [WIDE]: the element in each slot, and True if the slot has one."""
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
    """Return `packing_order` for these slots of a packed row: the element in each, and True if the slot has one."""
    PART: tl.constexpr = min(WIDE * BITS // 8, 64)
    REAL: tl.constexpr = D * PART // WIDE
    return slot // PART * REAL + slot % PART, slot % PART < REAL


@triton.jit
def rotate(x, signs, D: tl.constexpr):
    """Return x H for float32 x [T, slots]. `signs` are from `load_signs`.

    If D is a power of two, H is Sylvester's matrix, [[B, B], [B, -B]] with B of the same form. Each butterfly round
    replaces pairs by their sum and their difference. The relative error of all rounds is 2^-23.

    With signs, the rounds stop at blocks of 8. Then the row is split into two bfloat16 parts and multiplied by the
    signs, with a relative error of 2^-17. A row of 192 elements ends with the sum and difference of its two halves.
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
    """Multiply T * PARTS rows of 96 elements, in their slots, by the matrix of signs of order 12, block by block.

    Tokens vary fastest along M, so that the same four threads hold a row of x and a row of the product.
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
    """Do one butterfly round on PAIRS pairs of adjacent runs a and b of WIDTH numbers each.

    The result is [PAIRS, 2 * WIDTH]: a + b, then a - b.
    """
    y = tl.reshape(y, [PAIRS, 2, WIDTH])
    # Use only one sum across threads: a - b equals (a + b) - 2 b, and b is the second thread's own number.
    twice = tl.where(tl.arange(0, 2) == 1, -2.0, 0.0)[None, :, None]
    return tl.reshape(tl.sum(y, 1)[:, None, :] + twice * y, [PAIRS, 2 * WIDTH])


@triton.jit
def load_signs(signs_ptr, BACK: tl.constexpr):
    """Load signs [16, 16] for `rotate`. With BACK, transpose them to rotate back. Return None if there are no signs."""
    if signs_ptr is None:
        signs = None
    else:
        BY: tl.constexpr = BASE // EIGHT
        row = tl.arange(0, BY)[:, None]
        column = tl.arange(0, BY)[None, :]
        signs = tl.load(signs_ptr + (column * BY + row if BACK else row * BY + column))
    return signs
