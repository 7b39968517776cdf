"""Reduce: merge the partial results of a sequence's splits and rotate them back into the model's space.

With partial outputs o_i and log-sums L_i (base 2), o = sum_i 2^(L_i - L) o_i with L = log2 sum_i 2^L_i; then

    out = (o H^T) / value_scale + value_mean

An attention sink, a logit a without a value, adds one more term to L.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvpilot_kernels.gpu.layout.hadamard import load_signs, plain_slots, rotate

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def reduce_kernel(partial_ptr, lse_ptr, spans_ptr, starts_ptr, owners_ptr, bases_ptr, signs_ptr, value_mean_ptr,
                  value_scale_ptr, sinks_ptr, level_ptr, out_ptr, out_stride, KV_HEADS: tl.constexpr,
                  RATIO: tl.constexpr, TAKE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
                  ROWS: tl.constexpr, STEP: tl.constexpr, SEVERAL: tl.constexpr, SINKS: tl.constexpr,
                  LEVEL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Merge TAKE of the query heads of a KV head, of one query token. Grid (rows, KV_HEADS, RATIO / TAKE).

    A sequence without splits gets zeros. A row is a query token.

    partial: float32 [results, KV_HEADS, RATIO, D].
    lse: float32 [results, KV_HEADS, RATIO].
    spans: int32 [sequences, 2], as in `schedule`.
    starts, bases: as in `schedule`, read only with SEVERAL. Without it each sequence is one row.
    owners: int32 [rows], the sequence of each row; read only with SEVERAL. Negative means padding, which gets zeros.
    signs: [16, 16] or None (`hadamard.plain_signs`).
    value_mean, value_scale: float32 [KV_HEADS, HEAD].
    sinks: [KV_HEADS * RATIO], natural logits of any float dtype, read only with SINKS.
    level: float32 [rows, KV_HEADS * RATIO], in log2, to be added to every score; read only with SINKS and LEVEL.
    out: [rows, KV_HEADS * RATIO, HEAD], any float dtype, stride per row in elements.
    ROWS: TAKE padded to a power of two.
    STEP: splits in flight.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    results = 1
    if SEVERAL:
        owner = tl.load(owners_ptr + token)
        sequence = tl.maximum(owner, 0)
        begin_row = tl.load(starts_ptr + sequence)
        results = tl.load(starts_ptr + sequence + 1) - begin_row
        first = tl.load(bases_ptr + sequence) + token - begin_row
        number = tl.where(owner >= 0, tl.load(spans_ptr + 2 * sequence + 1), 0)
    else:
        first = tl.load(spans_ptr + 2 * token)
        number = tl.load(spans_ptr + 2 * token + 1)
    d, real = plain_slots(D, WIDE)
    has = real & (d < HEAD)
    signs = load_signs(signs_ptr, True)
    inverse = 1.0 / tl.load(value_scale_ptr + head * HEAD + d, mask=has, other=1.0)
    mean = tl.load(value_mean_ptr + head * HEAD + d, mask=has, other=0.0)
    if OVERLAP:
        gdc_wait()
    row = tl.arange(0, ROWS)
    begin = tl.program_id(2) * TAKE
    start = (first * KV_HEADS + head).to(tl.int64) * RATIO + begin
    # Splits are the first dimension, which warps do not divide, so the loop exchanges no data between warps.
    k = tl.arange(0, STEP)[:, None, None]
    r = row[None, :, None]
    top = tl.full([STEP, ROWS, 1], -1e30, tl.float32)
    norm = tl.zeros([STEP, ROWS, 1], tl.float32)
    acc = tl.zeros([STEP, ROWS, WIDE], tl.float32)
    for i in range(0, number, STEP):
        live = (i + k < number) & (r < TAKE)
        at = start + (i + k) * (results * KV_HEADS * RATIO) + r
        part = tl.load(partial_ptr + at * D + d[None, None, :], mask=live & real[None, None, :], other=0.0)
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
    out = rotate(merged, signs, D) * inverse[None, :] + mean[None, :]
    if SINKS:
        heads = head * RATIO + begin + row
        sink = tl.load(sinks_ptr + heads, mask=row < TAKE, other=0.0).to(tl.float32) * LOG2_E
        if LEVEL:
            at = level_ptr + token.to(tl.int64) * (KV_HEADS * RATIO) + heads
            # Padding has no level.
            sink -= tl.load(at, mask=(row < TAKE) & (number > 0), other=0.0)
        out = out * total / (total + tl.exp2(sink[:, None] - highest))
    out = tl.where(number > 0, out, 0.0)
    to = out_ptr + token.to(tl.int64) * out_stride + (head * RATIO + begin + row)[:, None] * HEAD + d[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(row < TAKE)[:, None] & has[None, :])
