"""Page codec of the Triton kernels: pack and unpack the codes and scale metadata of a page.

`kvpilot_formats.layouts` defines the bytes, and `reference.quantize` does the same in plain torch. A row is one token's
key or value of one KV head, padded to the smallest of `formats.HEAD_DIMS` that is at least the model's head dimension.
Kernels hold a row in slots, 64 for each group. Only rows of 96 and 192 elements, with groups of 48 elements, have empty
slots (`hadamard`).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kvpilot_formats import formats, layouts
from kvpilot_kernels.gpu.layout.hadamard import slots

ZERO_BITS = tl.constexpr(layouts.ZERO_BITS)
ZERO_MASK = tl.constexpr((1 << layouts.ZERO_BITS) - 1)
ZERO_STEPS = tl.constexpr(layouts.ZERO_STEPS)
CUT_BITS = tl.constexpr(layouts.CUT_BITS)
ROUND_UP = tl.constexpr((1 << layouts.CUT_BITS) - 1)
ROUND_HALF = tl.constexpr(1 << (layouts.CUT_BITS - 1))
INFINITY = tl.constexpr(0x7C00 >> layouts.CUT_BITS)
NAN = tl.constexpr(0x7E00 >> layouts.CUT_BITS)
NARROW = tl.constexpr(256)
"""Length of the longest rows, in elements, for which decode keeps queries in registers."""
LARGEST = tl.constexpr(32512.0)
"""Integer to which `store` scales the largest element of a query. A signed upper and lower byte can hold it."""


@dataclass(frozen=True)
class SideLayout:
    """Layout of the keys or values in a page and in a residual page, as a kernel's constant; sizes in bytes.

    Attributes:
        bits: bits of a code.
        dim: elements of a stored row.
        group: elements of a quantization group.
        slots: slots of a row, including empty ones (`hadamard`).
        page: tokens in a page.
        row: bytes of a token's packed codes.
        codes, meta: offsets of the codes and of the scale metadata in a page.
        shrink: factors by which the encoder tries to shrink a group's range (`layouts.SHRINK`).
        digits: number of digits of a residual, `bits` bits each. The residual refines a code to 8 bits.
        residual: tokens in a residual page; 0 without residuals.
        digit_codes, residual_meta: offsets in a residual page; 0 without residuals.
    """

    bits: int
    dim: int
    group: int
    slots: int
    page: int
    row: int
    codes: int
    meta: int
    shrink: tuple[float, ...]
    digits: int = 0
    residual: int = 0
    digit_codes: int = 0
    residual_meta: int = 0


def side_layouts(fmt: formats.Format, head_dim: int, block_size: int, residuals: int) -> tuple[SideLayout, SideLayout]:
    """Return the layouts of keys and of values in a page of `block_size` tokens, and in `residuals` residual pages."""
    page = fmt.page_layout(head_dim, block_size)
    fine = fmt.residual_layout(head_dim, block_size) if residuals else None
    value_meta, dim = fmt.groups(head_dim) * fine.meta.row_bytes if fine else 0, fmt.row_dim(head_dim)
    return tuple(
        SideLayout(
            side.bits, dim, fmt.group_size(head_dim), slots(dim), block_size, codes.row_bytes, codes.offset,
            meta.offset, layouts.SHRINK[side.bits], side.digits, fine.tokens if fine else 0,
            digits.offset if digits else 0, fine.meta.offset + past if fine else 0,
        )
        for side, codes, meta, digits, past in (
            (fmt.key, page.key_codes, page.key_meta, fine and fine.key_digits, 0),
            (fmt.value, page.value_codes, page.value_meta, fine and fine.value_digits, value_meta),
        )
    )  # type: ignore[return-value]  # fmt: skip


@triton.jit
def byte_of(slot, SIDE: tl.constexpr):
    """Return the offset of the byte that holds a slot in a packed row, and True if the slot is not empty."""
    PLANE: tl.constexpr = SIDE.slots * SIDE.bits // 8
    GROUP: tl.constexpr = SIDE.dim // (SIDE.slots // 64)
    if PLANE > 64 and GROUP != 64:  # a plane has several groups of 48 elements, which are adjacent in memory
        at = slot % PLANE // 64 * GROUP + slot % 64
        real = slot % 64 < GROUP
    else:
        at = slot % PLANE
        real = at < SIDE.row
    return at, real


@triton.jit
def pack_codes(codes, SIDE: tl.constexpr):
    """Pack codes, int32 [tokens, slots], into bytes, int32 [tokens, slots * bits / 8]."""
    PLANES: tl.constexpr = 8 // SIDE.bits
    plane = tl.arange(0, PLANES)
    planes = tl.reshape(codes, [codes.shape[0], PLANES, SIDE.slots // PLANES])
    return tl.sum(planes << (SIDE.bits * plane)[None, :, None], 1)


@triton.jit
def write_codes(row_ptr, packed, live, SIDE: tl.constexpr):
    """Write the bytes of `pack_codes` to rows at pointers [tokens], for tokens that are `live`."""
    at, real = byte_of(tl.arange(0, SIDE.slots * SIDE.bits // 8), SIDE)
    tl.store(row_ptr[:, None] + at[None, :], packed.to(tl.uint8), mask=live[:, None] & real[None, :])


@triton.jit
def read_codes(row_ptr, live, SIDE: tl.constexpr):
    """Read the codes of rows at pointers [tokens], as int32 [tokens, slots]. Empty slots give 0."""
    return read_slots(row_ptr, live, tl.arange(0, SIDE.slots), SIDE)


@triton.jit
def read_slots(row_ptr, live, slot, SIDE: tl.constexpr):
    """Read only the slots in `slot`; otherwise like `read_codes`."""
    at, real = byte_of(slot, SIDE)
    byte = tl.load(row_ptr[:, None] + at[None, :], mask=live[:, None] & real[None, :], other=0).to(tl.int32)
    return (byte >> (SIDE.bits * (slot // (SIDE.slots * SIDE.bits // 8)))[None, :]) & ((1 << SIDE.bits) - 1)


@triton.jit
def query_planes(slot, KEY: tl.constexpr):
    """Return a factor and a flag for each slot of a query. Decode's product with keys (`mma.key_planes`) needs both.

    The query's element must be divided by the factor, which is 1 or 4 as float32. The flag is True if the codes that
    the element multiplies end at a byte's sign bit.
    """
    first = slot // (KEY.slots * KEY.bits // 8) * KEY.bits
    above = first - slot // 64 * KEY.group // KEY.row * KEY.bits
    first = tl.where(above >= 4, first - 4, first)
    return tl.where(above % 4 == 2, 4.0, 1.0), first + KEY.bits == 8


@triton.jit
def scale_bits(wanted):
    """Round float32 scales of groups up to the 11 upper bits of a float16. The result stays below infinity."""
    bits = (tl.minimum(wanted, 65504.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            + ROUND_UP) >> CUT_BITS  # fmt: skip
    return tl.minimum(bits, INFINITY - 1)


@triton.jit
def nearest_scale_bits(wanted):
    """Round as `scale_bits` does, but to the nearest."""
    bits = (tl.minimum(wanted, 65504.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            + ROUND_HALF) >> CUT_BITS  # fmt: skip
    return tl.minimum(bits, INFINITY - 1)


@triton.jit
def scale_of(bits):
    """Return the float32 scale of a group's scale bits."""
    return (bits << CUT_BITS).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def zero_of(zero_code, BITS: tl.constexpr):
    """Return the zero points that `zero_code` stands for, float32, in units of a code."""
    return zero_code.to(tl.float32) * (((1 << BITS) - 1) / ZERO_STEPS)


@triton.jit
def pack_meta(bits, zero_code):
    """Pack scale bits and zero_code into scale metadata, int32."""
    return (bits << ZERO_BITS) | zero_code.to(tl.int32)


@triton.jit
def scale_and_zero(meta, BITS: tl.constexpr):
    """Return float32 scales and zero points from scale metadata, int32 of which only the lower 16 bits count."""
    return scale_of((meta & 0xFFFF) >> ZERO_BITS), zero_of(meta & ZERO_MASK, BITS)
