"""Decode: attention from a step's tokens to the packed pages of their sequence, in splits, without dequantization.

With codes c, scale s and zero point z of a group, the rotated query q (in units of log2, see `store`), and the
probability p_t of token t,

    q . k = s * (q . c - z * sum(q))            out = sum_t (p_t s_t) c_t - sum_t p_t s_t z_t

so the matrix products run on codes alone. Decode is fast on NVIDIA GPUs from compute capability 8.0 on, because:

- Keys: one AND turns four bytes of packed codes into an operand of 8-bit integers (m16n8k32). A query is a 16-bit
  integer in two columns (`mma`), so sums are exact.
- Values: one AND turns a code into a float16. The bits of n in a mantissa with exponent 0 are the subnormal n * 2^-24,
  which tensor cores multiply exactly (m16n8k16). Only the upper byte of a word is shifted.
- Copies: codes go from memory to shared memory (cp.async), and by ldmatrix straight into the registers of an MMA
  operand, transposed for the values. The planes of a row (`unpack`) are separate MMAs on permuted elements.
- Operands: keys and values are on the left, with tokens or elements along M. Queries of one KV head are on the right.
- Programs: each is one warp, so there are no barriers and no exchange between warps. Eight or more programs on a
  multiprocessor hide each other's latency.

A second loop over a sequence's last tiles reads the recent window (`layouts`: ring layout). It adds a product with the
digits that refine codes to 8 bits, times the scale of a token's residual. This scale is 0 if the ring holds the
residual of another token.

If a sequence has several tokens in a step (SEVERAL: a token and its drafts), each column of the products has its own
`end`: the number of tokens that its query attends to. Pages are read once for all columns. Masks by column apply only
to tiles in which columns differ: the last tiles, the first tiles of a sliding window, and those of the recent window.

The language is Gluon, because Triton's own layouts move unpacked values through shared memory, at half the speed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpilot_kernels.gpu.decode.head512 import (
    accumulate_wide,
    fetch_queries,
    load_wide_query,
    pack_fine,
    places_of_queries,
    score_wide,
    write_wide,
)
from kvpilot_kernels.gpu.decode.ring import (
    fetch_ring,
    is_refined,
    load_recent,
    over_lanes,
    places,
)
from kvpilot_kernels.gpu.decode.softmax import accumulate, hide, score
from kvpilot_kernels.gpu.layout.mma import (
    by_queries,
    load_query,
    place_of,
)
from kvpilot_kernels.gpu.layout.unpack import (
    COLS,
    MMA,
    ROWS,
    SCORES,
    UNIT,
    chunk_words,
    chunks,
    fetch,
    fetch_tile,
    is_wide,
    padded,
    store_pairs,
    value_planes,
    zero_unit,
)  # fmt: skip


@gluon.jit
def epilogue(out_ptr, lse_ptr, first, count, stride, m, total, zeros, acc, VALUE: gl.constexpr, D: gl.constexpr,
             GROUP: gl.constexpr, RATIO: gl.constexpr, Q: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Write a split's normalised output, float32 [count, D], and log2 of its softmax sums, float32 [count].

    With several query tokens, an early query may attend to no token of the last split. Its output there is 0, with a
    negligible weight.
    """
    PLANES: gl.constexpr = value_planes(VALUE.bits, D, GROUP)
    WORDS: gl.constexpr = chunk_words(VALUE.bits, D, GROUP)
    norm = gl.sum(total, 0)
    if SEVERAL:
        norm = gl.where(norm == 0, 1.0, norm)
    word = gl.arange(0, padded(WORDS), ROWS)[:, None]
    n = gl.arange(0, Q, COLS)
    place = place_of(n, first, stride, RATIO, SEVERAL)
    for i in gl.static_range(0, len(PLANES), 2):  # a word holds an even and an odd element
        shift = gl.sum(zeros[PLANES[i][3]], 0) * (zero_unit(VALUE.bits) / UNIT)
        even = by_queries(acc[i], padded(WORDS), Q) * (0.5 ** (VALUE.bits * PLANES[i][1]) / UNIT)
        odd = by_queries(acc[i + 1], padded(WORDS), Q) * (0.5 ** (VALUE.bits * PLANES[i][1]) / UNIT)
        even = (even - shift[None, :]) / norm[None, :]
        odd = (odd - shift[None, :]) / norm[None, :]
        element = PLANES[i][1] * VALUE.row + 2 * (PLANES[i][0] * WORDS + word)
        store_pairs(out_ptr + place[None, :] * D + element, even, odd, (n[None, :] < count) & (word < WORDS))
    gl.store(lse_ptr + place, gl.log2(norm) + m, mask=n < count)


