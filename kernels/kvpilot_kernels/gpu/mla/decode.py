"""Decode of multi-head latent attention: from one query token per sequence to its latent pages, in splits of tokens.

All heads attend to the same entries (a token's latent and RoPE part), and the values are the latents. So a tile of
packed codes is read once for both products and all heads of a program. With codes c, scale s and zero point z of a
token, the rotated query q, and the probability p_t of token t,

    q . x = s * (q . c - z * sum(q))            out = sum_t (p_t s_t) c_t - sum_t p_t s_t z_t

As in `decode`, codes are copied unchanged to shared memory. ldmatrix, which transposes them for the values, loads them
into the left operand of an MMA. There one AND turns a code into a float16 subnormal, which tensor cores multiply
exactly. Tokens or elements are along M and heads along N, so that 16 heads fill an operand. Unlike in `decode`, a
program has several warps, because accumulators of 512 elements do not fit into the registers of one warp.

A common factor scales the weights p_t s_t to float16's range. The largest weight determines it, because scales s_t may
be arbitrarily small or large. If a later weight exceeds the range, which is rare, the sums are rescaled. Weights down
to 2^-22 of the largest one do not underflow.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpilot_kernels.gpu.layout.unpack import (
    LARGEST_HALF,
    UNIT,
    scales,
    scales_up_to,
    store_pairs,
    to_half,
    upper_bytes,
    word_plane,
    zero_codes,
    zero_unit,
)
from kvpilot_kernels.gpu.mla.operands import (
    ENTRY,
    RANK,
    ROPE_WORDS,
    LatentQueries,
    LatentSmem,
    chunk_words,
    fetch,
    halves,
    left,
    load_sums,
    over_own_rows,
    parts,
    planes,
    products,
    right,
    stage_queries,
)  # fmt: skip

HEADROOM = gl.constexpr(15.0)
"""Exponent of the largest weight, 2^15, within float16's range."""

FROM = gl.constexpr(8.0)
"""Exponent of the largest weight right after a rescaling, 2^8."""

LEAST = gl.constexpr(2.0**-20)
"""Smallest scale of a token that is not all zeros."""


