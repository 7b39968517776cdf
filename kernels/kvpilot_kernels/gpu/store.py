"""Store: rotate, scale, quantize, pack and write a step's keys and values, and rotate its queries, in one launch.

A program takes a block of tokens and one head of one of the three projections. What it computes is `reference.quantize`
with the factors of `kvpilot_kernels.factors` (but a group with an infinity reads back as NaN); for a query it is

    q' = (q / key_scale) H * scale * log2(e)

so that the scores of decode are exponents of 2.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kvpilot_kernels.gpu.turn import rotate

INFINITY = tl.constexpr(0x7C0)
NAN = tl.constexpr(0x7E0)


@triton.jit
def nearest(x):
    """float32 to the nearest integer, ties to even: what is added moves the fraction out of the mantissa."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantize(y, lo, hi, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Codes [T, G, 64], words [T, G] and squared errors [T, G] of y [T, G, 64] for ranges [T, G]."""
    QMAX: tl.constexpr = (1 << BITS) - 1
    wanted = tl.minimum((hi - lo) / QMAX, 65504.0)
    # Rounding up keeps both ends of the range within the codes.
    bits = (wanted.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) + 15) >> 4
    bits = tl.minimum(bits, INFINITY - 1)
    step = (bits << 4).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    inverse = tl.where(step > 0, 1.0 / step, 0.0)
    zc = tl.minimum(tl.maximum(nearest(lo * inverse * (-30.0 / QMAX)), 0.0), 30.0)
    zero = zc * (QMAX / 30.0)
    codes = tl.minimum(tl.maximum(nearest(y * inverse[:, :, None] + zero[:, :, None]), 0.0), QMAX)
    off = (codes - zero[:, :, None]) * step[:, :, None] - y
    if GROUP != 64:  # slots that hold nothing have no error
        PART: tl.constexpr = 32 if BITS == 2 else 64
        off = tl.where((tl.arange(0, 64) % PART < GROUP * PART // 64)[None, None, :], off, 0.0)
    return codes, (bits << 5) | zc.to(tl.int32), tl.sum(off * off, 2)


@triton.jit
def try_range(y, lo, hi, codes, word, least, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Keep the better of what is known and the range [lo, hi], group by group."""
    codes2, word2, error = quantize(y, lo, hi, BITS, GROUP)
    better = error < least
    return (
        tl.where(better[:, :, None], codes2, codes),
        tl.where(better, word2, word),
        tl.minimum(error, least),
    )


@triton.jit
def store_rows(x, turn_ptr, page_ptr, in_page, live, BITS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
               TOKENS: tl.constexpr, PAGE: tl.constexpr, CODES: tl.constexpr, META: tl.constexpr):  # fmt: skip
    """Quantize rows x [TOKENS, WIDE] and write them at each token's page [TOKENS] and place in it."""
    GROUPS: tl.constexpr = WIDE // 64
    GROUP: tl.constexpr = D // GROUPS
    PLANES: tl.constexpr = 8 // BITS
    PART: tl.constexpr = WIDE // PLANES
    slot = tl.arange(0, WIDE)
    turn = tl.load(turn_ptr + slot[:, None] * WIDE + slot[None, :])
    y = tl.reshape(rotate(x, turn, D), [TOKENS, GROUPS, 64])
    lo = tl.minimum(tl.min(y, 2), 0.0)
    hi = tl.maximum(tl.max(y, 2), 0.0)
    codes, word, least = quantize(y, lo, hi, BITS, GROUP)
    if BITS == 4:
        codes, word, least = try_range(y, lo * 0.9, hi * 0.9, codes, word, least, BITS, GROUP)
        codes, word, least = try_range(y, lo * 0.8, hi * 0.8, codes, word, least, BITS, GROUP)
    if BITS == 2:
        codes, word, least = try_range(y, lo * 0.85, hi * 0.85, codes, word, least, BITS, GROUP)
        codes, word, least = try_range(y, lo * 0.75, hi * 0.75, codes, word, least, BITS, GROUP)
        codes, word, least = try_range(y, lo * 0.65, hi * 0.65, codes, word, least, BITS, GROUP)
        codes, word, least = try_range(y, lo * 0.55, hi * 0.55, codes, word, least, BITS, GROUP)
    # A group with a NaN reads back as NaN: comparisons and minima may have lost it, a sum cannot.
    broken = tl.sum(y, 2) * 0.0 != 0.0
    word = tl.where(broken, NAN << 5, word)
    codes = tl.where(broken[:, :, None], 0.0, codes).to(tl.int32)

    plane = tl.arange(0, PLANES)
    packed = tl.sum(tl.reshape(codes, [TOKENS, PLANES, PART]) << (BITS * plane)[None, :, None], 1)
    byte = tl.arange(0, PART)
    if BITS == 8 and GROUP != 64:
        at = byte // 64 * GROUP + byte % 64
        real = byte % 64 < GROUP
    else:
        at = byte
        real = byte < D // PLANES
    to = page_ptr[:, None] + (CODES + in_page[:, None] * (D // PLANES) + at[None, :])
    tl.store(to, packed.to(tl.uint8), mask=live[:, None] & real[None, :])
    group = tl.arange(0, GROUPS)
    to = (page_ptr + META).to(tl.pointer_type(tl.int16))[:, None] + (group[None, :] * PAGE + in_page[:, None])
    tl.store(to, word.to(tl.int16), mask=live[:, None])


@triton.jit(do_not_specialize=["tokens", "decodes"])
def store_kernel(
    query_ptr, key_ptr, value_ptr, slots_ptr, cache_ptr, turned_ptr, key_turn_ptr, value_turn_ptr, query_turn_ptr,
    key_mean_ptr, key_scale_ptr, value_mean_ptr, value_scale_ptr, tokens, decodes, query_stride, key_stride,
    value_stride, page_stride, head_stride, scale, KV_HEADS: tl.constexpr, RATIO: tl.constexpr, KB: tl.constexpr,
    VB: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(tokens, TOKENS), KV_HEADS * (2 + RATIO)): keys, values, then queries of the first `decodes` tokens.

    query: [tokens, KV_HEADS * RATIO, D], key and value: [tokens, KV_HEADS, D], any float dtype, strides per token in
    elements; slots: int64 [tokens], negative for padding; cache: uint8 pages, strides in bytes; turned: float16
    [decodes, KV_HEADS * RATIO, D]; turns: [WIDE, WIDE] (`turn`); factors: float32 [KV_HEADS, D].
    """
    META: tl.constexpr = D * (KB + VB) // 8 * PAGE
    if OVERLAP:
        gdc_launch_dependents()
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, WIDE)
    real = d < D
    if head < 2 * KV_HEADS:
        live = token < tokens
        slot = tl.load(slots_ptr + token, mask=live, other=-1)
        live = slot >= 0
        slot = tl.where(live, slot, 0)
        kv = head % KV_HEADS
        page = cache_ptr + slot // PAGE * page_stride + kv.to(tl.int64) * head_stride
        in_page = (slot % PAGE).to(tl.int32)
        mask = live[:, None] & real[None, :]
        if head < KV_HEADS:
            x = tl.load(
                key_ptr + token[:, None].to(tl.int64) * key_stride + (kv * D + d)[None, :], mask=mask, other=0.0
            )
            mean = tl.load(key_mean_ptr + kv * D + d, mask=real, other=0.0)
            factor = tl.load(key_scale_ptr + kv * D + d, mask=real, other=0.0)
            x = (x.to(tl.float32) - mean[None, :]) * factor[None, :]
            store_rows(x, key_turn_ptr, page, in_page, live, KB, D, WIDE, TOKENS, PAGE, 0, META)
        else:
            x = tl.load(
                value_ptr + token[:, None].to(tl.int64) * value_stride + (kv * D + d)[None, :], mask=mask, other=0.0
            )
            mean = tl.load(value_mean_ptr + kv * D + d, mask=real, other=0.0)
            factor = tl.load(value_scale_ptr + kv * D + d, mask=real, other=0.0)
            x = (x.to(tl.float32) - mean[None, :]) * factor[None, :]
            store_rows(
                x, value_turn_ptr, page, in_page, live, VB, D, WIDE, TOKENS, PAGE, D * KB // 8 * PAGE,
                META + 2 * (WIDE // 64) * PAGE,
            )  # fmt: skip
    elif tl.program_id(0) * TOKENS < decodes:
        head -= 2 * KV_HEADS
        live = token < decodes
        mask = live[:, None] & real[None, :]
        x = tl.load(
            query_ptr + token[:, None].to(tl.int64) * query_stride + (head * D + d)[None, :], mask=mask, other=0.0
        )
        factor = tl.load(key_scale_ptr + head // RATIO * D + d, mask=real, other=1.0)
        turn = tl.load(query_turn_ptr + d[:, None] * WIDE + d[None, :])
        y = rotate(x.to(tl.float32) / factor[None, :], turn, D) * scale
        to = turned_ptr + token[:, None].to(tl.int64) * (KV_HEADS * RATIO * D) + (head * D + d)[None, :]
        tl.store(to, y.to(tl.float16), mask=mask)
