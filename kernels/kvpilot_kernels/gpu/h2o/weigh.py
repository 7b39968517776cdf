"""Weigh: the attention that stored tokens get in a step, summed over query heads and over stretches of tokens.

Decode leaves log2 of the softmax sum of every split in the plan. Together they give L, log2 of the sum over a whole
sequence. A token with score s gets exp2(s - L) of a query's attention. So only keys are read again, and no values:

    mass of a stretch = sum over its tokens t and the query heads h of exp2(s_ht - L_h)

A flag on the device decides if a step is weighed. So a CUDA graph may contain the launch, which does nothing in most
steps.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvpilot_kernels import check
from kvpilot_kernels.gpu.decode.merge import LOG2_E
from kvpilot_kernels.gpu.decode.schedule import beyond, most_splits
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.layout.hadamard import packing_slots
from kvpilot_kernels.gpu.layout.page import SideLayout, query_planes, read_slots, scale_and_zero

if TYPE_CHECKING:
    from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape

SPLITS = tl.constexpr(16)
"""Number of a sequence's splits whose softmax sums are read at once."""


@dataclass(frozen=True)
class WeighConfig:
    """Constants of a launch.

    Attributes:
        key_side: layout of keys.
        kv_heads, ratio: KV heads, and query heads of each.
        rows: `ratio` padded to a power of two, at least 16.
        tokens: tokens of a stretch. Pages and splits begin at multiples of it.
        softcap: True if scores have a soft cap.
        sinks: True if there are attention sinks.
    """

    key_side: SideLayout
    kv_heads: int
    ratio: int
    rows: int
    tokens: int
    softcap: bool
    sinks: bool


@triton.jit
def log_sums(lse_ptr, first, number, head, row, C: tl.constexpr):
    """Return log2 of the sum of 2^score over all tokens of a sequence, float32 [ROWS]. Unused rows are 0."""
    k = tl.arange(0, SPLITS)[:, None]
    top = tl.full([row.shape[0]], -1e30, tl.float32)
    norm = tl.zeros([row.shape[0]], tl.float32)
    for i in range(0, number, SPLITS):
        at = ((first + i + k) * C.kv_heads + head).to(tl.int64) * C.ratio + row[None, :]
        part = tl.load(lse_ptr + at, mask=(i + k < number) & (row < C.ratio)[None, :], other=-1e30)
        higher = tl.maximum(top, tl.max(part, 0))
        norm = norm * tl.exp2(top - higher) + tl.sum(tl.exp2(part - higher[None, :]), 0)
        top = higher
    return tl.where(row < C.ratio, top + tl.log2(norm), 0.0)


@triton.jit
def load_queries(rotated_ptr, units_ptr, at, row, slot, C: tl.constexpr):
    """Load slots of a KV head's rotated queries, from the integers of `store`, as float16 [ROWS, slots]."""
    KEY: tl.constexpr = C.key_side
    element, real = packing_slots(slot, KEY.bits, KEY.dim, KEY.slots)
    live = (row < C.ratio)[:, None] & real[None, :]
    to = rotated_ptr + (at + row)[:, None] * (2 * KEY.dim) + element[None, :]
    whole = tl.load(to, mask=live, other=0).to(tl.float32) * 256.0 + tl.load(to + KEY.dim, mask=live, other=0)
    unit = tl.load(units_ptr + at + row, mask=row < C.ratio, other=0.0)
    return (whole * unit[:, None] * query_planes(slot, KEY)[0][None, :]).to(tl.float16)


