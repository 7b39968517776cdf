"""Store: rotate, scale, quantize, pack and write a step's keys and values, and rotate its queries, in one launch.

A program takes a block of tokens and one head of queries, keys or values. Keys and values are encoded as in
`reference.quantize`, with `kvpilot_kernels.factors`. Unlike in that reference, a group with an infinity reads back as
NaN. A query becomes

    q' = (q / key_scale) H * scale * log2(e)

so that decode can use scores as exponents of 2. If a token's block has residual pages, the same program writes the
token's residuals (`reference.residual`).
"""

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvpilot_kernels.gpu.layout.hadamard import load_signs, packing_slots, plain_slots, rotate
from kvpilot_kernels.gpu.layout.page import LARGEST, SideLayout, pack_codes, query_planes, write_codes
from kvpilot_kernels.gpu.store.quantize import encode, nearest, residual


@dataclass(frozen=True)
class StoreConfig:
    """Constants of a launch.

    Attributes:
        key_side, value_side: layouts of keys and values.
        kv_heads, ratio: KV heads, and query heads per KV head.
        head: elements of a head of the model.
        tokens: tokens of a program.
        level: True to write `Plan.level`.
        overlap: True if the kernel may start before its predecessor ends. Its predecessor's writes are visible after
            `gdc_wait`.
    """

    key_side: SideLayout
    value_side: SideLayout
    kv_heads: int
    ratio: int
    head: int
    tokens: int
    level: bool
    overlap: bool


Rows = namedtuple("Rows", "x stride first mean scale signs")
"""Keys or values of all tokens: pointers to them and to their factors, and the stride of a token.

`first` is the mean for the first token of a sequence.
"""


Target = namedtuple("Target", "slots base page_stride head_stride residuals")
"""Where a step's tokens go.

Attributes:
    slots: pointer to the slots of all tokens.
    base: pointer to the pages.
    page_stride, head_stride: strides of a page and of a KV head, in bytes.
    residuals: pointer to the map of residual pages.
"""


