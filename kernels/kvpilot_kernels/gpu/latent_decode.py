"""Decode of multi-head latent attention: one query token of every sequence over its latent pages, split over tokens.

All heads attend to the same entries, and values are the latents again, so a tile of packed codes is read once for both
products and for all heads of a program. With codes c, scale s and zero point z of a token, and the rotated query q

    q . x = s * (q . c - z * sum(q))            out = sum_t (p_t s_t) c_t - sum_t p_t s_t z_t

As in `decode`, codes go from memory to shared memory as they are and by ldmatrix, transposed for the values, to the
left operand of an MMA, where one AND makes a code a float16: a subnormal, which tensor cores multiply exactly. Tokens,
or elements, are along M and heads along N, so 16 heads fill what they take. Unlike `decode` a program has several
warps: the accumulators of 512 elements are too many registers for one.

Weights p s are kept relative to the largest of them, not to the largest p: a latent may be small or large as a model
likes, and float16 has room for 2^29 below the largest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kvpilot_kernels.gpu.operands import (
    UNIT,
    copy_to_shared,
    scales,
    to_half,
    upper_bytes,
    word_plane,
    zero_codes,
    zero_unit,
)
from kvpilot_kernels.latent import formats

RANK = gl.constexpr(formats.RANK)
ROPE = gl.constexpr(formats.ROPE)
ENTRY = gl.constexpr(formats.ENTRY)
ROPE_WORDS = gl.constexpr(formats.ROPE // 2)

HEADROOM = gl.constexpr(15.0)
"""The largest weight is 2^15, within float16."""

LEAST = gl.constexpr(2.0**-20)
"""The smallest scale that a token of other than zeros has."""


@gluon.constexpr_function
def products(warps):
    """The layout of a product: 16 rows to a warp, all columns."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def left(warps):
    """Words, or the float16 made of them, as a product's left operand."""
    return gl.DotOperandLayout(0, products(warps), 2)


@gluon.constexpr_function
def right(warps):
    """Queries or weights as a product's right operand."""
    return gl.DotOperandLayout(1, products(warps), 2)


@gluon.constexpr_function
def copies(words, warps):
    """Words of a row as threads copy them, 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // words, words // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def chunk_words(warps):
    """Words of a row that are an operand at a time: an MMA's 16 rows to a warp, when they are rows."""
    return 16 * warps


