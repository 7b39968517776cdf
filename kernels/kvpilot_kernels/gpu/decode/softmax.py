"""Running softmax over tiles of packed pages: the scores of a tile's keys, and its weighted values.

`decode` explains the arithmetic, and copies a tile's codes and digits to shared memory before it calls this module.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvpilot_kernels.gpu.decode.ring import fine_scale, place_of_digit, places
from kvpilot_kernels.gpu.layout.mma import by_columns, join_bytes, over_own_rows, to_right
from kvpilot_kernels.gpu.layout.unpack import (
    LARGEST_HALF,
    MMA,
    NAN_HALF,
    ROWS,
    SCORES,
    UNIT,
    byte_plane,
    chunks,
    is_signed,
    key_planes,
    key_shift,
    load_keys,
    load_values,
    middle,
    scales,
    scales_up_to,
    to_half,
    value_planes,
    word_plane,
    zero_codes,
    zero_unit,
)  # fmt: skip

HEADROOM = gl.constexpr(5.0)
"""Exponent of the factor on probabilities, 2^5.

Small probabilities times a value's scale then stay normal in float16. Scales of 2,048 and more overflow, and the output
is not finite. Such scales occur with values of 6,000 and more at 2 bits, and of 30,000 at 4 bits.
"""


@gluon.jit
def dot(codes, operands, start, g: gl.constexpr, BITS: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
        TILE: gl.constexpr, Q: gl.constexpr):  # fmt: skip
    """Multiply a group's codes by the queries: float32 [TILE, Q], times 2^`key_shift`.

    The sums are exact before the last rounding, because they stay below 64 * LARGEST * 255 < 2^31.
    """
    PLANES: gl.constexpr = key_planes(BITS, D, GROUP)
    sums = gl.full([TILE, 2 * Q], 0, gl.int32, MMA)
    if is_signed(BITS, D, GROUP, g):
        sums += start[None, :]
    for i in gl.static_range(len(PLANES)):
        if PLANES[i][2] == g:
            plane = byte_plane(codes[2 * PLANES[i][0] + PLANES[i][4]], BITS, PLANES[i][3])
            sums = mma_v2(plane, operands[i], sums)
    return join_bytes(sums, TILE, Q)


@gluon.jit
def score(keys, meta, stage, t, query, fine, softcap, KEY: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
          TILE: gl.constexpr, Q: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr,
          RECENT: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Return a tile's scores, float32 [TILE, Q], in units of each query, or with SOFTCAP in log2.

    Token 0 of a sequence has its own mean, so its score starts with the query's `apart`. With SOFTCAP the query's
    `level` is added before the cap.

    Args:
        t: first token of the tile.
        query: from `mma.load_query`.
        fine: as in `ring.fine_scale`. With RECENT it adds the ring's digits.
    """
    COUNT: gl.constexpr = chunks(KEY.bits, D, GROUP)
    DIGITS: gl.constexpr = KEY.digits if RECENT else 0
    operands, starts, taken, unit, apart, level = query
    codes = load_keys(keys, stage, COUNT)
    token = gl.arange(0, TILE, ROWS)
    score = gl.where(
        (token == 0)[:, None], gl.where(t == 0, apart, 0.0)[None, :], gl.full([TILE, Q], 0.0, gl.float32, SCORES)
    )
    for g in gl.static_range(D // GROUP):
        word = meta.slice(g * TILE, TILE).load(ROWS)
        scale = scales(word) * (0.5 ** key_shift(KEY.bits, D, GROUP, g))
        product = dot(codes, operands, starts[g], g, KEY.bits, D, GROUP, TILE, Q)
        score += scale[:, None] * (product - zero_codes(word)[:, None] * taken[g][None, :])
    if DIGITS > 0:
        products = ()
        for g in gl.static_range(D // GROUP):
            products = products + (gl.full([TILE, Q], 0.0, gl.float32, SCORES),)
        for i in gl.static_range(DIGITS):
            codes = load_keys(keys, place_of_digit(stage, i, places(KEY, STAGES, RECENT)), COUNT)
            new = ()
            for g in gl.static_range(D // GROUP):
                product = dot(codes, operands, starts[g], g, KEY.bits, D, GROUP, TILE, Q)
                new = new + (products[g] * (1 << KEY.bits) + product,)
            products = new
        for g in gl.static_range(D // GROUP):
            half = taken[g] * (middle(KEY.bits) / zero_unit(KEY.bits) * UNIT)
            scale = scales(meta.slice(g * TILE, TILE).load(ROWS)) * (0.5 ** key_shift(KEY.bits, D, GROUP, g))
            finer = (scale * fine_scale(fine, g, KEY.bits))[:, None] * (products[g] - half[None, :])
            if SEVERAL:
                finer = gl.where(fine[2], finer, 0.0)
            score += finer
    if SOFTCAP:
        score += level[None, :]
        power = gl.exp2(score * unit[None, :] * (2.0 / softcap))
        score = (1.0 - 2.0 / (power + 1.0)) * (softcap * 1.4426950408889634)
    return score


@gluon.jit
def hide(score, meta, t, ends, end, length, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr,
         WINDOW: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Mask the tokens of a tile that a query does not attend to: their scores become -1e38 or less.

    A hidden token has weight 0, and 0 times a NaN scale would be NaN. So the scales of its value are limited to
    numbers. If queries attend to different tokens, all scales of the tile are limited. Then a token with a NaN scale
    gets the score NaN instead.

    Args:
        t: first token of the tile.
        ends: with several query tokens per sequence, the number of tokens that each query attends to, int32 [Q], and
            the largest of these numbers.
        end: end of the split.
        length: smallest number of tokens that a query attends to.

    Returns:
        The scores, and limits for the values' scales, uint16 [TILE].
    """
    token = t + gl.arange(0, TILE, ROWS)
    limits = gl.full([TILE], NAN_HALF, gl.uint16, ROWS)
    if SEVERAL:
        by_query, longest = ends
        unseen = t + TILE > length
        if WINDOW > 0:
            unseen = unseen | (t < longest - WINDOW)
        if unseen:
            for g in gl.static_range(D // GROUP):
                score += (scales(meta.slice((D // GROUP + g) * TILE, TILE).load(ROWS)) * 0.0)[:, None]
            seen = token[:, None] < by_query[None, :]
            if WINDOW > 0:
                seen = seen & (token[:, None] >= by_query[None, :] - WINDOW)
            score = gl.where(seen, score, float("-inf"))
            limits = gl.full([TILE], LARGEST_HALF, gl.uint16, ROWS)
    else:
        live = token < end
        if WINDOW > 0:
            live = live & (token >= length - WINDOW)
        score = gl.where(live[:, None], score, -1e38)
        limits = gl.where(live, limits, gl.full([TILE], LARGEST_HALF, gl.uint16, ROWS))
    return score, limits


@gluon.jit
def accumulate(score, unit, limits, values, meta, stage, m, total, zeros, acc, fine, VALUE: gl.constexpr,
               D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, Q: gl.constexpr, STAGES: gl.constexpr,
               RECENT: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Add a tile to the running softmax, and return its state: `m`, `total`, `zeros` and `acc`.

    Args:
        unit: factor that turns scores into log2, [Q].
        limits: limits of the values' scales, from `hide`.
        fine: as in `score`.
        m: [Q], the largest score so far, less HEADROOM.
        total: [8, Q], sums of probabilities times 2^HEADROOM, over the rows of a thread.
        zeros: [8, Q] for each group, the same sums weighted by scale and zero code, in units of UNIT.
        acc: [words, columns] for each plane, the same sums weighted by scale and code, in units of
            UNIT * 2^(bits * sub-plane). The module `mma` defines the columns.
    """
    PLANES: gl.constexpr = value_planes(VALUE.bits, D, GROUP)
    COUNT: gl.constexpr = chunks(VALUE.bits, D, GROUP)
    GROUPS: gl.constexpr = D // GROUP
    DIGITS: gl.constexpr = VALUE.digits if RECENT else 0
    m_new = gl.maximum(m, gl.max(score, 0) * unit - HEADROOM)
    alpha = gl.exp2(m - m_new)
    total = total * alpha[None, :]
    new = ()
    for g in gl.static_range(GROUPS):
        new = new + (zeros[g] * alpha[None, :],)
    zeros = new
    alpha = by_columns(alpha, Q)
    new = ()
    for i in gl.static_range(len(PLANES)):
        new = new + (acc[i] * alpha[None, :],)
    acc = new
    p = gl.exp2(score * unit[None, :] - m_new[None, :])
    total = total + over_own_rows(p, TILE, Q)
    weights = ()
    fine_weights = ()
    new = ()
    for g in gl.static_range(GROUPS):
        word = meta.slice((GROUPS + g) * TILE, TILE).load(ROWS)
        scale = scales_up_to(word, limits)
        w = to_half(p * scale[:, None])
        zero = w.to(gl.float32) * zero_codes(word)[:, None]
        weights = weights + (to_right(w, TILE, Q),)
        if DIGITS > 0:
            w = p * (scale * fine_scale(fine, GROUPS + g, VALUE.bits))[:, None]
            if SEVERAL:
                w = gl.where(fine[2], w, 0.0)
            w = to_half(w)
            zero += w.to(gl.float32) * (middle(VALUE.bits) / zero_unit(VALUE.bits) * UNIT)
            fine_weights = fine_weights + (to_right(w, TILE, Q),)
        new = new + (zeros[g] + over_own_rows(zero, TILE, Q),)
    zeros = new
    words = load_values(values, stage, COUNT)
    new = ()
    for i in gl.static_range(len(PLANES)):
        codes = word_plane(words[2 * PLANES[i][0] + PLANES[i][2]], VALUE.bits, PLANES[i][1])
        new = new + (mma_v2(codes, weights[PLANES[i][3]], acc[i]),)
    acc = new
    for j in gl.static_range(DIGITS):
        words = load_values(values, place_of_digit(stage, j, places(VALUE, STAGES, RECENT)), COUNT)
        new = ()
        for i in gl.static_range(len(PLANES)):
            codes = word_plane(words[2 * PLANES[i][0] + PLANES[i][2]], VALUE.bits, PLANES[i][1])
            w = (fine_weights[PLANES[i][3]] * (1 << VALUE.bits * (DIGITS - 1 - j))).to(gl.float16)
            new = new + (mma_v2(codes, w, acc[i]),)
        acc = new
    return m_new, total, zeros, acc
