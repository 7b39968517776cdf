"""Decode of wide heads, with rows of 512 elements: the same arithmetic with fewer registers.

The running output of 512 elements takes 128 registers of a thread, half of the limit. To save registers elsewhere:

- queries and their sums stay in shared memory, and each product loads them;
- a row is processed in chunks, and a fence keeps the assembler from starting all chunks at once;
- an extra matrix product, directly on the tile's metadata, sums weights times zero codes.

Group g (64 elements) is sub-plane g // chunks of chunk g % chunks. `layout.mma` explains chunks and sub-planes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvpilot_kernels.gpu.decode.queries import Query, at_program, load_sums, load_units, place_of
from kvpilot_kernels.gpu.decode.residuals import digit_buffer, fine_scale
from kvpilot_kernels.gpu.decode.smem import copy_to_shared
from kvpilot_kernels.gpu.decode.softmax import HEADROOM, State, first_scores
from kvpilot_kernels.gpu.layout.mma import (
    COLS,
    KEYS,
    MMA,
    QUERIES,
    ROWS,
    SCORES,
    VALUES,
    by_columns,
    by_queries,
    chunks,
    join_bytes,
    over_own_rows,
    to_right,
)
from kvpilot_kernels.gpu.layout.unpack import (
    UNIT,
    ZEROS,
    byte_plane,
    middle,
    scales,
    scales_up_to,
    store_pairs,
    to_half,
    upper_bytes,
    word_plane,
    zero_codes,
    zero_unit,
)

# Triton 3.6 and 3.9 name this function differently.
fence = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def ends_part(sub, bits):
    """Return True if a fence follows this sub-plane: each one of 8-bit codes, otherwise every second one."""
    return bits == 8 or sub % 2 == 1


@gluon.constexpr_function
def keep_row(row):
    """Return PTX that copies register $1 if both halves of register $2 equal `row`, and gives zero otherwise."""
    return f"{{ .reg .pred p; setp.eq.u32 p, $2, {hex(row * 0x10001)}; selp.b32 $0, $1, 0, p; }}"


@gluon.jit
def allocate_queries(C: gl.constexpr):
    """Allocate shared memory for queries, int8 [2 * queries, 64] for each 64 elements of a row.

    Also allocate memory for the `starts` and `zeros` of a `Query`: int32 [2 * queries] and float32 [queries] for each
    group.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(
            gl.int8, [C.dim // 64, 2 * C.queries, 64], gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
        ),
        gl.allocate_shared_memory(gl.int32, [C.groups * 2 * C.queries], flat),
        gl.allocate_shared_memory(gl.float32, [C.groups * C.queries], flat),
    )  # fmt: skip


