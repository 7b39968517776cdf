"""Gather: read tokens back from their pages into 16 bits, in the model's own elements.

Prefill attends to its context through a workspace of fixed size: a piece of the context is gathered, FlashAttention
runs over it, and the next piece takes its place. The context never exists in 16 bits as a whole.
"""

import triton
import triton.language as tl

from kvpilot_kernels.gpu.turn import rotate


@triton.jit
def read_rows(page_ptr, in_page, live, turn_ptr, BITS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
              TOKENS: tl.constexpr, PAGE: tl.constexpr, CODES: tl.constexpr, META: tl.constexpr):  # fmt: skip
    """Rows [TOKENS, WIDE] of one side, rotated back, float32."""
    GROUPS: tl.constexpr = WIDE // 64
    GROUP: tl.constexpr = D // GROUPS
    PLANES: tl.constexpr = 8 // BITS
    PART: tl.constexpr = WIDE // PLANES
    slot = tl.arange(0, WIDE)
    if BITS == 8 and GROUP != 64:
        at = slot // 64 * GROUP + slot % 64
        real = slot % 64 < GROUP
    else:
        at = slot % PART
        real = at < D // PLANES
    mask = live[:, None] & real[None, :]
    byte = tl.load(page_ptr[:, None] + (CODES + in_page[:, None] * (D // PLANES) + at[None, :]), mask=mask, other=0)
    code = (byte.to(tl.int32) >> (BITS * (slot // PART))[None, :]) & ((1 << BITS) - 1)
    words = (page_ptr + META).to(tl.pointer_type(tl.int16))[:, None] + ((slot // 64)[None, :] * PAGE + in_page[:, None])
    word = tl.load(words, mask=mask, other=0).to(tl.int32)
    step = ((word >> 1) & 0x7FF0).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    y = (code.to(tl.float32) - (word & 31).to(tl.float32) * (((1 << BITS) - 1) / 30.0)) * step
    turn = tl.load(turn_ptr + slot[None, :] * WIDE + slot[:, None])
    return rotate(y, turn, D)


@triton.jit(do_not_specialize=["begin"])
def gather_kernel(
    cache_ptr, table_ptr, rows_ptr, key_out_ptr, value_out_ptr, key_turn_ptr, value_turn_ptr, key_mean_ptr,
    key_scale_ptr, value_mean_ptr, value_scale_ptr, begin, page_stride, head_stride, table_stride,
    KV_HEADS: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(longest, TOKENS), KV_HEADS, sequences): tokens [begin, begin + length) of each sequence.

    table: int32 [sequences, blocks]; rows: int32 [sequences + 1], where each sequence's tokens start in the outputs
    (their differences are the lengths); outputs: 16 bits [rows, KV_HEADS, D]; the rest as in `store`.
    """
    META: tl.constexpr = D * (KB + VB) // 8 * PAGE
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    row = tl.load(rows_ptr + sequence)
    length = tl.load(rows_ptr + sequence + 1) - row
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < length:
        live = place < length
        token = begin + place
        block = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + token // PAGE, mask=live, other=0)
        page = cache_ptr + block.to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
        in_page = token % PAGE
        d = tl.arange(0, WIDE)
        mask = live[:, None] & (d < D)[None, :]
        to = ((row + place).to(tl.int64) * KV_HEADS + head)[:, None] * D + d[None, :]
        y = read_rows(page, in_page, live, key_turn_ptr, KB, D, WIDE, TOKENS, PAGE, 0, META)
        factor = tl.load(key_scale_ptr + head * D + d, mask=d < D, other=1.0)
        mean = tl.load(key_mean_ptr + head * D + d, mask=d < D, other=0.0)
        y = y / factor[None, :] + mean[None, :]
        tl.store(key_out_ptr + to, y.to(key_out_ptr.dtype.element_ty), mask=mask)
        y = read_rows(
            page, in_page, live, value_turn_ptr, VB, D, WIDE, TOKENS, PAGE, D * KB // 8 * PAGE,
            META + 2 * (WIDE // 64) * PAGE,
        )  # fmt: skip
        factor = tl.load(value_scale_ptr + head * D + d, mask=d < D, other=1.0)
        mean = tl.load(value_mean_ptr + head * D + d, mask=d < D, other=0.0)
        y = y / factor[None, :] + mean[None, :]
        tl.store(value_out_ptr + to, y.to(value_out_ptr.dtype.element_ty), mask=mask)