@gluon.jit
def attend(query, stage, m, total, zeros, acc, recent, base, table_ptr, ring_ptr, ring_rows, keys, values, meta,
           begin, stop, ahead, end, length, ends, page_stride, ring_page_stride, softcap, KEY: gl.constexpr,
           VALUE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, Q: gl.constexpr, TILE: gl.constexpr,
           PAGE: gl.constexpr, STAGES: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr,
           RECENT: gl.constexpr, RING: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Add tokens [begin, stop) of the split, which ends at `end`, to the running softmax of `accumulate`.

    Without RECENT, copies of STAGES - 1 tiles are in flight, up to token `ahead`. With RECENT only the tile at `stage`
    is in flight, because its digits use the buffers of the other stages.

    Args:
        recent: result of `load_recent` for the first tile, with RECENT.
        ring_rows: blocks of the sequence's ring.
        length: smallest number of tokens that a query attends to.
        ends: as in `hide`.
    """
    scores_unit = gl.full([Q], 1.0, gl.float32, COLS) if SOFTCAP else query[-3]
    for t in range(begin, stop, TILE):
        if RECENT > 0:
            async_copy.wait_group(0)
            at = t + gl.arange(0, TILE, over_lanes(TILE))
            right = (at < end) & (at >= length - RECENT)
            right = is_refined(meta.index(stage), recent, right, D, GROUP, TILE)
            fine = pack_fine(recent, right, D, GROUP) if is_wide(D) else (recent[0], right)
            if SEVERAL:
                fine = fine + ((t + gl.arange(0, TILE, ROWS))[:, None] >= ends[0][None, :] - RECENT,)
        else:
            next_stage = stage + STAGES - 1
            next_stage = gl.where(next_stage >= STAGES, next_stage - STAGES, next_stage)
            fetch(
                keys, values, meta, next_stage, base, table_ptr, t + (STAGES - 1) * TILE, ahead, page_stride, KEY,
                VALUE, D, GROUP, TILE, PAGE,
            )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(STAGES - 1)
            fine = ()
        scores = (score_wide if is_wide(D) else score)(
            keys, meta.index(stage), stage, t, query, fine, softcap, KEY, D, GROUP, TILE, Q, STAGES, SOFTCAP,
            RECENT > 0, SEVERAL,
        )  # fmt: skip
        scores, limits = hide(
            scores, meta.index(stage), t, ends, end, length, D, GROUP, TILE, WINDOW, SEVERAL
        )  # fmt: skip
        m, total, zeros, acc = (accumulate_wide if is_wide(D) else accumulate)(
            scores, scores_unit, limits, values, meta.index(stage), stage, m, total, zeros, acc, fine, VALUE, D, GROUP,
            TILE, Q, STAGES, RECENT > 0, SEVERAL,
        )  # fmt: skip
        if RECENT > 0:
            if t + TILE < stop:
                fetch(
                    keys, values, meta, stage, base, table_ptr, t + TILE, end, page_stride, KEY, VALUE, D, GROUP, TILE,
                    PAGE,
                )  # fmt: skip
                fetch_ring(
                    keys, values, stage, ring_ptr, ring_rows, t + TILE, ring_page_stride, KEY, VALUE, D, GROUP,
                    TILE, RING, STAGES,
                )  # fmt: skip
                async_copy.commit_group()
            recent = load_recent(
                base, table_ptr, page_stride, ring_ptr, ring_rows, t + TILE, stop, ring_page_stride, KEY, VALUE, D,
                GROUP, TILE, PAGE, RING,
            )  # fmt: skip
        else:
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    return stage, m, total, zeros, acc


@gluon.jit(do_not_specialize=["table_stride", "ring_table_stride"])
def decode_kernel(
    rotated_ptr, sums_ptr, units_ptr, apart_ptr, level_ptr, cache_ptr, table_ptr, ring_ptr, ring_table_ptr,
    splits_ptr, starts_ptr, spans_ptr, bases_ptr, out_ptr, lse_ptr,
    page_stride, head_stride, ring_page_stride, ring_head_stride, table_stride,
    ring_table_stride, softcap, KEY: gl.constexpr, VALUE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
    RATIO: gl.constexpr, TAKE: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, RECENT: gl.constexpr, RING: gl.constexpr, RING_BLOCKS: gl.constexpr,
    SEVERAL: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Attend in one split of the plan, for TAKE queries of a KV head, at most 16, with one warp.

    Grid (cdiv(most tokens of a sequence * RATIO, TAKE), kv_heads, splits). A row is a query token.

    rotated: int8 [rows, kv_heads * RATIO, 2, D], the queries as integers, from `store`.
    sums: int32 [rows, kv_heads * RATIO, groups, 3], sums of these integers.
    units: float32 [rows, kv_heads * RATIO], the value of their 1.
    apart: float32 [rows, kv_heads * RATIO], added to the score of the sequence's first token.
    level: float32 [rows, kv_heads * RATIO], added to every score before its cap; not read without a cap.
    cache: packed pages.
    table: int32 [sequences, blocks].
    splits: int32 [splits, 4] as (sequence, start, end, length of the sequence). The sequence is -1 for no work.
    ring: pages of the last RECENT tokens' residuals, RING tokens in each of RING_BLOCKS; not read if RECENT is 0.
    ring_table: int32 [sequences, RING_BLOCKS], negative for no block; not read if RECENT is 0.
    starts: int32 [sequences + 1], the first row of each sequence, read only with SEVERAL. The last row attends to all
        tokens of the sequence, and each earlier row to one token less. Without SEVERAL each sequence is one row.
    spans, bases: as written by `schedule`, read only with SEVERAL.
    out: float32 [results, kv_heads, RATIO, D], normalised, still rotated. A split has a result for each row of its
        sequence.
    lse: float32 [results, kv_heads, RATIO], in log2.
    KEY, VALUE: a `page.SideLayout`.
    """
    Q: gl.constexpr = 4 if TAKE <= 4 else 8 if TAKE <= 8 else 16
    KEY_CHUNKS: gl.constexpr = chunks(KEY.bits, D, GROUP)
    KEY_WIDE: gl.constexpr = 2 * padded(chunk_words(KEY.bits, D, GROUP))
    VALUE_CHUNKS: gl.constexpr = chunks(VALUE.bits, D, GROUP)
    VALUE_WIDE: gl.constexpr = padded(chunk_words(VALUE.bits, D, GROUP))
    KEY_SHARED: gl.constexpr = gl.SwizzledSharedLayout(16, 128 // KEY_WIDE, KEY_WIDE // 16, [1, 0])
    VALUE_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // VALUE_WIDE, VALUE_WIDE // 8, [1, 0])
    if OVERLAP:
        gdc_launch_dependents()
    first = gl.program_id(0) * TAKE if SEVERAL or RATIO > TAKE else 0
    head = gl.program_id(1)
    heads = gl.num_programs(1)
    keys = gl.allocate_shared_memory(
        gl.int8, [places(KEY, STAGES, RECENT) * KEY_CHUNKS, TILE, KEY_WIDE], KEY_SHARED
    )  # fmt: skip
    values = gl.allocate_shared_memory(
        gl.uint16, [places(VALUE, STAGES, RECENT) * VALUE_CHUNKS, TILE, VALUE_WIDE], VALUE_SHARED
    )  # fmt: skip
    meta = gl.allocate_shared_memory(
        gl.uint16, [STAGES, 2 * (D // GROUP) * TILE], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    base = cache_ptr + head.to(gl.int64) * head_stride
    ring = ring_ptr + head.to(gl.int64) * ring_head_stride
    split = gl.program_id(2)
    sequence = gl.load(splits_ptr + 4 * split)
    start = gl.load(splits_ptr + 4 * split + 1)
    end = gl.load(splits_ptr + 4 * split + 2)
    length = gl.load(splits_ptr + 4 * split + 3)
    row = sequence
    result = split
    rows = 1
    if SEVERAL:
        owner = gl.maximum(sequence, 0)
        row = gl.load(starts_ptr + owner)
        rows = gl.load(starts_ptr + owner + 1) - row
        result = gl.load(bases_ptr + owner) + (split - gl.load(spans_ptr + 2 * owner)) * rows
        sequence = gl.where(first < rows * RATIO, sequence, -1)
    if sequence >= 0:
        start = gl.multiple_of(start, TILE)
        count = gl.minimum(rows * RATIO - first, TAKE)
        ends = ()
        if SEVERAL:
            after = gl.maximum(rows - 1 - (first + gl.arange(0, Q, COLS)) // RATIO, 0)
            ends = (length - after, length)
            length = length - rows + 1
        table = table_ptr + sequence.to(gl.int64) * table_stride
        ring_rows = ()
        for i in gl.static_range(RING_BLOCKS):
            ring_rows = ring_rows + (gl.load(ring_table_ptr + sequence.to(gl.int64) * ring_table_stride + i),)
        # In the recent window the ring's digits use the buffers of later tiles. So copy ahead only to its first tile.
        plain = end
        ahead = end
        if RECENT > 0:
            plain = gl.minimum(gl.maximum(gl.maximum(length - RECENT, 0) // TILE * TILE, start), end)
            ahead = gl.minimum(plain + 1, end)
        # The last two tokens of a sequence may be from this step: its own, and one of a sequence that shares the block.
        # Copy tiles before them without waiting for `store`.
        settled = gl.minimum(end - 1 - TILE, ahead)
        blocks = ()
        for i in gl.static_range(STAGES - 1):
            t = start + i * TILE
            blocks = blocks + (gl.load(table + t // PAGE, mask=t < ahead, other=0),)
            if t < settled:
                fetch_tile(
                    keys, values, meta, i, base, blocks[i], t, page_stride, KEY, VALUE, D, GROUP, TILE, PAGE
                )  # fmt: skip
        if OVERLAP:
            gdc_wait()
        at = (row * heads + head).to(gl.int64) * RATIO + (0 if SEVERAL else first)
        queries = ()
        if is_wide(D):
            queries = places_of_queries(Q, D, GROUP)
            fetch_queries(queries, rotated_ptr + at * (2 * D), first, count, heads * RATIO, D, RATIO, Q, SEVERAL)
        for i in gl.static_range(STAGES - 1):
            t = start + i * TILE
            if (t >= settled) & (t < ahead):
                fetch_tile(
                    keys, values, meta, i, base, blocks[i], t, page_stride, KEY, VALUE, D, GROUP, TILE, PAGE
                )  # fmt: skip
            async_copy.commit_group()
        if RECENT > 0:  # noqa: SIM102 - a constant of the launch
            if plain == start:
                fetch_ring(
                    keys, values, 0, ring, ring_rows, start, ring_page_stride, KEY, VALUE, D, GROUP, TILE, RING, STAGES
                )  # fmt: skip
                async_copy.commit_group()
        if is_wide(D):
            query = load_wide_query(
                queries, sums_ptr + at * (3 * (D // GROUP)), units_ptr + at, apart_ptr + at, level_ptr + at, first,
                count, heads * RATIO, KEY.bits, D, GROUP, RATIO, Q, SOFTCAP, SEVERAL,
            )  # fmt: skip
        else:
            query = load_query(
                rotated_ptr + at * (2 * D), sums_ptr + at * (3 * (D // GROUP)), units_ptr + at, apart_ptr + at,
                level_ptr + at, first, count, heads * RATIO, KEY, D, GROUP, RATIO, Q, SOFTCAP, SEVERAL,
            )  # fmt: skip
        stage = 0
        m = gl.full([Q], -1e30, gl.float32, COLS)
        total = gl.full([8, Q], 0.0, gl.float32, SCORES)
        zeros = ()
        if is_wide(D):
            zeros = gl.full([2 * (D // GROUP), Q if Q > 8 else 8], 0.0, gl.float32, MMA)
        else:
            for g in gl.static_range(D // GROUP):
                zeros = zeros + (total,)
        acc = ()
        for i in gl.static_range(len(value_planes(VALUE.bits, D, GROUP))):
            acc = acc + (gl.full([VALUE_WIDE, Q if Q > 8 else 8], 0.0, gl.float32, MMA),)
        stage, m, total, zeros, acc = attend(
            query, stage, m, total, zeros, acc, (), base, table, ring, ring_rows, keys, values, meta, start, plain,
            ahead, end, length, ends, page_stride, ring_page_stride, softcap, KEY, VALUE, D, GROUP, Q, TILE, PAGE,
            STAGES, SOFTCAP, WINDOW, 0, RING, SEVERAL,
        )  # fmt: skip
        if RECENT > 0:
            if (start < plain) & (plain < end):
                fetch_ring(
                    keys, values, stage, ring, ring_rows, plain, ring_page_stride, KEY, VALUE, D, GROUP, TILE, RING,
                    STAGES,
                )  # fmt: skip
                async_copy.commit_group()
            recent = load_recent(
                base, table, page_stride, ring, ring_rows, plain, end, ring_page_stride, KEY, VALUE, D, GROUP, TILE,
                PAGE, RING,
            )  # fmt: skip
            stage, m, total, zeros, acc = attend(
                query, stage, m, total, zeros, acc, recent, base, table, ring, ring_rows, keys, values, meta, plain,
                end, ahead, end, length, ends, page_stride, ring_page_stride, softcap, KEY, VALUE, D, GROUP, Q, TILE,
                PAGE, STAGES, SOFTCAP, WINDOW, RECENT, RING, SEVERAL,
            )  # fmt: skip
        async_copy.wait_group(0)
        at = (result * heads + head).to(gl.int64) * RATIO + (0 if SEVERAL else first)
        (write_wide if is_wide(D) else epilogue)(
            out_ptr + at * D, lse_ptr + at, first, count, heads * RATIO, m, total, zeros, acc, VALUE, D, GROUP, RATIO,
            Q, SEVERAL,
        )  # fmt: skip
    elif OVERLAP:  # later kernels rely on this kernel to wait for all earlier writes
        gdc_wait()
