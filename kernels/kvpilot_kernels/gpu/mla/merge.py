"""Reduce, the second kernel of latent decode: merge a sequence's partial results, and undo the rotation of latents.

From the partial output o_i of each split, and from L_i, log2 of its softmax sum, compute

    L = log2(sum_i 2^L_i)        o = sum_i 2^(L_i - L) o_i        out = (o H) / factor + mean
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvpilot_kernels.gpu.layout.hadamard import rotate
from kvpilot_kernels.gpu.mla.store import RANK


@triton.jit
def latent_reduce_kernel(partial_ptr, lse_ptr, spans_ptr, mean_ptr, factor_ptr, out_ptr, out_stride,
                         HEADS: tl.constexpr, TAKE: tl.constexpr, STEP: tl.constexpr,
                         OVERLAP: tl.constexpr):  # fmt: skip
    """Merge the results of TAKE heads, STEP splits in flight. Grid (sequences, cdiv(HEADS, TAKE)).

    A sequence without splits gets zeros.

    partial, lse, spans: as in `mla.pages.LatentPlan`.
    mean, factor: float32 [512 or more].
    out: [sequences, HEADS, 512], any float dtype, stride per sequence in elements.
    OVERLAP: True if the kernel may start before decode ends.
    """
    sequence = tl.program_id(0)
    first = tl.load(spans_ptr + 2 * sequence).to(tl.int64)
    number = tl.load(spans_ptr + 2 * sequence + 1)
    d = tl.arange(0, RANK)
    inverse = (1.0 / tl.load(factor_ptr + d))[None, :]
    mean = tl.load(mean_ptr + d)[None, :]
    if OVERLAP:
        gdc_wait()
    head = tl.program_id(1) * TAKE + tl.arange(0, TAKE)
    # Splits are the first dimension, which warps do not divide, so the loop exchanges no data between warps.
    k = tl.arange(0, STEP)[:, None, None]
    h = head[None, :, None]
    top = tl.full([STEP, TAKE, 1], -1e30, tl.float32)
    norm = tl.zeros([STEP, TAKE, 1], tl.float32)
    acc = tl.zeros([STEP, TAKE, RANK], tl.float32)
    for i in range(0, number, STEP):
        live = (i + k < number) & (h < HEADS)
        at = (first + i + k) * HEADS + h
        part = tl.load(partial_ptr + at * RANK + d[None, None, :], mask=live, other=0.0)
        lse = tl.load(lse_ptr + at, mask=live, other=-1e30)
        higher = tl.maximum(top, lse)
        old = tl.exp2(top - higher)
        weight = tl.where(live, tl.exp2(lse - higher), 0.0)
        norm = norm * old + weight
        acc = acc * old + weight * part
        top = higher
    weight = tl.exp2(top - tl.max(top, 0)[None, :, :])
    total = tl.sum(weight * norm, 0)
    merged = tl.sum(weight * acc, 0) / tl.where(total > 0, total, 1.0)
    out = rotate(merged, None, RANK)
    out = tl.where(number > 0, out * inverse + mean, 0.0)
    to = out_ptr + sequence.to(tl.int64) * out_stride + head[:, None] * RANK + d[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
