"""Reduce, the second kernel of split-KV decode: merge a sequence's partial results, and undo the rotation.

From the partial output o_i of each split, and from L_i, log2 of its softmax sum, compute

    L = log2(sum_i 2^L_i)        o = sum_i 2^(L_i - L) o_i        out = (o H^T) / value_scale + value_mean

An attention sink with the logit a takes part of the softmax weight but has no value. It scales `out` by
2^L / (2^L + e^a).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvpilot_kernels.gpu.layout.hadamard import load_signs, plain_slots, rotate

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class MergeConfig:
    """Constants of a launch.

    Attributes:
        kv_heads, ratio: KV heads, and query heads per KV head.
        head: elements of a head of the model.
        dim: elements of a stored row.
        slots: slots of a row.
        take: query heads of a program.
        rows: `take` padded to a power of two.
        step: number of splits that a program reads at once.
        several: True if sequences have several query tokens.
        sinks: True if there are attention sinks.
        level: True to subtract `Plan.level` from the sinks' logits, because scores do not include it. False with a soft
            cap, because scores then include it.
        overlap: True if the kernel may start before decode ends.
    """

    kv_heads: int
    ratio: int
    head: int
    dim: int
    slots: int
    take: int
    rows: int
    step: int
    several: bool
    sinks: bool
    level: bool
    overlap: bool


@triton.jit
def reduce_kernel(partial_ptr, lse_ptr, spans_ptr, starts_ptr, owners_ptr, bases_ptr, signs_ptr, value_mean_ptr,
                  value_scale_ptr, sinks_ptr, level_ptr, out_ptr, out_stride, C: tl.constexpr):  # fmt: skip
    """Merge `take` of the query heads of a KV head, of one query token. Grid (rows, kv_heads, ratio / take).

    A sequence without splits gets zeros. A row is a query token.

    partial, lse: as in `launch.pages.Plan`.
    level: as in `launch.pages.Plan`; read only with C.sinks and C.level.
    spans: as in `schedule`.
    starts, bases: as in `schedule`; read only with `several`. Without it each sequence has one row.
    owners: int32 [rows], the sequence of each row; read only with `several`. Negative means padding, which gets zeros.
    signs: [16, 16] or None (`hadamard.plain_signs`).
    value_mean, value_scale: float32 [kv_heads, head].
    sinks: [kv_heads * ratio], logits of base e, any float dtype; read only with C.sinks.
    out: [rows, kv_heads * ratio, head], any float dtype, stride per row in elements.
    """
    STEP: tl.constexpr = C.step
    ROWS: tl.constexpr = C.rows
    WIDE: tl.constexpr = C.slots
    token = tl.program_id(0)
    head = tl.program_id(1)
    results = 1
    if C.several:
        owner = tl.load(owners_ptr + token)
        sequence = tl.maximum(owner, 0)
        begin_row = tl.load(starts_ptr + sequence)
        results = tl.load(starts_ptr + sequence + 1) - begin_row
        first = tl.load(bases_ptr + sequence) + token - begin_row
        number = tl.where(owner >= 0, tl.load(spans_ptr + 2 * sequence + 1), 0)
    else:
        first = tl.load(spans_ptr + 2 * token)
        number = tl.load(spans_ptr + 2 * token + 1)
    d, real = plain_slots(C.dim, WIDE)
    has = real & (d < C.head)
    signs = load_signs(signs_ptr, True)
    inverse = 1.0 / tl.load(value_scale_ptr + head * C.head + d, mask=has, other=1.0)
    mean = tl.load(value_mean_ptr + head * C.head + d, mask=has, other=0.0)
    if C.overlap:
        gdc_wait()
    row = tl.arange(0, ROWS)
    begin = tl.program_id(2) * C.take
    start = (first * C.kv_heads + head).to(tl.int64) * C.ratio + begin
    # Splits are the first dimension, which warps do not divide, so the loop exchanges no data between warps.
    k = tl.arange(0, STEP)[:, None, None]
    r = row[None, :, None]
    top = tl.full([STEP, ROWS, 1], -1e30, tl.float32)
    norm = tl.zeros([STEP, ROWS, 1], tl.float32)
    acc = tl.zeros([STEP, ROWS, WIDE], tl.float32)
    for i in range(0, number, STEP):
        live = (i + k < number) & (r < C.take)
        at = start + (i + k) * (results * C.kv_heads * C.ratio) + r
        part = tl.load(partial_ptr + at * C.dim + d[None, None, :], mask=live & real[None, None, :], other=0.0)
        lse = tl.load(lse_ptr + at, mask=live, other=-1e30)
        higher = tl.maximum(top, lse)
        old = tl.exp2(top - higher)
        weight = tl.where(live, tl.exp2(lse - higher), 0.0)
        norm = norm * old + weight
        acc = acc * old + weight * part
        top = higher
    highest = tl.max(top, 0)
    weight = tl.exp2(top - highest[None, :, :])
    total = tl.sum(weight * norm, 0)
    merged = tl.sum(weight * acc, 0) / tl.where(total > 0, total, 1.0)
    out = rotate(merged, signs, C.dim) * inverse[None, :] + mean[None, :]
    if C.sinks:
        heads = head * C.ratio + begin + row
        sink = tl.load(sinks_ptr + heads, mask=row < C.take, other=0.0).to(tl.float32) * LOG2_E
        if C.level:
            at = level_ptr + token.to(tl.int64) * (C.kv_heads * C.ratio) + heads
            # `store` writes no level for padding.
            sink -= tl.load(at, mask=(row < C.take) & (number > 0), other=0.0)
        out = out * total / (total + tl.exp2(sink[:, None] - highest))
    out = tl.where(number > 0, out, 0.0)
    to = out_ptr + token.to(tl.int64) * out_stride + (head * C.ratio + begin + row)[:, None] * C.head + d[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(row < C.take)[:, None] & has[None, :])
