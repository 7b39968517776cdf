"""Online softmax over tiles of packed pages: the scores of a tile's keys, its weighted values, and the results.

The module `kernel` explains the arithmetic. It copies a tile's codes and residual digits to shared memory first.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvpilot_kernels.gpu.decode.queries import place_of
from kvpilot_kernels.gpu.decode.residuals import digit_buffer, fine_scale
from kvpilot_kernels.gpu.decode.smem import load_keys, load_values
from kvpilot_kernels.gpu.layout.mma import (
    COLS,
    MMA,
    ROWS,
    SCORES,
    by_columns,
    by_queries,
    chunk_words,
    is_signed,
    join_bytes,
    key_planes,
    key_shift,
    over_own_rows,
    padded,
    to_right,
    value_planes,
)
from kvpilot_kernels.gpu.layout.unpack import (
    LARGEST_HALF,
    NAN_HALF,
    UNIT,
    byte_plane,
    middle,
    scales,
    scales_up_to,
    store_pairs,
    to_half,
    word_plane,
    zero_codes,
    zero_unit,
)

HEADROOM = gl.constexpr(5.0)
"""Exponent of the factor on probabilities, 2^5.

Small probabilities times a value's scale then stay normal in float16. Scales of 2,048 and more overflow, and the output
is not finite. Such scales occur with values of 6,000 and more at 2 bits, and of 30,000 at 4 bits.
"""


State = namedtuple("State", "m total zeros acc")
"""Running softmax of a split.

Attributes:
    m: [queries], the largest score so far, less HEADROOM.
    total: [8, queries], sums of probabilities times 2^HEADROOM. A row has the sums of four threads; `write` adds them.
    zeros: [8, queries] for each group, the same sums weighted by scale and zero code, in units of UNIT.
    acc: [words, columns] for each plane, the same sums weighted by scale and code, in units of
        UNIT * 2^(bits * sub-plane). The module `mma` defines the columns.
"""


@gluon.jit
def initial_state(C: gl.constexpr):
    """Return the `State` before the first token."""
    GROUPS: gl.constexpr = C.groups
    VALUE: gl.constexpr = C.value_side
    m = gl.full([C.queries], -1e30, gl.float32, COLS)
    total = gl.full([8, C.queries], 0.0, gl.float32, SCORES)
    zeros = ()
    if C.wide:  # see `head512.accumulate_wide`
        zeros = gl.full([2 * GROUPS, C.columns], 0.0, gl.float32, MMA)
    else:
        for g in gl.static_range(GROUPS):
            zeros = zeros + (total,)
    acc = ()
    for i in gl.static_range(len(value_planes(VALUE))):
        acc = acc + (gl.full([padded(chunk_words(VALUE)), C.columns], 0.0, gl.float32, MMA),)
    return State(m=m, total=total, zeros=zeros, acc=acc)


@gluon.jit
def dot(codes, query, g: gl.constexpr, C: gl.constexpr):
    """Multiply a group's codes by the queries: float32 [tile, queries], times 2^`key_shift`.

    The sums are exact before the last rounding, because they stay below 64 * LARGEST * 255 < 2^31.
    """
    KEY: gl.constexpr = C.key_side
    PLANES: gl.constexpr = key_planes(KEY)
    sums = gl.full([C.tile, 2 * C.queries], 0, gl.int32, MMA)
    if is_signed(KEY, g):
        sums += query.starts[g][None, :]
    for i in gl.static_range(len(PLANES)):
        if PLANES[i][2] == g:
            plane = byte_plane(codes[2 * PLANES[i][0] + PLANES[i][4]], KEY.bits, PLANES[i][3])
            sums = mma_v2(plane, query.operands[i], sums)
    return join_bytes(sums, C.tile, C.queries)


@gluon.jit
def first_scores(t, query, C: gl.constexpr):
    """Return initial scores, float32 [tile, queries]: `apart` for token 0, whose key has its own mean, and else 0."""
    token = gl.arange(0, C.tile, ROWS)
    first = (token == 0)[:, None]
    apart = gl.where(t == 0, query.apart, 0.0)[None, :]
    return gl.where(first, apart, gl.full([C.tile, C.queries], 0.0, gl.float32, SCORES))


@gluon.jit
def capped(score, query, softcap):
    """Add the queries' `level` to scores and apply the soft cap. The result is in log2."""
    score += query.level[None, :]
    power = gl.exp2(score * query.unit[None, :] * (2.0 / softcap))
    return (1.0 - 2.0 / (power + 1.0)) * (softcap * 1.4426950408889634)


