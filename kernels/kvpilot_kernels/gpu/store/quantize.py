"""Quantization of rotated rows: codes, scale metadata and residuals, as in the reference implementation."""

import triton
import triton.language as tl

from kvpilot_formats import layouts
from kvpilot_kernels.gpu.layout.page import (
    NAN,
    ZERO_BITS,
    ZERO_MASK,
    ZERO_STEPS,
    byte_of,
    nearest_scale_bits,
    pack_meta,
    scale_and_zero,
    scale_bits,
    scale_of,
    zero_of,
)

REACH = tl.constexpr(layouts.RESIDUAL_REACH)
GAIN_BITS = tl.constexpr(layouts.GAIN_BITS)
GAIN_LIMIT = tl.constexpr(layouts.GAIN_LIMIT)


@triton.jit
def nearest(x):
    """Round float32 to the nearest integer, ties to even: the added constant moves the fraction out of the mantissa."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def real_slots(SIDE: tl.constexpr):
    """Return True for slots that hold an element, [slots / 64, 64]."""
    _, real = byte_of(tl.arange(0, SIDE.slots), SIDE)
    return tl.reshape(real, [SIDE.slots // 64, 64])


@triton.jit
def quantize(y, lo, hi, SIDE: tl.constexpr):
    """Quantize y [T, G, 64], T tokens of G groups, in the ranges [lo, hi], [T, G] each.

    Return codes [T, G, 64], scale metadata [T, G] and squared errors [T, G].
    """
    QMAX: tl.constexpr = (1 << SIDE.bits) - 1
    # Round the scale up, so that both ends of the range have a code.
    bits = scale_bits((hi - lo) / QMAX)
    scale = scale_of(bits)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    zero_code = tl.minimum(tl.maximum(nearest(lo * inverse * (-ZERO_STEPS / QMAX)), 0.0), ZERO_STEPS)
    zero = zero_of(zero_code, SIDE.bits)
    codes = tl.minimum(tl.maximum(nearest(y * inverse[:, :, None] + zero[:, :, None]), 0.0), QMAX)
    off = (codes - zero[:, :, None]) * scale[:, :, None] - y
    if SIDE.dim != SIDE.slots:  # the error of empty slots must not count
        off = tl.where(real_slots(SIDE)[None, :, :], off, 0.0)
    return codes, pack_meta(bits, zero_code), tl.sum(off * off, 2)


@triton.jit
def stretched(y, codes, meta, BITS: tl.constexpr):
    """Return scale metadata [T, G] whose scales are stretched so that <y, y'> = <y, y> for the decoded y'.

    `reference.quantize` explains why. Empty slots of y [T, G, 64] hold 0.
    """
    scale, zero = scale_and_zero(meta, BITS)
    along = tl.sum((codes - zero[:, :, None]) * scale[:, :, None] * y, 2)
    square = tl.sum(y * y, 2)
    usable = (along > 0) & (along < float("inf")) & (square > 0)
    gain = tl.minimum(square / tl.where(usable, along, 1.0), GAIN_LIMIT)
    bits = nearest_scale_bits(scale * gain)
    return tl.where(usable, pack_meta(bits, meta & ZERO_MASK), meta)


@triton.jit
def encode(y, SIDE: tl.constexpr):
    """Quantize y [T, G, 64] in the best of the tried ranges: codes, int32 [T, G, 64], and scale metadata [T, G]."""
    lo = tl.minimum(tl.min(y, 2), 0.0)
    hi = tl.maximum(tl.max(y, 2), 0.0)
    # Compute the codes again at the end, because registers cannot hold the codes of two ranges.
    if len(SIDE.shrink) > 1:
        least = quantize(y, lo, hi, SIDE)[2]
        best = tl.full(lo.shape, SIDE.shrink[0], tl.float32)
        for i in tl.static_range(1, len(SIDE.shrink)):
            error = quantize(y, lo * SIDE.shrink[i], hi * SIDE.shrink[i], SIDE)[2]
            best = tl.where(error < least, SIDE.shrink[i], best)
            least = tl.minimum(error, least)
        lo *= best
        hi *= best
    codes, meta, _ = quantize(y, lo, hi, SIDE)
    if SIDE.bits <= GAIN_BITS:
        meta = stretched(y, codes, meta, SIDE.bits)
    # Propagate NaN to the whole group: comparisons and `min()` can drop it, `sum()` cannot.
    broken = tl.sum(y, 2) * 0.0 != 0.0
    return tl.where(broken[:, :, None], 0.0, codes).to(tl.int32), tl.where(broken, NAN << ZERO_BITS, meta)


@triton.jit
def residual(y, codes, meta, SIDE: tl.constexpr):
    """Return the residuals that refine codes to 8 bits: r, int32 [T, G, 64], and exponents, int32 [T, G].

    y [T, G, 64] is the rotated row before quantization. `codes` and `meta` are its quantized form.
    """
    COUNT: tl.constexpr = 1 << (8 - SIDE.bits)
    HALF: tl.constexpr = (COUNT - 1) / 2
    scale, zero = scale_and_zero(meta, SIDE.bits)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    off = y * inverse[:, :, None] + zero[:, :, None] - codes.to(tl.float32)
    off = tl.where((scale > 0)[:, :, None], off, 0.0)
    if SIDE.dim != SIDE.slots:
        off = tl.where(real_slots(SIDE)[None, :, :], off, 0.0)
    largest = tl.max(tl.abs(off), 2)
    exponent = (largest > REACH).to(tl.int32) + (largest > 2 * REACH).to(tl.int32)
    finer = tl.where(exponent == 0, COUNT * 1.0, tl.where(exponent == 1, COUNT * 0.5, COUNT * 0.25))
    r = tl.minimum(tl.maximum(nearest(off * finer[:, :, None] + HALF), 0.0), COUNT - 1)
    return r.to(tl.int32), exponent
