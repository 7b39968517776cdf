"""Store: rotate, scale, quantize, pack and write a step's keys and values, and rotate its queries, in one launch.

A program takes a block of tokens and one head of queries, keys or values. Keys and values are encoded as in
`reference.quantize`, with `kvpilot_kernels.factors`. Unlike there, a group with an infinity reads back as NaN. A query
becomes

    q' = (q / key_scale) H * scale * log2(e)

so that decode can use scores as exponents of 2. The same program writes the ring rows of tokens in the recent window
(`reference.residual`).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvpilot_formats import layouts
from kvpilot_kernels.gpu.layout.hadamard import load_signs, packing_slots, plain_slots, rotate
from kvpilot_kernels.gpu.layout.page import (
    LARGEST,
    NAN,
    ZERO_BITS,
    ZERO_MASK,
    ZERO_STEPS,
    byte_of,
    nearest_scale_bits,
    pack_codes,
    pack_meta,
    query_planes,
    scale_and_zero,
    scale_bits,
    scale_of,
    tags,
    write_codes,
    zero_of,
)

REACH = tl.constexpr(layouts.RING_REACH)
GAIN_BITS = tl.constexpr(layouts.GAIN_BITS)
GAIN_LIMIT = tl.constexpr(layouts.GAIN_LIMIT)


@triton.jit
def nearest(x):
    """Round float32 to the nearest integer, ties to even: the added constant moves the fraction out of the mantissa."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def real_slots(BITS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Return True for slots that hold an element, [WIDE / 64, 64]."""
    _, real = byte_of(tl.arange(0, WIDE), BITS, D, WIDE)
    return tl.reshape(real, [WIDE // 64, 64])


@triton.jit
def quantize(y, lo, hi, BITS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Quantize y [T, G, 64], T tokens of G groups, in the ranges [lo, hi], [T, G] each.

    Return codes [T, G, 64], scale metadata [T, G] and squared errors [T, G].
    """
    QMAX: tl.constexpr = (1 << BITS) - 1
    # Round the scale up, so that both ends of the range have a code.
    bits = scale_bits((hi - lo) / QMAX)
    scale = scale_of(bits)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    zero_code = tl.minimum(tl.maximum(nearest(lo * inverse * (-ZERO_STEPS / QMAX)), 0.0), ZERO_STEPS)
    zero = zero_of(zero_code, BITS)
    codes = tl.minimum(tl.maximum(nearest(y * inverse[:, :, None] + zero[:, :, None]), 0.0), QMAX)
    off = (codes - zero[:, :, None]) * scale[:, :, None] - y
    if D != WIDE:  # the error of empty slots must not count
        off = tl.where(real_slots(BITS, D, WIDE)[None, :, :], off, 0.0)
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
def encode(y, SIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Quantize y [T, G, 64] in the best of the tried ranges: codes, int32 [T, G, 64], and scale metadata [T, G]."""
    lo = tl.minimum(tl.min(y, 2), 0.0)
    hi = tl.maximum(tl.max(y, 2), 0.0)
    # Compute the codes again at the end, because registers cannot hold the codes of two ranges.
    if len(SIDE.shrink) > 1:
        least = quantize(y, lo, hi, SIDE.bits, D, WIDE)[2]
        best = tl.full(lo.shape, SIDE.shrink[0], tl.float32)
        for i in tl.static_range(1, len(SIDE.shrink)):
            error = quantize(y, lo * SIDE.shrink[i], hi * SIDE.shrink[i], SIDE.bits, D, WIDE)[2]
            best = tl.where(error < least, SIDE.shrink[i], best)
            least = tl.minimum(error, least)
        lo *= best
        hi *= best
    codes, meta, _ = quantize(y, lo, hi, SIDE.bits, D, WIDE)
    if SIDE.bits <= GAIN_BITS:
        meta = stretched(y, codes, meta, SIDE.bits)
    # Propagate NaN to the whole group: comparisons and `min()` can drop it, `sum()` cannot.
    broken = tl.sum(y, 2) * 0.0 != 0.0
    return tl.where(broken[:, :, None], 0.0, codes).to(tl.int32), tl.where(broken, NAN << ZERO_BITS, meta)


@triton.jit
def residual(y, codes, meta, BITS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Return the residuals that refine codes to 8 bits: r, int32 [T, G, 64], and exponents, int32 [T, G].

    y [T, G, 64] is the rotated row before quantization. `codes` and `meta` are its quantized form.
    """
    COUNT: tl.constexpr = 1 << (8 - BITS)
    HALF: tl.constexpr = (COUNT - 1) / 2
    scale, zero = scale_and_zero(meta, BITS)
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    off = y * inverse[:, :, None] + zero[:, :, None] - codes.to(tl.float32)
    off = tl.where((scale > 0)[:, :, None], off, 0.0)
    if D != WIDE:
        off = tl.where(real_slots(BITS, D, WIDE)[None, :, :], off, 0.0)
    largest = tl.max(tl.abs(off), 2)
    exponent = (largest > REACH).to(tl.int32) + (largest > 2 * REACH).to(tl.int32)
    finer = tl.where(exponent == 0, COUNT * 1.0, tl.where(exponent == 1, COUNT * 0.5, COUNT * 0.25))
    r = tl.minimum(tl.maximum(nearest(off * finer[:, :, None] + HALF), 0.0), COUNT - 1)
    return r.to(tl.int32), exponent


@triton.jit
def store_ring(y, codes, meta, packed, ring_ptr, place, live, SIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
               TOKENS: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Write the residuals and tags of keys or values (SIDE) into ring pages, for tokens that are `live`.

    ring: pointers to the pages, [TOKENS].
    place: each token's place in its page, [TOKENS].
    """
    BITS: tl.constexpr = SIDE.bits
    DIGITS: tl.constexpr = SIDE.digits
    exponent = tl.zeros_like(meta)
    if DIGITS > 0:
        r, exponent = residual(y, codes, meta, BITS, D, WIDE)
        r = tl.reshape(r, [TOKENS, WIDE])
        for i in tl.static_range(DIGITS):
            digit = (r >> (BITS * (DIGITS - 1 - i))) & ((1 << BITS) - 1)
            row = ring_ptr + (SIDE.digit_codes + (i * RING + place) * SIDE.row)
            write_codes(row, pack_codes(digit, BITS, WIDE, TOKENS), live, BITS, D, WIDE)
    group = tl.arange(0, WIDE // 64)
    own = (tags(packed, meta, BITS, D, WIDE, TOKENS) << 2) | exponent
    to = (ring_ptr + SIDE.ring_meta).to(tl.pointer_type(tl.int16))[:, None] + (group[None, :] * RING + place[:, None])
    tl.store(to, own.to(tl.int16), mask=live[:, None])


@triton.jit
def store_side(x_ptr, stride, first_ptr, mean_ptr, scale_ptr, signs_ptr, slots_ptr, ordinals_ptr, cache_ptr,
               ring_slots_ptr, ring_ptr, head, tokens, numbered, page_stride, head_stride, ring_page_stride,
               ring_head_stride, SIDE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
               TOKENS: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr, WAIT: tl.constexpr):  # fmt: skip
    """Quantize the keys or values (SIDE) of `head` for a block of tokens. Write them into the tokens' pages and rings.

    first: mean for tokens with ordinal 1.
    numbered: number of tokens that have an ordinal; the tokens after them are not first.
    """
    GROUPS: tl.constexpr = WIDE // 64
    element, real = plain_slots(D, WIDE)
    real = real & (element < HEAD)
    signs = load_signs(signs_ptr, False)
    factor = tl.load(scale_ptr + head * HEAD + element, mask=real, other=0.0)
    apart = tl.load(first_ptr + head * HEAD + element, mask=real, other=0.0) * factor
    mean = tl.load(mean_ptr + head * HEAD + element, mask=real, other=0.0) * factor
    if WAIT:
        gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    x = tl.load(
        x_ptr + token[:, None].to(tl.int64) * stride + (head * HEAD + element)[None, :],
        mask=(token < tokens)[:, None] & real[None, :], other=0.0,
    )  # fmt: skip
    at = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    live = at >= 0
    ring_at = at
    if RING > 0:
        ring_at = tl.load(ring_slots_ptr + token, mask=token < tokens, other=-1)
    at = tl.where(live, at, 0)
    page = cache_ptr + at // PAGE * page_stride + head.to(tl.int64) * head_stride
    place = (at % PAGE).to(tl.int32)
    first = tl.load(ordinals_ptr + token, mask=token < numbered, other=0) == 1
    off = x.to(tl.float32) * factor[None, :] - tl.where(first[:, None], apart[None, :], mean[None, :])
    y = tl.reshape(rotate(off, signs, D), [TOKENS, GROUPS, 64])
    codes, meta = encode(y, SIDE, D, WIDE)
    packed = pack_codes(tl.reshape(codes, [TOKENS, WIDE]), SIDE.bits, WIDE, TOKENS)
    write_codes(page + (SIDE.codes + place * SIDE.row), packed, live, SIDE.bits, D, WIDE)
    group = tl.arange(0, GROUPS)
    to = (page + SIDE.meta).to(tl.pointer_type(tl.int16))[:, None] + (group[None, :] * PAGE + place[:, None])
    tl.store(to, meta.to(tl.int16), mask=live[:, None])
    if RING > 0:
        recent = live & (ring_at >= 0)
        if tl.max(recent.to(tl.int32), 0) > 0:  # of a prompt, only the last tokens have ring slots
            ring_at = tl.where(recent, ring_at, 0)
            ring = ring_ptr + ring_at // RING * ring_page_stride + head.to(tl.int64) * ring_head_stride
            ring_place = (ring_at % RING).to(tl.int32)
            store_ring(y, codes, meta, packed, ring, ring_place, recent, SIDE, D, WIDE, TOKENS, RING)


@triton.jit
def store_integers(y, at, live, rotated_ptr, sums_ptr, units_ptr, BITS: tl.constexpr, D: tl.constexpr,
                   WIDE: tl.constexpr):  # fmt: skip
    """Write rotated queries y [ROWS, WIDE], in the slots of keys of BITS bits, as the integers that decode multiplies.

    An element becomes round(y / factor / unit), with the factor of `query_planes`. The unit makes the query's largest
    integer LARGEST. The error is at most half a unit, or two units if the factor is 4. That is 2^-16 or 2^-14 of the
    query's largest element.

    rotated: int8 [2, D], written: the upper and the lower bytes.
    sums: int32 [groups, 3], written. The first two sum upper and lower bytes, of elements whose codes end at a sign
        bit. The third sums all integers times their factors.
    units: float32, written: the unit, or NaN if an element is NaN.
    """
    GROUPS: tl.constexpr = WIDE // 64
    ROWS: tl.constexpr = y.shape[0]
    slot = tl.arange(0, WIDE)
    element, real = packing_slots(slot, BITS, D, WIDE)
    factor, signed = query_planes(slot, BITS, D, WIDE)
    y = y * (1.0 / factor)[None, :]
    largest = tl.maximum(tl.max(tl.abs(y), 1), 1e-30)
    whole = nearest(y * (1.0 / largest * LARGEST)[:, None]).to(tl.int32)
    upper = (whole + 128) >> 8
    lower = whole - upper * 256
    to = rotated_ptr + at[:, None] * (2 * D) + element[None, :]
    tl.store(to, upper.to(tl.int8), mask=live[:, None] & real[None, :])
    tl.store(to + D, lower.to(tl.int8), mask=live[:, None] & real[None, :])
    to = sums_ptr + at[:, None] * (3 * GROUPS) + 3 * tl.arange(0, GROUPS)[None, :]
    upper = tl.where(signed[None, :], upper, 0)
    lower = tl.where(signed[None, :], lower, 0)
    whole = whole * factor.to(tl.int32)[None, :]
    tl.store(to, tl.sum(tl.reshape(upper, [ROWS, GROUPS, 64]), 2), mask=live[:, None])
    tl.store(to + 1, tl.sum(tl.reshape(lower, [ROWS, GROUPS, 64]), 2), mask=live[:, None])
    tl.store(to + 2, tl.sum(tl.reshape(whole, [ROWS, GROUPS, 64]), 2), mask=live[:, None])
    tl.store(units_ptr + at, largest * (1.0 / LARGEST) + tl.sum(y * 0.0, 1), mask=live)


@triton.jit(do_not_specialize=["tokens", "numbered", "decodes"])
def store_kernel(
    query_ptr, key_ptr, value_ptr, slots_ptr, ordinals_ptr, cache_ptr, ring_slots_ptr, ring_ptr, rotated_ptr,
    sums_ptr, units_ptr, apart_ptr, level_ptr, key_signs_ptr, value_signs_ptr,
    key_first_ptr, key_mean_ptr, key_scale_ptr, value_mean_ptr, value_scale_ptr,
    tokens, numbered, decodes, query_stride, key_stride, value_stride, page_stride,
    head_stride, ring_page_stride, ring_head_stride, scale, KV_HEADS: tl.constexpr, RATIO: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, RING: tl.constexpr, TOKENS: tl.constexpr, LEVEL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Store keys, values, then queries of the first `decodes` tokens.

    Grid (cdiv(tokens, TOKENS), KV_HEADS * (2 + RATIO)).

    query: [tokens, KV_HEADS * RATIO, HEAD], any float dtype, stride per token in elements.
    key, value: [tokens, KV_HEADS, HEAD], likewise.
    slots: int64 [tokens], negative for padding.
    ordinals: int [numbered], 1 for a sequence's first token.
    cache: uint8 pages, strides in bytes.
    ring_slots, ring: the same for the ring, with RING tokens a page; not read if RING is 0.
    rotated: int8 [decodes, KV_HEADS * RATIO, 2, D], written as in `store_integers`.
    sums: int32 [decodes, KV_HEADS * RATIO, groups, 3], written as in `store_integers`.
    units: float32 [decodes, KV_HEADS * RATIO], written as in `store_integers`.
    apart: float32 [decodes, KV_HEADS * RATIO], written: offset of the score of a sequence's first token.
    level: float32 [decodes, KV_HEADS * RATIO], the part of every score from the keys' mean. It is written only with
        LEVEL, because a softmax ignores a common offset unless scores have a cap or there is a sink.
    signs: [16, 16] or None (`hadamard`).
    means and scales: float32 [KV_HEADS, HEAD].
    KEY, VALUE: a `SideLayout`.
    WAIT: True if launched as a dependent: the preceding kernel's writes are visible after `gdc_wait`.
    """
    head = tl.program_id(1)
    if head < KV_HEADS:
        store_side(
            key_ptr, key_stride, key_first_ptr, key_mean_ptr, key_scale_ptr, key_signs_ptr, slots_ptr, ordinals_ptr,
            cache_ptr, ring_slots_ptr, ring_ptr, head, tokens, numbered, page_stride, head_stride, ring_page_stride,
            ring_head_stride, KEY, HEAD, D, WIDE, TOKENS, PAGE, RING, WAIT,
        )  # fmt: skip
    elif head < 2 * KV_HEADS:
        store_side(
            value_ptr, value_stride, value_mean_ptr, value_mean_ptr, value_scale_ptr, value_signs_ptr, slots_ptr,
            ordinals_ptr, cache_ptr, ring_slots_ptr, ring_ptr, head - KV_HEADS, tokens, 0, page_stride, head_stride,
            ring_page_stride, ring_head_stride, VALUE, HEAD, D, WIDE, TOKENS, PAGE, RING, WAIT,
        )  # fmt: skip
    else:
        # A row is a query head of a token, and each KV head has RATIO of them. So TOKENS rows cover fewer tokens.
        kv = head % KV_HEADS
        first = (tl.program_id(0) * RATIO + head // KV_HEADS - 2) * TOKENS
        if first < decodes * RATIO:
            row = first + tl.arange(0, TOKENS)
            d, real = plain_slots(D, WIDE)
            has = real & (d < HEAD)
            live = row < decodes * RATIO
            inverse = 1.0 / tl.load(key_scale_ptr + kv * HEAD + d, mask=has, other=1.0)
            apart = tl.load(key_first_ptr + kv * HEAD + d, mask=has, other=0.0)
            mean = tl.load(key_mean_ptr + kv * HEAD + d, mask=has, other=0.0)
            apart -= mean
            signs = load_signs(key_signs_ptr, False)
            if WAIT:
                gdc_wait()
            token = (row // RATIO)[:, None].to(tl.int64)
            at = ((kv * RATIO + row % RATIO) * HEAD)[:, None] + d[None, :]
            x = tl.load(query_ptr + token * query_stride + at, mask=live[:, None] & has[None, :], other=0.0)
            x = x.to(tl.float32)
            place = (row // RATIO).to(tl.int64) * (KV_HEADS * RATIO) + (kv * RATIO + row % RATIO)
            tl.store(apart_ptr + place, tl.sum(x * apart[None, :], 1) * scale, mask=live)
            if LEVEL:
                tl.store(level_ptr + place, tl.sum(x * mean[None, :], 1) * scale, mask=live)
            y = rotate(x * inverse[None, :], signs, D) * scale
            store_integers(y, place, live, rotated_ptr, sums_ptr, units_ptr, KEY.bits, D, WIDE)
        elif WAIT:
            gdc_wait()