@gluon.jit
def score(smem, stage, t, query, C: gl.constexpr):
    """Return a tile's scores without residuals, float32 [tile, queries], in multiples of `Query.unit`.

    Args:
        t: first token of the tile.
        query: from `queries.load_query`.
    """
    GROUPS: gl.constexpr = C.groups
    KEY: gl.constexpr = C.key_side
    meta = smem.meta.index(stage)
    codes = load_keys(smem, stage, C)
    score = first_scores(t, query, C)
    for g in gl.static_range(GROUPS):
        word = meta.slice(g * C.tile, C.tile).load(ROWS)
        scale = scales(word) * (0.5 ** key_shift(KEY, g))
        product = dot(codes, query, g, C)
        score += scale[:, None] * (product - zero_codes(word)[:, None] * query.zeros[g][None, :])
    return score


@gluon.jit
def refine_score(score, smem, stage, query, fine, C: gl.constexpr):
    """Add the residuals of a tile's keys to its scores. `fine` is a `residuals.Fine`."""
    GROUPS: gl.constexpr = C.groups
    KEY: gl.constexpr = C.key_side
    DIGITS: gl.constexpr = KEY.digits
    meta = smem.meta.index(stage)
    products = ()
    for g in gl.static_range(GROUPS):
        products = products + (gl.full([C.tile, C.queries], 0.0, gl.float32, SCORES),)
    for i in gl.static_range(DIGITS):
        codes = load_keys(smem, digit_buffer(stage, i, KEY, C), C)
        new = ()
        for g in gl.static_range(GROUPS):
            new = new + (products[g] * (1 << KEY.bits) + dot(codes, query, g, C),)
        products = new
    for g in gl.static_range(GROUPS):
        half = query.zeros[g] * (middle(KEY.bits) / zero_unit(KEY.bits) * UNIT)
        scale = scales(meta.slice(g * C.tile, C.tile).load(ROWS)) * (0.5 ** key_shift(KEY, g))
        score += (scale * fine_scale(fine, g, KEY.bits))[:, None] * (products[g] - half[None, :])
    return score


@gluon.jit
def hide(score, meta, t, split, C: gl.constexpr):
    """Mask the tokens of a tile that a query does not attend to: their scores become -1e38 or less.

    A hidden token has weight 0, but 0 times a NaN scale is NaN. So limit the scales of hidden values to finite numbers.
    If the queries attend to different tokens of the tile, limit the scales of all its tokens. If a query attends to a
    token with a NaN scale, set its score to NaN instead.

    Args:
        score: from `score`, with residuals and soft cap.
        meta: the tile's scale metadata in shared memory, uint16 [2 * groups * tile].
        t: first token of the tile.
        split: a `kernel.Split`.

    Returns:
        The scores, and limits for the values' scales as bits of float16, uint16 [tile].
    """
    GROUPS: gl.constexpr = C.groups
    token = t + gl.arange(0, C.tile, ROWS)
    limits = gl.full([C.tile], NAN_HALF, gl.uint16, ROWS)
    if C.several:
        if t + C.tile > split.length:
            for g in gl.static_range(GROUPS):
                score += (scales(meta.slice((GROUPS + g) * C.tile, C.tile).load(ROWS)) * 0.0)[:, None]
            score = gl.where(token[:, None] < split.ends[None, :], score, float("-inf"))
            limits = gl.full([C.tile], LARGEST_HALF, gl.uint16, ROWS)
    else:
        live = token < split.end
        score = gl.where(live[:, None], score, -1e38)
        limits = gl.where(live, limits, gl.full([C.tile], LARGEST_HALF, gl.uint16, ROWS))
    return score, limits


