"""Decode of wide heads, with rows of 512 elements: the same arithmetic with fewer registers.

The sums of 512 elements take 128 registers of a thread, half of its limit. So the rest must be small:

- queries and their sums stay in shared memory, and each product loads them;
- a row is processed in chunks, and a fence keeps the assembler from starting all of them at once;
- sums of weights times zero codes are rows of one more product, directly on the tile's metadata;
- the exponents of a token in the recent window are packed into one register.

Here each group of 64 elements is one sub-plane of a chunk: group g is sub-plane g // chunks of chunk g % chunks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvpilot_kernels.gpu.decode.ring import place_of_digit, places
from kvpilot_kernels.gpu.decode.softmax import HEADROOM
from kvpilot_kernels.gpu.layout.mma import (
    by_columns,
    by_queries,
    join_bytes,
    load_sums,
    load_units,
    over_own_rows,
    place_of,
    to_right,
)
from kvpilot_kernels.gpu.layout.unpack import (
    COLS,
    KEYS,
    MMA,
    QUERIES,
    ROWS,
    SCORES,
    UNIT,
    VALUES,
    ZEROS,
    byte_plane,
    chunks,
    copy_to_shared,
    middle,
    scales,
    scales_up_to,
    store_pairs,
    to_half,
    upper_bytes,
    word_plane,
    zero_codes,
    zero_unit,
)  # fmt: skip

# Triton 3.6 and 3.9 name this function differently.
fence = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def ends_part(sub, bits, digits):
    """Return True if a fence follows this sub-plane.

    A fence follows every group at 8 bits or with digits of the recent window, and else every second group.
    """
    return digits > 0 or bits == 8 or sub % 2 == 1


@gluon.constexpr_function
def keep_row(row):
    """Return PTX that copies register $1 if both halves of register $2 equal `row`, and gives zero otherwise."""
    return f"{{ .reg .pred p; setp.eq.u32 p, $2, {hex(row * 0x10001)}; selp.b32 $0, $1, 0, p; }}"


@gluon.jit
def places_of_queries(Q: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr):
    """Allocate shared memory for queries, int8 [2 Q, 64] for each 64 bytes of a row.

    For each group there is also memory for the queries' sums, int32 [2 Q] and float32 [Q].
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.int8, [D // 64, 2 * Q, 64], gl.SwizzledSharedLayout(16, 2, 4, [1, 0])),
        gl.allocate_shared_memory(gl.int32, [D // GROUP * 2 * Q], flat),
        gl.allocate_shared_memory(gl.float32, [D // GROUP * Q], flat),
    )


@gluon.jit
def fetch_queries(shared, rotated_ptr, first, count, stride, D: gl.constexpr, RATIO: gl.constexpr, Q: gl.constexpr,
                  SEVERAL: gl.constexpr):  # fmt: skip
    """Start copying `count` queries, as `store`'s integers, to shared memory. Past the end repeat the last query."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [1, 1], [1, 0])
    column = gl.arange(0, 2 * Q, gl.SliceLayout(1, layout))
    byte = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    n = gl.minimum(column // 2, count - 1)
    row = (place_of(n, first, stride, RATIO, SEVERAL) * 2 + column % 2)[:, None] * D
    for i in gl.static_range(D // 64):
        copy_to_shared(shared[0].index(i), rotated_ptr + i * 64 + (row + byte))


@gluon.jit
def load_wide_query(shared, sums_ptr, units_ptr, apart_ptr, level_ptr, first, count, stride, BITS: gl.constexpr,
                    D: gl.constexpr, GROUP: gl.constexpr, RATIO: gl.constexpr, Q: gl.constexpr, LEVEL: gl.constexpr,
                    SEVERAL: gl.constexpr):  # fmt: skip
    """Load the data for products with `count` queries. The queries' sums go to shared memory.

    Returns:
        The tensors in shared memory, then the results of `load_units`.
    """
    for g in gl.static_range(D // GROUP):
        start, zero = load_sums(sums_ptr, first, count, stride, g, BITS, D, GROUP, RATIO, Q, SEVERAL)
        shared[1].slice(g * 2 * Q, 2 * Q).store(start)
        shared[2].slice(g * Q, Q).store(zero)
    unit, apart, level = load_units(units_ptr, apart_ptr, level_ptr, first, count, stride, RATIO, Q, LEVEL, SEVERAL)
    return shared, unit, apart, level


@gluon.jit
def dot_wide(codes, shared, g: gl.constexpr, first: gl.constexpr, BITS: gl.constexpr, TILE: gl.constexpr,
             Q: gl.constexpr):  # fmt: skip
    """Multiply group g's codes, from bit `first` of `codes` on, by the queries: float32 [TILE, Q].

    The result is exact before the last rounding, as in `softmax.dot`.
    """
    sums = gl.full([TILE, 2 * Q], 0, gl.int32, MMA)
    if first + BITS == 8:
        sums += shared[1].slice(g * 2 * Q, 2 * Q).load(gl.SliceLayout(0, MMA))[None, :]
    query = shared[0].index(g).permute([1, 0]).load(QUERIES)
    sums = mma_v2(byte_plane(codes, BITS, first), query, sums)
    return join_bytes(sums, TILE, Q) * (0.5**first)


@gluon.jit
def score_wide(keys, meta, stage, t, query, fine, softcap, KEY: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
               TILE: gl.constexpr, Q: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
               RECENT: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Compute scores like `softmax.score`, with `fine` from `pack_fine`."""
    CHUNKS: gl.constexpr = chunks(KEY.bits, D, GROUP)
    DIGITS: gl.constexpr = KEY.digits if RECENT else 0
    shared, unit, apart, level = query
    token = gl.arange(0, TILE, ROWS)
    score = gl.where(
        (token == 0)[:, None], gl.where(t == 0, apart, 0.0)[None, :], gl.full([TILE, Q], 0.0, gl.float32, SCORES)
    )
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(8 // KEY.bits):
            codes = keys.index(stage * CHUNKS + c).load(KEYS)
            word = meta.slice((sub * CHUNKS + c) * TILE, TILE).load(ROWS)
            taken = shared[2].slice((sub * CHUNKS + c) * Q, Q).load(COLS)[None, :]
            product = dot_wide(codes, shared, sub * CHUNKS + c, KEY.bits * sub, KEY.bits, TILE, Q)
            product = product - zero_codes(word)[:, None] * taken
            if DIGITS > 0:
                finer = gl.full([TILE, Q], 0.0, gl.float32, SCORES)
                for j in gl.static_range(DIGITS):
                    place = place_of_digit(stage, j, places(KEY, STAGES, RECENT))
                    digit = keys.index(place * CHUNKS + c).load(KEYS)
                    digit = dot_wide(digit, shared, sub * CHUNKS + c, KEY.bits * sub, KEY.bits, TILE, Q)
                    finer = finer * (1 << KEY.bits) + digit
                finer = finer - taken * (middle(KEY.bits) / zero_unit(KEY.bits) * UNIT)
                if SEVERAL:
                    finer = gl.where(fine[2], finer, 0.0)
                product += fine_factor(fine, sub * CHUNKS + c, KEY.bits)[:, None] * finer
            score += scales(word)[:, None] * product
            if ends_part(sub, KEY.bits, DIGITS):
                fence()
    if SOFTCAP:
        score += level[None, :]
        power = gl.exp2(score * unit[None, :] * (2.0 / softcap))
        score = (1.0 - 2.0 / (power + 1.0)) * (softcap * 1.4426950408889634)
    return score


@gluon.jit
def accumulate_wide(score, unit, limits, values, meta, stage, m, total, zeros, acc, fine, VALUE: gl.constexpr,
                    D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, Q: gl.constexpr, STAGES: gl.constexpr,
                    RECENT: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Add a tile to the running softmax like `softmax.accumulate`, but with zeros [2 * groups, columns].

    The last rows of zeros are the values' groups. The first rows come from the keys' zero codes and mean nothing.
    """
    CHUNKS: gl.constexpr = chunks(VALUE.bits, D, GROUP)
    GROUPS: gl.constexpr = D // GROUP
    SUBS: gl.constexpr = 8 // VALUE.bits
    DIGITS: gl.constexpr = VALUE.digits if RECENT else 0
    m_new = gl.maximum(m, gl.max(score, 0) * unit - HEADROOM)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(score * unit[None, :] - m_new[None, :])
    total = total * alpha[None, :] + over_own_rows(p, TILE, Q)
    alpha = by_columns(alpha, Q)[None, :]
    zeros = zeros * alpha
    rows = meta.reshape([2 * GROUPS, TILE]).load(VALUES)
    rows = gl.inline_asm_elementwise(ZEROS, "=r,r", [rows], dtype=gl.float16, is_pure=True, pack=2)
    new = ()
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(SUBS):
            scale = scales_up_to(meta.slice((GROUPS + sub * CHUNKS + c) * TILE, TILE).load(ROWS), limits)
            weights = to_right(to_half(p * scale[:, None]), TILE, Q)
            zeros = mma_v2(only_row(rows, GROUPS + sub * CHUNKS + c), weights, zeros)
            w = weights
            if DIGITS > 0:
                w = p * (scale * fine_factor(fine, GROUPS + sub * CHUNKS + c, VALUE.bits))[:, None]
                if SEVERAL:
                    w = gl.where(fine[2], w, 0.0)
                w = to_right(to_half(w), TILE, Q)
                half = gl.full(
                    [2 * GROUPS, TILE], middle(VALUE.bits) / zero_unit(VALUE.bits) * UNIT, gl.float16, VALUES
                )  # fmt: skip
                zeros = mma_v2(only_row(half, GROUPS + sub * CHUNKS + c), w, zeros)
            words = values.index(stage * CHUNKS + c).permute([1, 0]).load(VALUES)
            even = mma_v2(word_plane(words, VALUE.bits, sub), weights, acc[(c * SUBS + sub) * 2] * alpha)
            words = upper_bytes(words)
            odd = mma_v2(word_plane(words, VALUE.bits, sub), weights, acc[(c * SUBS + sub) * 2 + 1] * alpha)
            for j in gl.static_range(DIGITS):
                place = place_of_digit(stage, j, places(VALUE, STAGES, RECENT))
                words = values.index(place * CHUNKS + c).permute([1, 0]).load(VALUES)
                finer = (w * (1 << VALUE.bits * (DIGITS - 1 - j))).to(gl.float16)
                even = mma_v2(word_plane(words, VALUE.bits, sub), finer, even)
                odd = mma_v2(word_plane(upper_bytes(words), VALUE.bits, sub), finer, odd)
            new = new + (even, odd)
            if ends_part(sub, VALUE.bits, DIGITS):
                fence()
    return m_new, total, zeros, new


@gluon.jit
def only_row(x, row: gl.constexpr):
    """Return left operand x, float16 [rows, TILE], with all rows of its second half zeroed except `row`."""
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
def pack_fine(recent, right, D: gl.constexpr, GROUP: gl.constexpr):
    """Pack the exponents of the ring's residuals, two bits a group, keys' groups first: uint32 [TILE].

    Also return a mask, uint32 [TILE], with all bits set for tokens that are `right`, and none for others.
    """
    packed = recent[0][0].to(gl.uint32) & 3
    for g in gl.static_range(1, 2 * (D // GROUP)):
        packed = packed | ((recent[0][g].to(gl.uint32) & 3) << 2 * g)
    mask = gl.where(right, -1, 0).to(gl.uint32)
    return gl.convert_layout(packed, ROWS), gl.convert_layout(mask, ROWS)


@gluon.jit
def fine_factor(fine, g: gl.constexpr, BITS: gl.constexpr):
    """Return 2^(e + BITS - 8), built from its float32 bits, or 0 if the ring holds another token's residual.

    It is the same number as that of `ring.fine_scale`.
    """
    exponent = ((fine[0] >> 2 * g) & 3) + (127 + BITS - 8)
    return ((exponent << 23) & fine[1]).to(gl.float32, bitcast=True)


@gluon.jit
def write_wide(out_ptr, lse_ptr, first, count, stride, m, total, zeros, acc, VALUE: gl.constexpr, D: gl.constexpr,
               GROUP: gl.constexpr, RATIO: gl.constexpr, Q: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Write the results of `accumulate_wide`, as `kernel.epilogue` does."""
    GROUPS: gl.constexpr = D // GROUP
    CHUNKS: gl.constexpr = chunks(VALUE.bits, D, GROUP)
    SUBS: gl.constexpr = 8 // VALUE.bits
    norm = gl.sum(total, 0)
    if SEVERAL:
        norm = gl.where(norm == 0, 1.0, norm)
    word = gl.arange(0, GROUP // 2, ROWS)[:, None]
    n = gl.arange(0, Q, COLS)
    place = place_of(n, first, stride, RATIO, SEVERAL)
    rows = by_queries(zeros, 2 * GROUPS, Q)
    row = gl.arange(0, 2 * GROUPS, ROWS)[:, None]
    for c in gl.static_range(CHUNKS):
        for sub in gl.static_range(SUBS):
            shift = gl.sum(gl.where(row == GROUPS + sub * CHUNKS + c, rows, 0.0), 0) * (zero_unit(VALUE.bits) / UNIT)
            even = by_queries(acc[(c * SUBS + sub) * 2], GROUP // 2, Q) * (0.5 ** (VALUE.bits * sub) / UNIT)
            odd = by_queries(acc[(c * SUBS + sub) * 2 + 1], GROUP // 2, Q) * (0.5 ** (VALUE.bits * sub) / UNIT)
            even = (even - shift[None, :]) / norm[None, :]
            odd = (odd - shift[None, :]) / norm[None, :]
            to = out_ptr + place[None, :] * D + (sub * VALUE.row + c * GROUP + 2 * word)
            store_pairs(to, even, odd, (n[None, :] < count) & (word >= 0))
    gl.store(lse_ptr + place, gl.log2(norm) + m, mask=n < count)