@gluon.jit
def multiply_by_queries(low, queries, sums, first: gl.constexpr, BITS: gl.constexpr, WARPS: gl.constexpr):
    """Multiply the codes in words, uint16 [TILE, words], by the queries, and add the products to `sums`.

    `queries` and `sums` are tuples with an element for each part of the heads (`parts`). `first` is the index of the
    words' first plane in `queries`.
    """
    both = (low, upper_bytes(low))
    for i in gl.static_range(2 * (8 // BITS)):
        plane = word_plane(both[i % 2], BITS, i // 2)
        new = ()
        for j in gl.static_range(len(sums)):
            query = queries[j].index(first + i).permute([1, 0]).load(right(WARPS))
            new = new + (mma_v2(plane, query, sums[j]),)
        sums = new
    return sums


@gluon.jit
def score(smem, queries, word, rope_word, stage, C: gl.constexpr):
    """Return a tile's scores in log2, float32 [tile, heads] for each part of the heads (`parts`).

    `word` and `rope_word` are the metadata of the tile's tokens. The sums of the queries are loaded again for each
    tile, because registers have no room to keep them.
    """
    PARTS: gl.constexpr = parts(C.queries)
    WARPS: gl.constexpr = C.warps
    BITS: gl.constexpr = C.latent.bits
    CHUNKS: gl.constexpr = C.latent.row // 2 // chunk_words(C.warps)
    scale = scales(word)
    zero = zero_codes(word)
    rope_scale = scales(rope_word)
    rope_zero = zero_codes(rope_word)
    sums = ()
    for j in gl.static_range(len(PARTS)):
        sums = sums + (gl.full([C.tile, PARTS[j][1]], 0.0, gl.float32, products(WARPS)),)
    rope_codes = smem.rope_codes.index(stage).load(left(WARPS))
    rope_sums = multiply_by_queries(rope_codes, queries.rope, sums, 0, C.rope.bits, WARPS)
    for c in gl.static_range(CHUNKS):
        codes = smem.codes.index(stage * CHUNKS + c).load(left(WARPS))
        sums = multiply_by_queries(codes, queries.latent, sums, c * 2 * (8 // BITS), BITS, WARPS)
    scores = ()
    for j in gl.static_range(len(PARTS)):
        unit, taken, rope_taken = load_sums(queries.sums, queries.count, PARTS[j][0], PARTS[j][1], C)
        s = scale[:, None] * (sums[j] - zero[:, None] * taken[None, :])
        s += rope_scale[:, None] * (rope_sums[j] - rope_zero[:, None] * rope_taken[None, :])
        scores = scores + (s * unit[None, :],)
    return scores


@gluon.jit
def accumulate(smem, weights, stage, acc, C: gl.constexpr):
    """Multiply the tile at `stage` by the weights, and add the product to `acc`.

    weights: in shared memory, float16 [tile, heads] for each part.
    acc: float32 [words, heads] for each plane and part, in units of UNIT * 2^(bits * sub-plane).
    """
    PARTS: gl.constexpr = parts(C.queries)
    WARPS: gl.constexpr = C.warps
    BITS: gl.constexpr = C.latent.bits
    CHUNKS: gl.constexpr = C.latent.row // 2 // chunk_words(C.warps)
    SUBS: gl.constexpr = 8 // C.latent.bits
    operands = ()
    for j in gl.static_range(len(PARTS)):
        operands = operands + (weights[j].load(right(WARPS)),)
    new = ()
    for c in gl.static_range(CHUNKS):
        low = smem.codes.index(stage * CHUNKS + c).permute([1, 0]).load(left(WARPS))
        both = (low, upper_bytes(low))
        for i in gl.static_range(2 * SUBS):
            plane = word_plane(both[i % 2], BITS, i // 2)
            for j in gl.static_range(len(PARTS)):
                new = new + (mma_v2(plane, operands[j], acc[(c * 2 * SUBS + i) * len(PARTS) + j]),)
    return new


@gluon.jit
def rescaled(acc, alphas):
    """Multiply `acc`, which is ordered by plane and then by part, by the factors `alphas`, [heads] for each part."""
    PARTS: gl.constexpr = len(alphas)
    new = ()
    for i in gl.static_range(len(acc)):
        new = new + (acc[i] * alphas[i % PARTS][None, :],)
    return new


@gluon.jit(do_not_specialize=["table_stride"])
def latent_decode_kernel(
    query_ptr, sums_ptr, cache_ptr, table_ptr, splits_ptr, out_ptr, lse_ptr, page_stride, table_stride,
    C: gl.constexpr,
):  # fmt: skip
    """Attend in one split of the plan, for `take` heads. Grid (cdiv(heads, take), splits).

    query: `rotated` of a `mla.pages.LatentPlan`.
    sums, splits, lse: as in the `LatentPlan`.
    out: `partial` of the `LatentPlan`.
    cache: latent pages.
    table: int32 [sequences, blocks].
    C: a `LatentConfig`.
    """
    LATENT: gl.constexpr = C.latent
    HEADS: gl.constexpr = C.heads
    TILE: gl.constexpr = C.tile
    STAGES: gl.constexpr = C.stages
    WARPS: gl.constexpr = C.warps
    if C.overlap:
        gdc_launch_dependents()
    PARTS: gl.constexpr = parts(C.queries)
    PLANES: gl.constexpr = planes(C.latent.bits, C.warps)
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
    smem = LatentSmem(codes=codes, rope_codes=rope_codes, meta=meta)
    first = gl.program_id(0) * C.take
    count = gl.minimum(HEADS - first, C.take)
    split = gl.program_id(1)
    sequence = gl.load(splits_ptr + 4 * split)
    if sequence >= 0:
        start = gl.multiple_of(gl.load(splits_ptr + 4 * split + 1), TILE)
        end = gl.load(splits_ptr + 4 * split + 2)
        table = table_ptr + sequence.to(gl.int64) * table_stride
        for i in gl.static_range(STAGES - 1):
            fetch(smem, i, cache_ptr, table, start + i * TILE, end, page_stride, C)
            async_copy.commit_group()
        if C.overlap:
            gdc_wait()
        query = query_ptr + (sequence.to(gl.int64) * HEADS + first) * ENTRY
        sums = sums_ptr + sequence.to(gl.int64) * (3 * HEADS) + first
        latent_queries = ()
        rope_queries = ()
        weights = ()
        m = ()
        total = ()
        zeros = ()
        acc = ()
        for j in gl.static_range(len(PARTS)):
            latent_queries = latent_queries + (gl.allocate_shared_memory(
                gl.float16, [len(PLANES), PARTS[j][1], WORDS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
            ),)  # fmt: skip
            rope_queries = rope_queries + (gl.allocate_shared_memory(
                gl.float16, [2, PARTS[j][1], ROPE_WORDS], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
            ),)  # fmt: skip
            weights = weights + (gl.allocate_shared_memory(
                gl.float16, [TILE, PARTS[j][1]], gl.SwizzledSharedLayout(8, 64 // PARTS[j][1], PARTS[j][1] // 8, [1, 0])
            ),)  # fmt: skip
            stage_queries(latent_queries[j], rope_queries[j], query, count, PARTS[j][0], PARTS[j][1], C)
            m = m + (gl.full([PARTS[j][1]], -1e30, gl.float32, COLS),)
            total = total + (gl.full([TILE // 2, PARTS[j][1]], 0.0, gl.float32, halves(WARPS)),)
            zeros = zeros + (gl.full([TILE // 2, PARTS[j][1]], 0.0, gl.float32, halves(WARPS)),)
        for i in gl.static_range(len(PLANES)):
            for j in gl.static_range(len(PARTS)):
                acc = acc + (gl.full([WORDS, PARTS[j][1]], 0.0, gl.float32, products(WARPS)),)
        queries = LatentQueries(latent=latent_queries, rope=rope_queries, sums=sums, count=count)
        token = gl.arange(0, TILE, ROWS)
        stage = 0
        for t in range(start, end, TILE):
            next_stage = stage + STAGES - 1
            next_stage = gl.where(next_stage >= STAGES, next_stage - STAGES, next_stage)
            fetch(smem, next_stage, cache_ptr, table, t + (STAGES - 1) * TILE, end, page_stride, C)
            async_copy.commit_group()
            async_copy.wait_group(STAGES - 1)
            word = meta.index(stage).slice(0, TILE).load(ROWS)
            rope_word = meta.index(stage).slice(TILE, TILE).load(ROWS)
            scores = score(smem, queries, word, rope_word, stage, C)
            # Limit scales to finite numbers: past the end they may be NaN, and 0 * NaN is NaN. Before the end, a NaN
            # scale has already made the score NaN, so no NaN is lost.
            scale = scales_up_to(word, gl.full([TILE], LARGEST_HALF, gl.uint16, ROWS))
            height = gl.log2(gl.maximum(scale, LEAST))
            zero = zero_codes(word)
            live = t + token < end
            new_m = ()
            new_total = ()
            new_zeros = ()
            alphas = ()
            for j in gl.static_range(len(PARTS)):
                s = gl.where(live[:, None], scores[j], -1e38)
                top = gl.max(s + height[:, None], 0)
                higher = gl.where(top > m[j] + HEADROOM, top - FROM, m[j])
                alpha = gl.exp2(m[j] - higher)
                p = gl.exp2(s - higher[None, :])
                w = to_half(p * scale[:, None])
                weights[j].store(w)
                new_m = new_m + (higher,)
                alphas = alphas + (alpha,)
                alpha = gl.convert_layout(alpha, gl.SliceLayout(0, halves(WARPS)))[None, :]
                new_total = new_total + (total[j] * alpha + over_own_rows(p, WARPS),)
                new_zeros = new_zeros + (zeros[j] * alpha + over_own_rows(w.to(gl.float32) * zero[:, None], WARPS),)
            m = new_m
            total = new_total
            zeros = new_zeros
            least = gl.min(alphas[0], 0)
            for j in gl.static_range(1, len(PARTS)):
                least = gl.minimum(least, gl.min(alphas[j], 0))
            if least < 1.0:
                acc = rescaled(acc, alphas)
            acc = accumulate(smem, weights, stage, acc, C)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        async_copy.wait_group(0)
        word = gl.arange(0, WORDS, ROWS)[:, None]
        at = (split * HEADS + first).to(gl.int64)
        for j in gl.static_range(len(PARTS)):
            norm = gl.convert_layout(gl.sum(total[j], 0), COLS)
            shift = gl.convert_layout(gl.sum(zeros[j], 0), COLS) * (zero_unit(LATENT.bits) / UNIT)
            n = PARTS[j][0] + gl.arange(0, PARTS[j][1], COLS)
            for i in gl.static_range(len(PLANES) // 2):  # a word holds an even and an odd element
                even, odd = acc[2 * i * len(PARTS) + j], acc[(2 * i + 1) * len(PARTS) + j]
                even = (even * (0.5 ** (LATENT.bits * PLANES[2 * i][1]) / UNIT) - shift[None, :]) / norm[None, :]
                odd = (odd * (0.5 ** (LATENT.bits * PLANES[2 * i][1]) / UNIT) - shift[None, :]) / norm[None, :]
                element = PLANES[2 * i][1] * LATENT.row + 2 * (PLANES[2 * i][0] * WORDS + word)
                to = out_ptr + at * RANK + n[None, :] * RANK + element
                store_pairs(to, even, odd, (n[None, :] < count) & (word >= 0))
            gl.store(lse_ptr + at + n, gl.log2(norm) + m[j], mask=n < count)
    elif C.overlap:  # later kernels rely on this: when this kernel ends, all earlier writes are visible
        gdc_wait()