@gluon.constexpr_function
def planes(bits, warps):
    """Planes of a latent's row as (chunk, sub-plane, odd).

    Element of word w: sub * 512 * bits / 8 + 2 * (chunk * chunk_words + w) + odd.
    """
    return tuple(
        (c, sub, odd)
        for c in range(formats.RANK * bits // 16 // chunk_words(warps))
        for sub in range(8 // bits)
        for odd in range(2)
    )


@gluon.jit
def stage_queries(queries, rope_queries, query_ptr, count, LATENT: gl.constexpr, Q: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """Put `count` prepared queries into shared memory by plane, float16 [Q, words], each divided by what its codes have
    too much."""
    PLANES: gl.constexpr = planes(LATENT.bits, WARPS)
    WORDS: gl.constexpr = chunk_words(WARPS)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    n = gl.arange(0, Q, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    for i in gl.static_range(len(PLANES)):
        element = PLANES[i][1] * LATENT.row + PLANES[i][2] + 2 * (PLANES[i][0] * WORDS + word)
        x = gl.load(query_ptr + n * ENTRY + element, mask=(n < count) & (word >= 0), other=0.0)
        queries.index(i).store((x.to(gl.float32) * 0.5 ** (LATENT.bits * PLANES[i][1])).to(gl.float16))
    word = gl.arange(0, ROPE_WORDS, gl.SliceLayout(0, layout))[None, :]
    for odd in gl.static_range(2):
        x = gl.load(query_ptr + n * ENTRY + (RANK + odd + 2 * word), mask=(n < count) & (word >= 0), other=0.0)
        rope_queries.index(odd).store(x)


@gluon.jit
def fetch(codes, rope_codes, meta, stage, cache_ptr, table_ptr, t, end, page_stride, LATENT: gl.constexpr,
          POSITION: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Start copying the tile of tokens [t, t + TILE) into `stage`, if t < end."""
    WORDS: gl.constexpr = chunk_words(WARPS)
    CHUNKS: gl.constexpr = LATENT.row // 2 // WORDS
    if t < end:
        page = cache_ptr + gl.load(table_ptr + t // PAGE).to(gl.int64) * page_stride
        place = gl.multiple_of(t % PAGE, TILE)
        u16: gl.constexpr = gl.pointer_type(gl.uint16)
        layout: gl.constexpr = copies(WORDS, WARPS)
        token = gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
        word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
        rows = (page + (LATENT.codes + place * LATENT.row)).to(u16)
        for c in gl.static_range(CHUNKS):
            copy_to_shared(codes.index(stage * CHUNKS + c), rows + (token * (LATENT.row // 2) + (c * WORDS + word)))
        narrow: gl.constexpr = copies(ROPE_WORDS, WARPS)
        token = gl.arange(0, TILE, gl.SliceLayout(1, narrow))[:, None]
        word = gl.arange(0, ROPE_WORDS, gl.SliceLayout(0, narrow))[None, :]
        rows = (page + (POSITION.codes + place * POSITION.row)).to(u16)
        copy_to_shared(rope_codes.index(stage), rows + (token * ROPE_WORDS + word))
        flat: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
        i = gl.arange(0, 2 * TILE, flat)
        # The words of latents and of RoPE parts are one region after the other.
        copy_to_shared(meta.index(stage), (page + LATENT.meta).to(u16) + place + ((i // TILE) * PAGE + i % TILE))


@gluon.jit
def score(codes, rope_codes, queries, rope_queries, word, rope_word, stage, sums, LATENT: gl.constexpr,
          POSITION: gl.constexpr, TILE: gl.constexpr, Q: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """A tile's scores in log2, float32 [TILE, Q]. word, rope_word: metadata of its tokens; sums: as `load_sums`."""
    WORDS: gl.constexpr = chunk_words(WARPS)
    CHUNKS: gl.constexpr = LATENT.row // 2 // WORDS
    SUBS: gl.constexpr = 8 // LATENT.bits
    unit, taken, rope_taken = sums
    product = gl.full([TILE, Q], 0.0, gl.float32, products(WARPS))
    rope_product = product
    for c in gl.static_range(CHUNKS):
        low = codes.index(stage * CHUNKS + c).load(left(WARPS))
        both = (low, upper_bytes(low))
        for i in gl.static_range(2 * SUBS):
            query = queries.index(c * 2 * SUBS + i).permute([1, 0]).load(right(WARPS))
            product = mma_v2(word_plane(both[i % 2], LATENT.bits, i // 2), query, product)
    low = rope_codes.index(stage).load(left(WARPS))
    both = (low, upper_bytes(low))
    for odd in gl.static_range(2):
        query = rope_queries.index(odd).permute([1, 0]).load(right(WARPS))
        rope_product = mma_v2(word_plane(both[odd], POSITION.bits, 0), query, rope_product)
    product = scales(word, False)[:, None] * (product - zero_codes(word)[:, None] * taken[None, :])
    rope_product = scales(rope_word, False)[:, None] * (
        rope_product - zero_codes(rope_word)[:, None] * rope_taken[None, :]
    )
    return (product + rope_product) * unit[None, :]


@gluon.jit
def load_sums(sums_ptr, count, LATENT: gl.constexpr, POSITION: gl.constexpr, HEADS: gl.constexpr, Q: gl.constexpr,
              WARPS: gl.constexpr):  # fmt: skip
    """Of each query, float32 [Q]: its unit, and what a zero code takes off each of its two products, all over UNIT."""
    n = gl.arange(0, Q, gl.SliceLayout(0, products(WARPS)))
    unit = gl.load(sums_ptr + n, mask=n < count, other=0.0) * (1.0 / UNIT)
    taken = gl.load(sums_ptr + HEADS + n, mask=n < count, other=0.0) * zero_unit(LATENT.bits)
    rope_taken = gl.load(sums_ptr + 2 * HEADS + n, mask=n < count, other=0.0) * zero_unit(POSITION.bits)
    return unit, taken, rope_taken


@gluon.jit
def accumulate(codes, weights, stage, acc, LATENT: gl.constexpr, WARPS: gl.constexpr):
    """Add the tile at `stage` times the weights in shared memory, [TILE, Q], to acc by plane, [words, Q]."""
    WORDS: gl.constexpr = chunk_words(WARPS)
    CHUNKS: gl.constexpr = LATENT.row // 2 // WORDS
    SUBS: gl.constexpr = 8 // LATENT.bits
    weight = weights.load(right(WARPS))
    new = ()
    for c in gl.static_range(CHUNKS):
        low = codes.index(stage * CHUNKS + c).permute([1, 0]).load(left(WARPS))
        both = (low, upper_bytes(low))
        for i in gl.static_range(2 * SUBS):
            plane = word_plane(both[i % 2], LATENT.bits, i // 2)
            new = new + (mma_v2(plane, weight, acc[c * 2 * SUBS + i]),)
    return new


@gluon.jit
def latent_decode_kernel(
    query_ptr, sums_ptr, cache_ptr, table_ptr, splits_ptr, out_ptr, lse_ptr, page_stride, table_stride,
    LATENT: gl.constexpr, POSITION: gl.constexpr, HEADS: gl.constexpr, TAKE: gl.constexpr, Q: gl.constexpr,
    TILE: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Partial attention of one split of the plan and TAKE of the heads, at most Q; WARPS warps.

    Grid (cdiv(HEADS, TAKE), splits).

    query: float16 [sequences, HEADS, 576] and sums: float32 [sequences, 3, HEADS], as `latent_store` prepares them.
    cache: latent pages; table: int32 [sequences, blocks]; splits: int32 [splits, 4] as (sequence, start, end, ...), a
    sequence of -1 is no work; LATENT, POSITION: a `codec.SideLayout`.
    out: float32 [splits, HEADS, 512], normalised, rotated; lse: float32 [splits, HEADS] in log2.
    """
    PLANES: gl.constexpr = planes(LATENT.bits, WARPS)
    WORDS: gl.constexpr = chunk_words(WARPS)
    CHUNKS: gl.constexpr = LATENT.row // 2 // WORDS
    ROWS: gl.constexpr = gl.SliceLayout(1, products(WARPS))
    COLS: gl.constexpr = gl.SliceLayout(0, products(WARPS))
    codes = gl.allocate_shared_memory(
        gl.uint16, [STAGES * CHUNKS, TILE, WORDS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )  # fmt: skip
    rope_codes = gl.allocate_shared_memory(
        gl.uint16, [STAGES, TILE, ROPE_WORDS], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    )  # fmt: skip
    meta = gl.allocate_shared_memory(gl.uint16, [STAGES, 2 * TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = gl.allocate_shared_memory(
        gl.float16, [len(PLANES), Q, WORDS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )  # fmt: skip
    rope_queries = gl.allocate_shared_memory(
        gl.float16, [2, Q, ROPE_WORDS], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    )  # fmt: skip
    weights = gl.allocate_shared_memory(gl.float16, [TILE, Q], gl.SwizzledSharedLayout(8, 64 // Q, Q // 8, [1, 0]))
    first = gl.program_id(0) * TAKE
    count = gl.minimum(HEADS - first, TAKE)
    split = gl.program_id(1)
    sequence = gl.load(splits_ptr + 4 * split)
    if sequence >= 0:
        start = gl.multiple_of(gl.load(splits_ptr + 4 * split + 1), TILE)
        end = gl.load(splits_ptr + 4 * split + 2)
        table = table_ptr + sequence.to(gl.int64) * table_stride
        for i in gl.static_range(STAGES - 1):
            fetch(
                codes, rope_codes, meta, i, cache_ptr, table, start + i * TILE, end, page_stride, LATENT, POSITION,
                TILE, PAGE, WARPS,
            )  # fmt: skip
            async_copy.commit_group()
        stage_queries(
            queries, rope_queries, query_ptr + (sequence.to(gl.int64) * HEADS + first) * ENTRY, count, LATENT, Q, WARPS
        )  # fmt: skip
        sums = load_sums(
            sums_ptr + sequence.to(gl.int64) * (3 * HEADS) + first, count, LATENT, POSITION, HEADS, Q, WARPS
        )  # fmt: skip
        token = gl.arange(0, TILE, ROWS)
        stage = 0
        m = gl.full([Q], -1e30, gl.float32, COLS)
        total = gl.full([TILE, Q], 0.0, gl.float32, products(WARPS))
        zeros = total
        acc = ()
        for i in gl.static_range(len(PLANES)):
            acc = acc + (gl.full([WORDS, Q], 0.0, gl.float32, products(WARPS)),)
        for t in range(start, end, TILE):
            next_stage = stage + STAGES - 1
            next_stage = gl.where(next_stage >= STAGES, next_stage - STAGES, next_stage)
            fetch(
                codes, rope_codes, meta, next_stage, cache_ptr, table, t + (STAGES - 1) * TILE, end, page_stride,
                LATENT, POSITION, TILE, PAGE, WARPS,
            )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(STAGES - 1)
            word = meta.index(stage).slice(0, TILE).load(ROWS)
            rope_word = meta.index(stage).slice(TILE, TILE).load(ROWS)
            s = score(
                codes, rope_codes, queries, rope_queries, word, rope_word, stage, sums, LATENT, POSITION, TILE, Q, WARPS
            )  # fmt: skip
            s = gl.where((t + token < end)[:, None], s, -1e38)
            # Past the end scales may be NaN, and 0 * NaN is not 0.
            scale = scales(word, True)
            largest = gl.max(s + gl.log2(gl.maximum(scale, LEAST))[:, None], 0)
            m_new = gl.maximum(m, largest - HEADROOM)
            alpha = gl.exp2(m - m_new)
            m = m_new
            p = gl.exp2(s - m[None, :])
            w = to_half(p * scale[:, None])
            weights.store(w)
            total = total * alpha[None, :] + p
            zeros = zeros * alpha[None, :] + w.to(gl.float32) * zero_codes(word)[:, None]
            new = ()
            for i in gl.static_range(len(PLANES)):
                new = new + (acc[i] * alpha[None, :],)
            acc = accumulate(codes, weights, stage, new, LATENT, WARPS)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        async_copy.wait_group(0)
        norm = gl.sum(total, 0)
        shift = gl.sum(zeros, 0) * (zero_unit(LATENT.bits) / UNIT)
        word = gl.arange(0, WORDS, ROWS)[:, None]
        n = gl.arange(0, Q, COLS)
        at = (split * HEADS + first).to(gl.int64)
        for i in gl.static_range(len(PLANES)):
            element = PLANES[i][1] * LATENT.row + PLANES[i][2] + 2 * (PLANES[i][0] * WORDS + word)
            value = acc[i] * (0.5 ** (LATENT.bits * PLANES[i][1]) / UNIT)
            value = (value - shift[None, :]) / norm[None, :]
            gl.store(out_ptr + at * RANK + n[None, :] * RANK + element, value, mask=(n[None, :] < count) & (word >= 0))
        gl.store(lse_ptr + at + n, gl.log2(norm) + m, mask=n < count)
