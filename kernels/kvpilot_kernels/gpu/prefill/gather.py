"""Gather: write keys and values contiguously in the model's 16-bit dtype, read from pages or copied from new tokens.

Prefill attends through a workspace of fixed size. If contexts and new tokens fit into it together, one launch writes
them, and one call of FlashAttention attends to them. Longer contexts are read chunk by chunk.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kvpilot_kernels.gpu.layout.hadamard import load_signs, plain_slots, rotate
from kvpilot_kernels.gpu.layout.page import SideLayout, read_codes, scale_and_zero


@dataclass(frozen=True)
class GatherConfig:
    """Constants of a launch.

    Attributes:
        key_side, value_side: layouts of keys and values.
        head: elements of a head of the model.
        tokens: tokens of a program.
    """

    key_side: SideLayout
    value_side: SideLayout
    kv_heads: int
    head: int
    tokens: int


@triton.jit
def read_side(page_ptr, place, live, signs_ptr, head, mean_ptr, scale_ptr, HEAD: tl.constexpr, SIDE: tl.constexpr):
    """Dequantize rows of keys or values (SIDE) of `head`, and rotate them back: float32 [tokens, slots].

    page: pointers to the tokens' pages, [tokens].
    place: each token's place in its page, [tokens].
    """
    WIDE: tl.constexpr = SIDE.slots
    code = read_codes(page_ptr + (SIDE.codes + place * SIDE.row), live, SIDE)
    at = (page_ptr + SIDE.meta).to(tl.pointer_type(tl.int16))[:, None]
    at += tl.arange(0, WIDE // 64)[None, :] * SIDE.page + place[:, None]
    meta = tl.load(at, mask=live[:, None], other=0).to(tl.int32)
    scale, zero = scale_and_zero(meta[:, :, None], SIDE.bits)
    code = tl.reshape(code, [code.shape[0], WIDE // 64, 64])
    y = tl.reshape(code.to(tl.float32) * scale - zero * scale, [code.shape[0], WIDE])
    y = rotate(y, load_signs(signs_ptr, True), SIDE.dim)
    element, has = plain_slots(SIDE.dim, WIDE)
    has = has & (element < HEAD)
    inverse = 1.0 / tl.load(scale_ptr + head * HEAD + element, mask=has, other=1.0)
    mean = tl.load(mean_ptr + head * HEAD + element, mask=has, other=0.0)
    return y * inverse[None, :] + mean[None, :]


@triton.jit(do_not_specialize=["tokens"])
def gather_kernel(
    cache_ptr, slots_ptr, ordinals_ptr, key_out_ptr, value_out_ptr, key_signs_ptr, value_signs_ptr, key_first_ptr,
    key_mean_ptr, key_scale_ptr, value_mean_ptr, value_scale_ptr, key_ptr, value_ptr, tokens, page_stride, head_stride,
    key_stride, value_stride, C: tl.constexpr,
):  # fmt: skip
    """Write the tokens in `slots`, one after the other. Grid (cdiv(tokens, C.tokens), kv_heads).

    slots: int64 [tokens], slots in the cache; a negative one, -1 - row, stands for new token `row` of key and value.
    ordinals: int32 [tokens], positions in a sequence, counted from 1.
    key_out, value_out: 16 bits [tokens, kv_heads, head].
    key, value: new tokens, strides per token in elements.
    The other parameters are those of `store_kernel`.
    """
    KEY: tl.constexpr = C.key_side
    VALUE: tl.constexpr = C.value_side
    HEAD: tl.constexpr = C.head
    head = tl.program_id(1)
    at = tl.program_id(0) * C.tokens + tl.arange(0, C.tokens)
    live = at < tokens
    slot = tl.load(slots_ptr + at, mask=live, other=0)
    first = tl.load(ordinals_ptr + at, mask=live, other=0) == 1
    fresh = tl.max((slot < 0).to(tl.int32), 0)
    stored = live & (slot >= 0)
    slot = tl.where(stored, slot, 0)
    page = cache_ptr + (slot // KEY.page).to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
    place = slot % KEY.page
    d, has = plain_slots(KEY.dim, KEY.slots)
    has = has & (d < HEAD)
    mask = stored[:, None] & has[None, :]
    to = (at.to(tl.int64) * C.kv_heads + head)[:, None] * HEAD + d[None, :]
    y = read_side(page, place, stored, key_signs_ptr, head, key_mean_ptr, key_scale_ptr, HEAD, KEY)
    apart = tl.load(key_first_ptr + head * HEAD + d, mask=has, other=0.0)
    apart -= tl.load(key_mean_ptr + head * HEAD + d, mask=has, other=0.0)
    y += tl.where(first[:, None], apart[None, :], 0.0)
    tl.store(key_out_ptr + to, y.to(key_out_ptr.dtype.element_ty), mask=mask)
    y = read_side(page, place, stored, value_signs_ptr, head, value_mean_ptr, value_scale_ptr, HEAD, VALUE)
    tl.store(value_out_ptr + to, y.to(value_out_ptr.dtype.element_ty), mask=mask)
    if fresh:  # load the slots again, because registers have no room to keep them
        row = -1 - tl.load(slots_ptr + at, mask=live, other=0)
        mask = (row >= 0)[:, None] & has[None, :]
        given = tl.load(key_ptr + (row[:, None] * key_stride + head * HEAD + d[None, :]), mask=mask, other=0.0)
        tl.store(key_out_ptr + to, given.to(key_out_ptr.dtype.element_ty), mask=mask)
        given = tl.load(value_ptr + (row[:, None] * value_stride + head * HEAD + d[None, :]), mask=mask, other=0.0)
        tl.store(value_out_ptr + to, given.to(value_out_ptr.dtype.element_ty), mask=mask)
