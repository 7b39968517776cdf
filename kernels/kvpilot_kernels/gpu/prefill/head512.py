"""Prefill of wide heads: attention from a chunk's queries to 16-bit keys and values.

FlashAttention 2 and 3 have no kernel for heads of more than 256 elements. The results are outputs and the logarithms of
softmax sums:

    o_i = sum_t softmax_t(cap(scale * q_i . k_t)) v_t        lse_i = log(sum_t exp(cap(scale * q_i . k_t)))
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_keys(query, key_ptr, value_ptr, first, nk, seen, scale, softcap, key_stride, value_stride, m, total, acc,
             D: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Add keys [first, first + N) of a sequence with `nk` keys to the running softmax, and return its new state.

    query: [M, WIDE].
    seen: [M, 1], number of keys that a query attends to.
    m, total, acc: largest score in log2 [M], softmax sum [M] and output [M, WIDE] so far, float32.
    """
    n = tl.arange(0, N)
    at = first + n
    d = tl.arange(0, WIDE)
    mask = (at < nk)[:, None] & (d < D)[None, :]  # values past the end may be NaN
    key = tl.load(key_ptr + first * key_stride + (n[:, None] * key_stride + d[None, :]), mask=mask, other=0.0)
    score = tl.dot(query, tl.trans(key)) * scale
    if SOFTCAP:
        power = tl.exp2(score * (2.0 * LOG2_E / softcap))
        score = (1.0 - 2.0 / (power + 1.0)) * softcap
    score = tl.where(at[None, :] < seen, score * LOG2_E, -1e38)
    higher = tl.maximum(m, tl.max(score, 1))
    p = tl.exp2(score - higher[:, None])
    old = tl.exp2(m - higher)
    value = tl.load(value_ptr + first * value_stride + (n[:, None] * value_stride + d[None, :]), mask=mask, other=0.0)
    acc = tl.dot(p.to(value.dtype), value, acc * old[:, None])
    return higher, total * old + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["rows"])
def prefill_kernel(query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, starts_ptr, rows_ptr, scale, softcap, rows,
                   query_stride, key_stride, value_stride, out_stride, RATIO: tl.constexpr, D: tl.constexpr,
                   WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
                   SOFTCAP: tl.constexpr):  # fmt: skip
    """Attend from M queries of a head to all keys of the sequence. Grid (cdiv(longest, M), heads, sequences).

    With CAUSAL the last query of a sequence attends to all its keys, and each earlier query to one key less.

    query, out: [rows, heads, D], 16 bits, stride per token in elements, heads and elements contiguous.
    key, value: [keys, heads / RATIO, D], likewise.
    lse: float32 [heads, rows], natural logarithms. A sequence without keys gets -inf, and outputs of 0.
    starts: int32 [sequences + 1], each sequence's first query.
    rows_ptr: int32 [sequences + 1], each sequence's first key.
    scale: factor on the scores.
    softcap: read only with SOFTCAP.
    WIDE: D padded to a power of two.
    N: keys per iteration.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # start the programs with the most keys first
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - begin
    key_begin = tl.load(rows_ptr + sequence)
    nk = tl.load(rows_ptr + sequence + 1) - key_begin
    if block * M < count:
        row = block * M + tl.arange(0, M)
        d = tl.arange(0, WIDE)
        live = (row < count)[:, None] & (d < D)[None, :]
        query_ptr += begin.to(tl.int64) * query_stride + head * D
        query = tl.load(query_ptr + row[:, None].to(tl.int64) * query_stride + d[None, :], mask=live, other=0.0)
        key_row = tl.cast(key_stride, tl.int64)
        value_row = tl.cast(value_stride, tl.int64)
        key_ptr += key_begin * key_row + head // RATIO * D
        value_ptr += key_begin * value_row + head // RATIO * D
        seen = (row * 0 + nk)[:, None]
        most = nk
        if CAUSAL:
            seen = (nk - count + 1 + row)[:, None]
            most = tl.minimum(nk, nk - count + (block + 1) * M)
        m = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, WIDE], tl.float32)
        for first in range(0, most, N):
            m, total, acc = add_keys(query, key_ptr, value_ptr, first, nk, seen, scale, softcap, key_row,
                                     value_row, m, total, acc, D, WIDE, N, SOFTCAP)  # fmt: skip
        none = total == 0.0
        acc = acc / tl.where(none, 1.0, total)[:, None]
        lse = tl.where(none, float("-inf"), (m + tl.log2(total)) * LN_2)
        out_ptr += begin.to(tl.int64) * out_stride + head * D
        to = out_ptr + row[:, None].to(tl.int64) * out_stride + d[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=live)
        tl.store(lse_ptr + head * rows.to(tl.int64) + begin + row, lse, mask=row < count)
