"""Store of latent pages: rotate, quantize, pack and write a step's entries, and prepare the queries for decode.

There are two launches, because vLLM stores a step's entries before it absorbs the queries. Entries are computed as in
`latent.reference`, with the factors of `latent.factors`. The latent part and the RoPE part of a query q become

    q' = (q / factor) H * scale * log2(e) / unit

The unit is chosen so that the largest element of q' is LARGEST. So q' and q' / 16 fit float16's range for any model.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpilot_formats import latent as formats
from kvpilot_kernels.gpu.layout.hadamard import rotate
from kvpilot_kernels.gpu.layout.page import pack_codes, write_codes
from kvpilot_kernels.gpu.store.quantize import encode

RANK = tl.constexpr(formats.RANK)
ROPE = tl.constexpr(formats.ROPE)
ENTRY = tl.constexpr(formats.ENTRY)

LARGEST = tl.constexpr(1024.0)
"""Largest element of a prepared query. Sums over 576 elements with 8-bit codes then fit float16 and float32."""


@triton.jit
def store_part(x_ptr, stride, mean_ptr, factor_ptr, slots_ptr, cache_ptr, tokens, page_stride,
               SIDE: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Quantize latents or RoPE parts, [TOKENS, dim], as one group each, and write them into the tokens' pages."""
    WIDTH: tl.constexpr = SIDE.dim
    d = tl.arange(0, WIDTH)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    page = cache_ptr + slot // SIDE.page * page_stride
    place = (slot % SIDE.page).to(tl.int32)
    x = tl.load(x_ptr + token[:, None].to(tl.int64) * stride + d[None, :], mask=live[:, None], other=0.0)
    x = (x.to(tl.float32) - tl.load(mean_ptr + d)[None, :]) * tl.load(factor_ptr + d)[None, :]
    y = rotate(x, None, WIDTH)
    codes, meta = encode(tl.reshape(y, [TOKENS, 1, WIDTH]), SIDE)
    packed = pack_codes(tl.reshape(codes, [TOKENS, WIDTH]), SIDE)
    write_codes(page + (SIDE.codes + place * SIDE.row), packed, live, SIDE)
    to = (page + SIDE.meta).to(tl.pointer_type(tl.int16)) + place
    tl.store(to, tl.reshape(meta, [TOKENS]).to(tl.int16), mask=live)


@triton.jit
def load_part(x_ptr, stride, head_stride, factor_ptr, row, live, scale, HEADS: tl.constexpr,
              WIDTH: tl.constexpr):  # fmt: skip
    """Load queries and rotate them: float32 [ROWS, WIDTH]. `row` [ROWS] numbers the heads of all tokens."""
    d = tl.arange(0, WIDTH)
    at = (row // HEADS).to(tl.int64) * stride + (row % HEADS) * head_stride
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    return rotate(x.to(tl.float32) * (1.0 / tl.load(factor_ptr + d))[None, :], None, WIDTH) * scale


@triton.jit(do_not_specialize=["tokens"])
def latent_store_kernel(
    latent_ptr, rope_ptr, slots_ptr, cache_ptr, mean_ptr, factor_ptr, tokens, latent_stride, rope_stride,
    page_stride, LATENT: tl.constexpr, POSITION: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store latents, then RoPE parts. Grid (cdiv(tokens, TOKENS), 2).

    latent: [tokens, 512], any float dtype, stride per token in elements.
    rope: [tokens, 64], likewise.
    slots: int64 [tokens], negative for padding.
    cache: uint8 pages, stride in bytes.
    mean, factor: float32 [576].
    LATENT, POSITION: a `page.SideLayout`.
    OVERLAP: True if earlier writes are visible only after `gdc_wait`.
    """
    if OVERLAP:
        gdc_wait()
    if tl.program_id(1) == 0:
        store_part(
            latent_ptr, latent_stride, mean_ptr, factor_ptr, slots_ptr, cache_ptr, tokens, page_stride, LATENT, TOKENS
        )  # fmt: skip
    else:
        store_part(
            rope_ptr, rope_stride, mean_ptr + RANK, factor_ptr + RANK, slots_ptr, cache_ptr, tokens, page_stride,
            POSITION, TOKENS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def latent_prepare_kernel(
    query_ptr, query_rope_ptr, rotated_ptr, sums_ptr, factor_ptr, rows, query_stride, query_head,
    query_rope_stride, query_rope_head, scale, HEADS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Prepare the queries that `mla.decode` reads. A row is a query of one head. Grid (cdiv(rows, ROWS),).

    query: [tokens, HEADS, 512], any float dtype, strides per token and per head in elements.
    query_rope: [tokens, HEADS, 64], likewise.
    rotated: float16 [tokens, HEADS, 576], written.
    sums: float32 [tokens, 3, HEADS], written: a query's unit, and the sums of its latent and RoPE part.
    factor: float32 [576].
    scale: factor on the scores, times log2(e).
    OVERLAP: True to let decode start as soon as earlier writes are visible.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    y = load_part(query_ptr, query_stride, query_head, factor_ptr, row, live, scale, HEADS, RANK)
    z = load_part(
        query_rope_ptr, query_rope_stride, query_rope_head, factor_ptr + RANK, row, live, scale, HEADS,
        ROPE,
    )  # fmt: skip
    largest = tl.maximum(tl.max(tl.abs(y), 1), tl.max(tl.abs(z), 1))
    unit = tl.maximum(largest, 1e-30) * (1.0 / LARGEST)
    half = (y / unit[:, None]).to(tl.float16)
    rope_half = (z / unit[:, None]).to(tl.float16)
    to = rotated_ptr + row.to(tl.int64) * ENTRY
    tl.store(to[:, None] + tl.arange(0, RANK)[None, :], half, mask=live[:, None])
    tl.store(to[:, None] + (tl.arange(0, ROPE) + RANK)[None, :], rope_half, mask=live[:, None])
    total = tl.sum(half.to(tl.float32), 1)
    rope_total = tl.sum(rope_half.to(tl.float32), 1)
    # Propagate NaN to all scores of the query: `max()` can drop it, `sum()` cannot.
    unit += (total + rope_total) * 0.0
    to = sums_ptr + (row // HEADS).to(tl.int64) * (3 * HEADS) + row % HEADS
    tl.store(to, unit, mask=live)
    tl.store(to + HEADS, total, mask=live)
    tl.store(to + 2 * HEADS, rope_total, mask=live)