@triton.jit(do_not_specialize=["table_stride", "sequences", "stretches"], do_not_specialize_on_alignment=["table_ptr"])
def weigh_kernel(
    wanted_ptr, rotated_ptr, units_ptr, apart_ptr, level_ptr, cache_ptr, table_ptr, splits_ptr, spans_ptr, lse_ptr,
    sinks_ptr, total_ptr, page_stride, head_stride, table_stride, sequences, stretches, softcap, C: tl.constexpr,
):  # fmt: skip
    """Add the attention that tokens of one split get from a KV head's queries. Grid (kv_heads, splits).

    wanted: int32 [1]; if it is 0, nothing is added.
    total: float32 [kv_heads, sequences, stretches] of C.tokens tokens each. One program writes an element. Tokens past
        the last stretch are left out.
    lse: float32 [splits, kv_heads, ratio]. Each sequence has one query token.
    The other parameters are those of `decode_kernel`, except `sinks`, which is that of `reduce_kernel`.
    """
    KEY: tl.constexpr = C.key_side
    PARTS: tl.constexpr = C.key_side.slots // 64
    ROWS: tl.constexpr = C.rows
    TOKENS: tl.constexpr = C.tokens
    head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.load(splits_ptr + 4 * split)
    if (tl.load(wanted_ptr) != 0) & (sequence >= 0):
        start = tl.load(splits_ptr + 4 * split + 1)
        end = tl.load(splits_ptr + 4 * split + 2)
        row = tl.arange(0, ROWS)
        at = (sequence * C.kv_heads + head).to(tl.int64) * C.ratio
        number = tl.load(spans_ptr + 2 * sequence + 1)
        sums = log_sums(lse_ptr, tl.load(spans_ptr + 2 * sequence), number, head, row, C)
        level = tl.zeros([ROWS], tl.float32)
        if C.sinks or C.softcap:
            level = tl.load(level_ptr + at + row, mask=row < C.ratio, other=0.0)
        if C.sinks:
            sink = tl.load(sinks_ptr + head * C.ratio + row, mask=row < C.ratio, other=0.0).to(tl.float32) * LOG2_E
            if not C.softcap:
                sink -= level
            higher = tl.maximum(sums, sink)
            sums = higher + tl.log2(tl.exp2(sums - higher) + tl.exp2(sink - higher))
        apart = tl.load(apart_ptr + at + row, mask=row < C.ratio, other=0.0)
        to = total_ptr + (head.to(tl.int64) * sequences + sequence) * stretches
        queries = ()
        for g in tl.static_range(PARTS):
            slot = g * 64 + tl.arange(0, 64)
            one = load_queries(rotated_ptr, units_ptr, at, row, slot, C)
            queries = queries + (one,)  # type: ignore[assignment]
        for t in range(start, tl.minimum(end, stretches * TOKENS), TOKENS):
            token = t + tl.arange(0, TOKENS)
            live = token < end
            block = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + t // KEY.page)
            page = cache_ptr + block.to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
            place = token % KEY.page
            score = tl.zeros([TOKENS, ROWS], tl.float32)
            for g in tl.static_range(PARTS):
                slot = g * 64 + tl.arange(0, 64)
                query = queries[g]  # type: ignore[var-annotated]
                codes = read_slots(page + (KEY.codes + place * KEY.row), live, slot, KEY)
                meta_at = (page + KEY.meta).to(tl.pointer_type(tl.int16)) + g * KEY.page + place
                meta = tl.load(meta_at, mask=live, other=0)
                scale, zero = scale_and_zero(meta.to(tl.int32), KEY.bits)
                product = tl.dot(codes.to(tl.float16), tl.trans(query))
                taken = tl.sum(query.to(tl.float32), 1)
                score += scale[:, None] * (product - zero[:, None] * taken[None, :])
            score += tl.where((token == 0)[:, None], apart[None, :], 0.0)
            if C.softcap:
                power = tl.exp2((score + level[None, :]) * (2.0 / softcap))
                score = (1.0 - 2.0 / (power + 1.0)) * (softcap * LOG2_E)
            mass = tl.where(live[:, None] & (row < C.ratio)[None, :], tl.exp2(score - sums[None, :]), 0.0)
            tl.store(to + t // TOKENS, tl.load(to + t // TOKENS) + tl.sum(tl.sum(mass, 1), 0))


def stretch(shape: "Shape") -> int:
    """Return the number of tokens of a stretch. Splits are multiples of it."""
    choice = shape.cut().choice
    return choice.grain or choice.tile


def weigh(pages: "GpuPages", block_table: torch.Tensor, seq_lens: torch.Tensor, plan: "Plan", wanted: torch.Tensor,
          total: torch.Tensor) -> None:  # fmt: skip
    """Add the attention that each stored token got in the step that `plan` has just decoded from `pages`.

    Args:
        block_table, seq_lens: as in `GpuPages.decode`; each sequence has one query token.
        wanted: int32 [1]; 0 means add nothing.
        total: float32 [kv_heads, sequences or more, stretches], to which the attention of each stretch is added.
    """
    s, cut = pages.shape, plan.cut()
    if plan.several is not None:
        raise check.BadInputError("plan", "has sequences of several tokens", "weigh sequences that have one token")
    if total.shape[0] != s.kv_heads or total.shape[1] < seq_lens.shape[0] or not total.is_contiguous():
        least = f"{s.kv_heads} heads and {seq_lens.shape[0]} sequences or more"
        raise check.BadInputError("total", f"is {tuple(total.shape)}", f"give it {least}, contiguous")
    weigh_kernel[(s.kv_heads, most_splits(seq_lens.shape[0], cut.wave, beyond(1)))](
        wanted, plan.rotated, plan.units, plan.apart, plan.level, pages.cache, block_table, plan.splits, plan.spans,
        plan.lse, plan.lse if pages.sinks is None else pages.sinks, total, pages.cache.stride(0),
        pages.cache.stride(1), block_table.stride(0), *total.shape[1:], s.softcap,
        C=WeighConfig(
            s.key, s.kv_heads, s.ratio, max(16, triton.next_power_of_2(s.ratio)), stretch(s), s.softcap > 0,
            pages.sinks is not None,
        ),
        num_warps=tuning.weigh_warps(stretch(s)), **tuning.FUSED,
    )  # fmt: skip