@gluon.jit
def accumulate(score, unit, limits, smem, stage, state, C: gl.constexpr):
    """Add a tile to the running softmax, without the residuals of its values.

    Args:
        score: the tile's scores, float32 [tile, queries], from `hide`.
        unit: factor that turns scores into exponents of 2, float32 [queries].
        limits: limits of the values' scales, from `hide`.

    Returns:
        The new `State`, and the tokens' weights, float32 [tile, queries].
    """
    GROUPS: gl.constexpr = C.groups
    VALUE: gl.constexpr = C.value_side
    PLANES: gl.constexpr = value_planes(VALUE)
    meta = smem.meta.index(stage)
    m = gl.maximum(state.m, gl.max(score, 0) * unit - HEADROOM)
    alpha = gl.exp2(state.m - m)
    total = state.total * alpha[None, :]
    zeros = ()
    for g in gl.static_range(GROUPS):
        zeros = zeros + (state.zeros[g] * alpha[None, :],)
    alpha = by_columns(alpha, C.queries)
    acc = ()
    for i in gl.static_range(len(PLANES)):
        acc = acc + (state.acc[i] * alpha[None, :],)
    p = gl.exp2(score * unit[None, :] - m[None, :])
    total = total + over_own_rows(p, C.tile, C.queries)
    weights = ()
    new = ()
    for g in gl.static_range(GROUPS):
        word = meta.slice((GROUPS + g) * C.tile, C.tile).load(ROWS)
        scale = scales_up_to(word, limits)
        w = to_half(p * scale[:, None])
        zero = w.to(gl.float32) * zero_codes(word)[:, None]
        weights = weights + (to_right(w, C.tile, C.queries),)
        new = new + (zeros[g] + over_own_rows(zero, C.tile, C.queries),)
    zeros = new
    words = load_values(smem, stage, C)
    new = ()
    for i in gl.static_range(len(PLANES)):
        codes = word_plane(words[2 * PLANES[i][0] + PLANES[i][2]], VALUE.bits, PLANES[i][1])
        new = new + (mma_v2(codes, weights[PLANES[i][3]], acc[i]),)
    return State(m=m, total=total, zeros=zeros, acc=new), p


@gluon.jit
def refine(p, limits, smem, stage, state, fine, C: gl.constexpr):
    """Add the residuals of a tile's values, weighted by p, to the running softmax."""
    GROUPS: gl.constexpr = C.groups
    VALUE: gl.constexpr = C.value_side
    PLANES: gl.constexpr = value_planes(VALUE)
    DIGITS: gl.constexpr = VALUE.digits
    meta = smem.meta.index(stage)
    weights = ()
    new = ()
    for g in gl.static_range(GROUPS):
        scale = scales_up_to(meta.slice((GROUPS + g) * C.tile, C.tile).load(ROWS), limits)
        w = to_half(p * (scale * fine_scale(fine, GROUPS + g, VALUE.bits))[:, None])
        zero = w.to(gl.float32) * (middle(VALUE.bits) / zero_unit(VALUE.bits) * UNIT)
        weights = weights + (to_right(w, C.tile, C.queries),)
        new = new + (state.zeros[g] + over_own_rows(zero, C.tile, C.queries),)
    zeros = new
    acc = state.acc
    for j in gl.static_range(DIGITS):
        words = load_values(smem, digit_buffer(stage, j, VALUE, C), C)
        new = ()
        for i in gl.static_range(len(PLANES)):
            codes = word_plane(words[2 * PLANES[i][0] + PLANES[i][2]], VALUE.bits, PLANES[i][1])
            w = (weights[PLANES[i][3]] * (1 << VALUE.bits * (DIGITS - 1 - j))).to(gl.float16)
            new = new + (mma_v2(codes, w, acc[i]),)
        acc = new
    return State(m=state.m, total=state.total, zeros=zeros, acc=acc)


@gluon.jit
def write(out_ptr, lse_ptr, source, state, C: gl.constexpr):
    """Write a split's normalised output, float32 [count, dim], and log2 of its softmax sums, float32 [count].

    With several query tokens, an early query may attend to no token of the last split. Then its output is 0, and the
    weight of this output in the merge is negligible.
    """
    VALUE: gl.constexpr = C.value_side
    PLANES: gl.constexpr = value_planes(VALUE)
    WORDS: gl.constexpr = chunk_words(VALUE)
    norm = gl.sum(state.total, 0)
    if C.several:
        norm = gl.where(norm == 0, 1.0, norm)
    word = gl.arange(0, padded(WORDS), ROWS)[:, None]
    n = gl.arange(0, C.queries, COLS)
    place = place_of(n, source, C)
    for i in gl.static_range(0, len(PLANES), 2):  # a word holds an even and an odd element
        shift = gl.sum(state.zeros[PLANES[i][3]], 0) * (zero_unit(VALUE.bits) / UNIT)
        even = by_queries(state.acc[i], padded(WORDS), C.queries) * (0.5 ** (VALUE.bits * PLANES[i][1]) / UNIT)
        odd = by_queries(state.acc[i + 1], padded(WORDS), C.queries) * (0.5 ** (VALUE.bits * PLANES[i][1]) / UNIT)
        even = (even - shift[None, :]) / norm[None, :]
        odd = (odd - shift[None, :]) / norm[None, :]
        element = PLANES[i][1] * VALUE.row + 2 * (PLANES[i][0] * WORDS + word)
        to = out_ptr + place[None, :] * C.dim + element
        store_pairs(to, even, odd, (n[None, :] < source.count) & (word < WORDS))
    gl.store(lse_ptr + place, gl.log2(norm) + state.m, mask=n < source.count)