@triton.jit
def store_residuals(y, codes, meta, page_ptr, place, live, SIDE: tl.constexpr):
    """Write the residuals of keys or values (SIDE) into residual pages, for tokens that are `live`.

    y, codes: rotated rows and their codes, [tokens, groups, 64].
    meta: scale metadata, [tokens, groups].
    page: pointers to the residual pages, [tokens].
    place: each token's row in its residual page, [tokens].
    """
    DIGITS: tl.constexpr = SIDE.digits
    r, exponent = residual(y, codes, meta, SIDE)
    r = tl.reshape(r, [place.shape[0], SIDE.slots])
    for i in tl.static_range(DIGITS):
        digit = (r >> (SIDE.bits * (DIGITS - 1 - i))) & ((1 << SIDE.bits) - 1)
        row = page_ptr + (SIDE.digit_codes + (i * SIDE.residual + place) * SIDE.row)
        write_codes(row, pack_codes(digit, SIDE), live, SIDE)
    group = tl.arange(0, SIDE.slots // 64)
    to = (page_ptr + SIDE.residual_meta).to(tl.pointer_type(tl.int16))[:, None]
    to += group[None, :] * SIDE.residual + place[:, None]
    tl.store(to, exponent.to(tl.int16), mask=live[:, None])


@triton.jit
def store_side(rows, pages, tokens, ordinals_ptr, numbered, head, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize the keys or values (SIDE) of `head` for a block of tokens. Write them into the tokens' pages.

    Args:
        rows: the `Rows` of all tokens.
        pages: the `Target` of all tokens.
        numbered: number of tokens that have an ordinal. No later token is the first of its sequence.
    """
    element, real = plain_slots(SIDE.dim, SIDE.slots)
    real = real & (element < C.head)
    signs = load_signs(rows.signs, False)
    factor = tl.load(rows.scale + head * C.head + element, mask=real, other=0.0)
    apart = tl.load(rows.first + head * C.head + element, mask=real, other=0.0) * factor
    mean = tl.load(rows.mean + head * C.head + element, mask=real, other=0.0) * factor
    if C.overlap:
        gdc_wait()
    token = tl.program_id(0) * C.tokens + tl.arange(0, C.tokens)
    x = tl.load(
        rows.x + token[:, None].to(tl.int64) * rows.stride + (head * C.head + element)[None, :],
        mask=(token < tokens)[:, None] & real[None, :], other=0.0,
    )  # fmt: skip
    at = tl.load(pages.slots + token, mask=token < tokens, other=-1)
    live = at >= 0
    at = tl.where(live, at, 0)
    block = at // SIDE.page
    place = (at % SIDE.page).to(tl.int32)
    base = pages.base + head.to(tl.int64) * pages.head_stride
    page = base + block * pages.page_stride
    first = tl.load(ordinals_ptr + token, mask=token < numbered, other=0) == 1
    off = x.to(tl.float32) * factor[None, :] - tl.where(first[:, None], apart[None, :], mean[None, :])
    y = tl.reshape(rotate(off, signs, SIDE.dim), [C.tokens, SIDE.slots // 64, 64])
    codes, meta = encode(y, SIDE)
    packed = pack_codes(tl.reshape(codes, [C.tokens, SIDE.slots]), SIDE)
    write_codes(page + (SIDE.codes + place * SIDE.row), packed, live, SIDE)
    group = tl.arange(0, SIDE.slots // 64)
    to = (page + SIDE.meta).to(tl.pointer_type(tl.int16))[:, None] + (group[None, :] * SIDE.page + place[:, None])
    tl.store(to, meta.to(tl.int16), mask=live[:, None])
    if SIDE.residual > 0 and SIDE.digits > 0:
        PAGES: tl.constexpr = (SIDE.page + SIDE.residual - 1) // SIDE.residual
        fine = tl.load(pages.residuals + (block * PAGES + place // SIDE.residual), mask=live, other=0)
        if tl.max(fine, 0) > 0:  # most tokens of a prompt have no residual pages
            page = base + fine.to(tl.int64) * pages.page_stride
            store_residuals(y, codes, meta, page, place % SIDE.residual, fine > 0, SIDE)


@triton.jit
def store_integers(y, at, live, rotated_ptr, sums_ptr, units_ptr, KEY: tl.constexpr):
    """Write rotated queries y [ROWS, slots], in the slots of keys, as the integers that decode multiplies.

    An element becomes round(y / factor / unit), with the factor of `query_planes`. The unit is chosen so that the
    query's largest integer is LARGEST. The unit is NaN if an element is NaN. The error of an element is at most half a
    unit, or two units if the factor is 4. That is 2^-16 or 2^-14 of the query's largest element.

    `sums` gets three numbers for each group. The first sums upper bytes and the second lower bytes, both only of
    elements whose codes end at a sign bit. The third sums all integers times their factors.
    """
    GROUPS: tl.constexpr = KEY.slots // 64
    ROWS: tl.constexpr = y.shape[0]
    slot = tl.arange(0, KEY.slots)
    element, real = packing_slots(slot, KEY.bits, KEY.dim, KEY.slots)
    factor, signed = query_planes(slot, KEY)
    y = y * (1.0 / factor)[None, :]
    largest = tl.maximum(tl.max(tl.abs(y), 1), 1e-30)
    whole = nearest(y * (1.0 / largest * LARGEST)[:, None]).to(tl.int32)
    upper = (whole + 128) >> 8
    lower = whole - upper * 256
    to = rotated_ptr + at[:, None] * (2 * KEY.dim) + element[None, :]
    tl.store(to, upper.to(tl.int8), mask=live[:, None] & real[None, :])
    tl.store(to + KEY.dim, lower.to(tl.int8), mask=live[:, None] & real[None, :])
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
    query_ptr, key_ptr, value_ptr, slots_ptr, ordinals_ptr, cache_ptr, residuals_ptr, rotated_ptr, sums_ptr,
    units_ptr, apart_ptr, level_ptr, key_signs_ptr, value_signs_ptr,
    key_first_ptr, key_mean_ptr, key_scale_ptr, value_mean_ptr, value_scale_ptr,
    tokens, numbered, decodes, query_stride, key_stride, value_stride, page_stride, head_stride, scale,
    C: tl.constexpr,
):  # fmt: skip
    """Store keys, values, then queries of the first `decodes` tokens.

    Grid (cdiv(tokens, C.tokens), kv_heads * (2 + ratio)).

    query: [tokens, kv_heads * ratio, head], any float dtype, stride per token in elements.
    key, value: [tokens, kv_heads, head], likewise.
    slots: int64 [tokens], negative for padding.
    ordinals: int [numbered], 1 for a sequence's first token. Tokens past `numbered` are not the first of a sequence.
    cache: uint8 pages, strides in bytes.
    residuals: the map of residual pages (`Residuals.pages`); not read without residuals.
    rotated, sums, units, apart: written as in `launch.pages.Plan`.
    level: written as in `launch.pages.Plan`, only with C.level. Without a soft cap or sinks the softmax cancels it.
    signs: [16, 16] or None (`hadamard`).
    means and scales: float32 [kv_heads, head].
    scale: factor on the scores, times log2(e).
    C: a `StoreConfig`.
    """
    KEY: tl.constexpr = C.key_side
    VALUE: tl.constexpr = C.value_side
    head = tl.program_id(1)
    pages = Target(
        slots=slots_ptr, base=cache_ptr, page_stride=page_stride, head_stride=head_stride, residuals=residuals_ptr
    )  # fmt: skip
    if head < C.kv_heads:
        rows = Rows(
            x=key_ptr, stride=key_stride, first=key_first_ptr, mean=key_mean_ptr, scale=key_scale_ptr,
            signs=key_signs_ptr,
        )  # fmt: skip
        store_side(rows, pages, tokens, ordinals_ptr, numbered, head, KEY, C)
    elif head < 2 * C.kv_heads:
        rows = Rows(
            x=value_ptr, stride=value_stride, first=value_mean_ptr, mean=value_mean_ptr, scale=value_scale_ptr,
            signs=value_signs_ptr,
        )  # fmt: skip
        store_side(rows, pages, tokens, ordinals_ptr, 0, head - C.kv_heads, VALUE, C)
    else:
        # Here a row is one query head of one token. A KV head has `ratio` query heads, so C.tokens rows cover fewer
        # tokens than for keys and values.
        kv = head % C.kv_heads
        first = (tl.program_id(0) * C.ratio + head // C.kv_heads - 2) * C.tokens
        if first < decodes * C.ratio:
            row = first + tl.arange(0, C.tokens)
            d, real = plain_slots(KEY.dim, KEY.slots)
            has = real & (d < C.head)
            live = row < decodes * C.ratio
            inverse = 1.0 / tl.load(key_scale_ptr + kv * C.head + d, mask=has, other=1.0)
            apart = tl.load(key_first_ptr + kv * C.head + d, mask=has, other=0.0)
            mean = tl.load(key_mean_ptr + kv * C.head + d, mask=has, other=0.0)
            apart -= mean
            signs = load_signs(key_signs_ptr, False)
            if C.overlap:
                gdc_wait()
            token = (row // C.ratio)[:, None].to(tl.int64)
            at = ((kv * C.ratio + row % C.ratio) * C.head)[:, None] + d[None, :]
            x = tl.load(query_ptr + token * query_stride + at, mask=live[:, None] & has[None, :], other=0.0)
            x = x.to(tl.float32)
            place = (row // C.ratio).to(tl.int64) * (C.kv_heads * C.ratio) + (kv * C.ratio + row % C.ratio)
            tl.store(apart_ptr + place, tl.sum(x * apart[None, :], 1) * scale, mask=live)
            if C.level:
                tl.store(level_ptr + place, tl.sum(x * mean[None, :], 1) * scale, mask=live)
            y = rotate(x * inverse[None, :], signs, KEY.dim) * scale
            store_integers(y, place, live, rotated_ptr, sums_ptr, units_ptr, KEY)
        elif C.overlap:
            gdc_wait()
