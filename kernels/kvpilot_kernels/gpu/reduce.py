"""Reduce: merge the partial results of a sequence's splits and rotate them back into the model's elements.

With partial outputs o_i and log-sums L_i (base 2), o = sum_i 2^(L_i - L) o_i with L = log2 sum_i 2^L_i; then

    out = (o H^T) / value_scale + value_mean
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvpilot_kernels.gpu.rotation import load_rotation, rotate


@triton.jit
def reduce_kernel(partial_ptr, lse_ptr, spans_ptr, rotation_ptr, value_mean_ptr, value_scale_ptr, out_ptr, out_stride,
                  KV_HEADS: tl.constexpr, RATIO: tl.constexpr, TAKE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
                  ROWS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Grid (sequences, KV_HEADS, RATIO / TAKE): a program takes TAKE of the query heads of a KV head.

    partial: float32 [splits, KV_HEADS, RATIO, D]; lse: float32 [splits, KV_HEADS, RATIO]; spans: int32 [sequences, 2];
    rotation: [WIDE, WIDE], H in the order of elements; out: [sequences, KV_HEADS * RATIO, D], any float dtype,
    stride per sequence in elements. A sequence without splits gets zeros. ROWS: TAKE padded to a power of two; STEP:
    splits in flight.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(spans_ptr + 2 * sequence)
    number = tl.load(spans_ptr + 2 * sequence + 1)
    d = tl.arange(0, WIDE)
    rotation = load_rotation(rotation_ptr, WIDE, True)
    factor = tl.load(value_scale_ptr + head * D + d, mask=d < D, other=1.0)
    mean = tl.load(value_mean_ptr + head * D + d, mask=d < D, other=0.0)
    if OVERLAP:
        gdc_wait()
    begin = tl.program_id(2) * TAKE
    start = (first * KV_HEADS + head).to(tl.int64) * RATIO + begin
    lse_ptr += start
    partial_ptr += start * D
    m = ()
    acc = ()
    norm = ()
    for r in tl.static_range(TAKE):
        top = tl.full([], -1e30, tl.float32)
        for i in range(0, number, 128):
            k = i + tl.arange(0, 128)
            top = tl.maximum(
                top, tl.max(tl.load(lse_ptr + k * (KV_HEADS * RATIO) + r, mask=k < number, other=-1e30), 0)
            )
        m = m + (top,)
        acc = acc + (tl.zeros([WIDE], tl.float32),)
        norm = norm + (tl.full([], 0.0, tl.float32),)
    for i in range(0, number, STEP):
        new_acc = ()
        new_norm = ()
        for r in tl.static_range(TAKE):
            a = acc[r]
            n = norm[r]
            for j in tl.static_range(STEP):
                at = (i + j) * (KV_HEADS * RATIO) + r
                weight = tl.exp2(tl.load(lse_ptr + at, mask=i + j < number, other=-1e30) - m[r])
                a += weight * tl.load(partial_ptr + at * D + d, mask=(i + j < number) & (d < D), other=0.0)
                n += weight
            new_acc = new_acc + (a,)
            new_norm = new_norm + (n,)
        acc = new_acc
        norm = new_norm
    row = tl.arange(0, ROWS)
    merged = tl.zeros([ROWS, WIDE], tl.float32)
    for r in tl.static_range(TAKE):
        merged = tl.where(row[:, None] == r, (acc[r] / tl.where(number > 0, norm[r], 1.0))[None, :], merged)
    out = rotate(merged, rotation, D)
    out = tl.where(number > 0, out / factor[None, :] + mean[None, :], 0.0)
    to = out_ptr + sequence.to(tl.int64) * out_stride + (head * RATIO + begin + row)[:, None] * D + d[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(row < TAKE)[:, None] & (d < D)[None, :])
