"""Gather: read tokens back from their pages into 16 bits, in the model's own elements.

Prefill attends to its context through a workspace of fixed size: a chunk of the context is gathered, FlashAttention
runs over it, and the next chunk takes its place. The context never exists in 16 bits as a whole.
"""

import triton
import triton.language as tl

from kvpilot_kernels.gpu.codec import read_codes, scale_and_zero
from kvpilot_kernels.gpu.rotation import load_signs, plain_slots, rotate


@triton.jit
def read_side(page_ptr, place, live, signs_ptr, head, mean_ptr, scale_ptr, SIDE: tl.constexpr, HEAD: tl.constexpr,
              D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Rows [TOKENS, WIDE] of a side of `head`, rotated back, in plain slots of the model's elements, float32."""
    code = read_codes(page_ptr + (SIDE.codes + place * SIDE.row), live, SIDE.bits, D, WIDE)
    at = (page_ptr + SIDE.meta).to(tl.pointer_type(tl.int16))[:, None]
    at += tl.arange(0, WIDE // 64)[None, :] * PAGE + place[:, None]
    meta = tl.load(at, mask=live[:, None], other=0).to(tl.int32)
    scale, zero = scale_and_zero(meta[:, :, None], SIDE.bits)
    code = tl.reshape(code, [code.shape[0], WIDE // 64, 64])
    y = tl.reshape(code.to(tl.float32) * scale - zero * scale, [code.shape[0], WIDE])
    y = rotate(y, load_signs(signs_ptr, True), D)
    element, has = plain_slots(D, WIDE)
    has = has & (element < HEAD)
    inverse = 1.0 / tl.load(scale_ptr + head * HEAD + element, mask=has, other=1.0)
    mean = tl.load(mean_ptr + head * HEAD + element, mask=has, other=0.0)
    return y * inverse[None, :] + mean[None, :]


# What a step gives it are parts of tensors, and tables of any width.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "begins_ptr"])
def gather_kernel(
    cache_ptr, table_ptr, rows_ptr, key_out_ptr, value_out_ptr, key_signs_ptr, value_signs_ptr, key_first_ptr,
    key_mean_ptr, key_scale_ptr, value_mean_ptr, value_scale_ptr, begins_ptr, page_stride, head_stride, table_stride,
    KV_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(longest, TOKENS), KV_HEADS, sequences): tokens [begin, begin + length) of each sequence.

    table: int32 [sequences, blocks]; rows: int32 [sequences + 1], where each sequence's tokens start in the outputs
    (their differences are the lengths); begins: int32 [sequences]; outputs: 16 bits [rows, KV_HEADS, HEAD]; the
    rest as in `store`.
    """
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    row = tl.load(rows_ptr + sequence)
    length = tl.load(rows_ptr + sequence + 1) - row
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < length:
        live = at < length
        token = tl.load(begins_ptr + sequence) + at
        block = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + token // PAGE, mask=live, other=0)
        page = cache_ptr + block.to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
        place = token % PAGE
        d, has = plain_slots(D, WIDE)
        has = has & (d < HEAD)
        mask = live[:, None] & has[None, :]
        to = ((row + at).to(tl.int64) * KV_HEADS + head)[:, None] * HEAD + d[None, :]
        y = read_side(page, place, live, key_signs_ptr, head, key_mean_ptr, key_scale_ptr, KEY, HEAD, D, WIDE, PAGE)
        apart = tl.load(key_first_ptr + head * HEAD + d, mask=has, other=0.0)
        apart -= tl.load(key_mean_ptr + head * HEAD + d, mask=has, other=0.0)
        y += tl.where((token == 0)[:, None], apart[None, :], 0.0)
        tl.store(key_out_ptr + to, y.to(key_out_ptr.dtype.element_ty), mask=mask)
        y = read_side(
            page, place, live, value_signs_ptr, head, value_mean_ptr, value_scale_ptr, VALUE, HEAD, D, WIDE, PAGE
        )
        tl.store(value_out_ptr + to, y.to(value_out_ptr.dtype.element_ty), mask=mask)