@gluon.jit
def fetch_queries(shared, source, C: gl.constexpr):
    """Start copying queries, as the integers of `store`, to shared memory. Fill unused columns with the last query."""
    DIM: gl.constexpr = C.dim
    source = at_program(source, C)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [1, 1], [1, 0])
    column = gl.arange(0, 2 * C.queries, gl.SliceLayout(1, layout))
    byte = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    n = gl.minimum(column // 2, source.count - 1)
    row = (place_of(n, source, C) * 2 + column % 2)[:, None] * DIM
    for i in gl.static_range(DIM // 64):
        copy_to_shared(shared[0].index(i), source.rotated + i * 64 + (row + byte))


@gluon.jit
def load_wide_query(shared, source, C: gl.constexpr):
    """Load a program's `Query`. Write its `starts` and `zeros` to shared memory."""
    GROUPS: gl.constexpr = C.groups
    source = at_program(source, C)
    for g in gl.static_range(GROUPS):
        start, zero = load_sums(source, g, C)
        shared[1].slice(g * 2 * C.queries, 2 * C.queries).store(start)
        shared[2].slice(g * C.queries, C.queries).store(zero)
    unit, apart, level = load_units(source, C)
    return Query(operands=shared[0], starts=shared[1], zeros=shared[2], unit=unit, apart=apart, level=level)


@gluon.jit
def dot_wide(codes, query, g: gl.constexpr, first: gl.constexpr, C: gl.constexpr):
    """Multiply the codes of group g, which begin at bit `first` of a byte, by the queries: float32 [tile, queries].

    The result is exact before the last rounding, as in `softmax.dot`.
    """
    sums = gl.full([C.tile, 2 * C.queries], 0, gl.int32, MMA)
    if first + C.key_side.bits == 8:
        sums += query.starts.slice(g * 2 * C.queries, 2 * C.queries).load(gl.SliceLayout(0, MMA))[None, :]
    operand = query.operands.index(g).permute([1, 0]).load(QUERIES)
    sums = mma_v2(byte_plane(codes, C.key_side.bits, first), operand, sums)
    return join_bytes(sums, C.tile, C.queries) * (0.5**first)


@gluon.jit
def score_wide(smem, stage, t, query, C: gl.constexpr):
    """Compute scores as `softmax.score` does."""
    KEY: gl.constexpr = C.key_side
    CHUNKS: gl.constexpr = chunks(KEY)
    meta = smem.meta.index(stage)
    score = first_scores(t, query, C)
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(8 // KEY.bits):
            codes = smem.key.index(stage * CHUNKS + c).load(KEYS)
            word = meta.slice((sub * CHUNKS + c) * C.tile, C.tile).load(ROWS)
            taken = query.zeros.slice((sub * CHUNKS + c) * C.queries, C.queries).load(COLS)[None, :]
            product = dot_wide(codes, query, sub * CHUNKS + c, KEY.bits * sub, C)
            score += scales(word)[:, None] * (product - zero_codes(word)[:, None] * taken)
            if ends_part(sub, KEY.bits):
                fence()
    return score


@gluon.jit
def refine_score_wide(score, smem, stage, query, fine, C: gl.constexpr):
    """Add the residuals of a tile's keys to its scores, as `softmax.refine_score` does."""
    KEY: gl.constexpr = C.key_side
    CHUNKS: gl.constexpr = chunks(KEY)
    DIGITS: gl.constexpr = KEY.digits
    meta = smem.meta.index(stage)
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(8 // KEY.bits):
            finer = gl.full([C.tile, C.queries], 0.0, gl.float32, SCORES)
            for j in gl.static_range(DIGITS):
                digit = smem.key.index(digit_buffer(stage, j, KEY, C) * CHUNKS + c).load(KEYS)
                digit = dot_wide(digit, query, sub * CHUNKS + c, KEY.bits * sub, C)
                finer = finer * (1 << KEY.bits) + digit
            taken = query.zeros.slice((sub * CHUNKS + c) * C.queries, C.queries).load(COLS)[None, :]
            scale = scales(meta.slice((sub * CHUNKS + c) * C.tile, C.tile).load(ROWS))
            scale = scale * fine_scale(fine, sub * CHUNKS + c, KEY.bits)
            score += scale[:, None] * (finer - taken * (middle(KEY.bits) / zero_unit(KEY.bits) * UNIT))
            fence()
    return score


@gluon.jit
def accumulate_wide(score, unit, limits, smem, stage, state, C: gl.constexpr):
    """Add a tile to the running softmax, as `softmax.accumulate` does.

    Here `State.zeros` is [2 * groups, columns]. Its second half has a row for each group of the values. Ignore its
    first half, which comes from the keys' metadata.
    """
    VALUE: gl.constexpr = C.value_side
    CHUNKS: gl.constexpr = chunks(VALUE)
    SUBS: gl.constexpr = 8 // VALUE.bits
    meta = smem.meta.index(stage)
    m = gl.maximum(state.m, gl.max(score, 0) * unit - HEADROOM)
    alpha = gl.exp2(state.m - m)
    p = gl.exp2(score * unit[None, :] - m[None, :])
    total = state.total * alpha[None, :] + over_own_rows(p, C.tile, C.queries)
    alpha = by_columns(alpha, C.queries)[None, :]
    zeros = state.zeros * alpha
    rows = meta.reshape([2 * C.groups, C.tile]).load(VALUES)
    rows = gl.inline_asm_elementwise(ZEROS, "=r,r", [rows], dtype=gl.float16, is_pure=True, pack=2)
    acc = ()
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(SUBS):
            scale = scales_up_to(meta.slice((C.groups + sub * CHUNKS + c) * C.tile, C.tile).load(ROWS), limits)
            weights = to_right(to_half(p * scale[:, None]), C.tile, C.queries)
            zeros = mma_v2(only_row(rows, C.groups + sub * CHUNKS + c), weights, zeros)
            words = smem.value.index(stage * CHUNKS + c).permute([1, 0]).load(VALUES)
            even = mma_v2(word_plane(words, VALUE.bits, sub), weights, state.acc[(c * SUBS + sub) * 2] * alpha)
            words = upper_bytes(words)
            odd = mma_v2(word_plane(words, VALUE.bits, sub), weights, state.acc[(c * SUBS + sub) * 2 + 1] * alpha)
            acc = acc + (even, odd)
            if ends_part(sub, VALUE.bits):
                fence()
    return State(m=m, total=total, zeros=zeros, acc=acc), p


@gluon.jit
def refine_wide(p, limits, smem, stage, state, fine, C: gl.constexpr):
    """Add the residuals of a tile's values, as `softmax.refine` does."""
    VALUE: gl.constexpr = C.value_side
    CHUNKS: gl.constexpr = chunks(VALUE)
    SUBS: gl.constexpr = 8 // VALUE.bits
    DIGITS: gl.constexpr = VALUE.digits
    meta = smem.meta.index(stage)
    half = gl.full([2 * C.groups, C.tile], middle(VALUE.bits) / zero_unit(VALUE.bits) * UNIT, gl.float16, VALUES)
    zeros = state.zeros
    acc = ()
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(SUBS):
            scale = scales_up_to(meta.slice((C.groups + sub * CHUNKS + c) * C.tile, C.tile).load(ROWS), limits)
            scale = scale * fine_scale(fine, C.groups + sub * CHUNKS + c, VALUE.bits)
            weights = to_right(to_half(p * scale[:, None]), C.tile, C.queries)
            zeros = mma_v2(only_row(half, C.groups + sub * CHUNKS + c), weights, zeros)
            even = state.acc[(c * SUBS + sub) * 2]
            odd = state.acc[(c * SUBS + sub) * 2 + 1]
            for j in gl.static_range(DIGITS):
                words = smem.value.index(digit_buffer(stage, j, VALUE, C) * CHUNKS + c).permute([1, 0]).load(VALUES)
                w = (weights * (1 << VALUE.bits * (DIGITS - 1 - j))).to(gl.float16)
                even = mma_v2(word_plane(words, VALUE.bits, sub), w, even)
                odd = mma_v2(word_plane(upper_bytes(words), VALUE.bits, sub), w, odd)
            acc = acc + (even, odd)
            fence()
    return State(m=state.m, total=state.total, zeros=zeros, acc=acc)


@gluon.jit
def only_row(x, row: gl.constexpr):
    """Zero the second half of the rows of left operand x, float16 [rows, TILE], except `row`. Keep the first half."""
    HALF: gl.constexpr = x.shape[0] // 2
    TILE: gl.constexpr = x.shape[1]
    at = gl.arange(0, x.shape[0], gl.SliceLayout(1, VALUES))[:, None]
    at += gl.arange(0, TILE, gl.SliceLayout(0, VALUES))[None, :] * 0
    first, second = gl.split(gl.permute(gl.reshape(x, [2, HALF, TILE]), [1, 2, 0]))
    _, at = gl.split(gl.permute(gl.reshape(at.to(gl.uint16), [2, HALF, TILE]), [1, 2, 0]))
    second = gl.inline_asm_elementwise(
        keep_row(row), "=r,r,r", [second, at], dtype=gl.float16, is_pure=True, pack=2
    )  # fmt: skip
    x = gl.reshape(gl.permute(gl.join(first, second), [2, 0, 1]), [2 * HALF, TILE])
    return gl.convert_layout(x, VALUES, assert_trivial=True)


@gluon.jit
def write_wide(out_ptr, lse_ptr, source, state, C: gl.constexpr):
    """Write the results of `accumulate_wide`, as `softmax.write` does."""
    VALUE: gl.constexpr = C.value_side
    CHUNKS: gl.constexpr = chunks(VALUE)
    SUBS: gl.constexpr = 8 // VALUE.bits
    norm = gl.sum(state.total, 0)
    if C.several:
        norm = gl.where(norm == 0, 1.0, norm)
    word = gl.arange(0, VALUE.group // 2, ROWS)[:, None]
    n = gl.arange(0, C.queries, COLS)
    place = place_of(n, source, C)
    rows = by_queries(state.zeros, 2 * C.groups, C.queries)
    row = gl.arange(0, 2 * C.groups, ROWS)[:, None]
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(SUBS):
            shift = gl.sum(gl.where(row == C.groups + sub * CHUNKS + c, rows, 0.0), 0)
            shift = shift * (zero_unit(VALUE.bits) / UNIT)
            even = by_queries(state.acc[(c * SUBS + sub) * 2], VALUE.group // 2, C.queries)
            odd = by_queries(state.acc[(c * SUBS + sub) * 2 + 1], VALUE.group // 2, C.queries)
            even = (even * (0.5 ** (VALUE.bits * sub) / UNIT) - shift[None, :]) / norm[None, :]
            odd = (odd * (0.5 ** (VALUE.bits * sub) / UNIT) - shift[None, :]) / norm[None, :]
            to = out_ptr + place[None, :] * C.dim + (sub * VALUE.row + c * VALUE.group + 2 * word)
            store_pairs(to, even, odd, (n[None, :] < source.count) & (word >= 0))
    gl.store(lse_ptr + place, gl.log2(norm) + state.m, mask=n < source.count)
