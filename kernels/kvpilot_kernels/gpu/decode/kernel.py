"""Split-KV decode: attention of a step's query tokens to the packed pages of their sequence, without dequantization.

Let c be the codes, s the scale and z the zero point of a group, q the rotated query, and p_t the probability of token
t. `store` scales q so that softmax can use base 2. Then

    q . k = s * (q . c - z * sum(q))            out = sum_t (p_t s_t) c_t - sum_t p_t s_t z_t

so the matrix products run on codes alone. Decode is fast on NVIDIA GPUs from compute capability 8.0 on, because:

- Keys: one AND turns four bytes of packed codes into an operand of 8-bit integers (m16n8k32). An element of a query is
  a 16-bit integer. Its two bytes take two columns of the product (`layout.mma`), so sums are exact.
- Values: one AND turns a code into a float16. An integer n in the mantissa, with exponent 0, is the subnormal
  n * 2^-24, which tensor cores multiply exactly (m16n8k16). Only the upper byte of a word is shifted.
- Copies: cp.async copies codes to shared memory. ldmatrix loads them straight into the registers of an MMA operand,
  transposed for the values. Each plane of a row (`layout.mma`) is a separate MMA over the elements in that plane.
- Operands: keys and values are on the left, with tokens or elements along M. Queries of one KV head are on the right.
- Programs: each is one warp, so there are no barriers and no exchange between warps. Eight or more programs on a
  multiprocessor hide each other's latency.

A second loop over a sequence's newest blocks reads the recent window (`layouts`: residual pages). There, a residual
refines each code of b bits to 8 bits. It is stored as digits of b bits, which are packed and multiplied like codes. The
loop adds the product of queries and digits, times the scale of the token's residual, if the block has residual pages.

If a sequence has several tokens in a step (`several`: a token and its drafts), each column of the products has its own
`end`: the number of tokens that its query attends to. Pages are read once for all columns. Masks by column apply only
to the last tiles, in which columns differ.

The language is Gluon, because Triton's own layouts move unpacked values through shared memory, at half the speed.

To follow a value from its page to the output, read `smem` and then `softmax`. For heads of 512 elements, `head512`
replaces `softmax`.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpilot_kernels.gpu.decode.head512 import (
    accumulate_wide,
    allocate_queries,
    fetch_queries,
    load_wide_query,
    refine_score_wide,
    refine_wide,
    score_wide,
    write_wide,
)
from kvpilot_kernels.gpu.decode.queries import Source, load_query
from kvpilot_kernels.gpu.decode.residuals import as_fine, fetch_digits, fetch_side, find_tile, load_exponents
from kvpilot_kernels.gpu.decode.smem import Pages, allocate, fetch, fetch_tile
from kvpilot_kernels.gpu.decode.softmax import (
    accumulate,
    capped,
    hide,
    initial_state,
    refine,
    refine_score,
    score,
    write,
)
from kvpilot_kernels.gpu.layout.mma import COLS
from kvpilot_kernels.gpu.layout.page import NARROW, SideLayout


@dataclass(frozen=True)
class DecodeConfig:
    """Constants of a launch.

    Attributes:
        key_side, value_side: layouts of keys and values.
        ratio: query heads per KV head.
        take: number of queries that a program handles, at most 16. A query is one query head of one token.
        tile: tokens of a tile.
        stages: number of tiles in shared memory at once: the present one and the prefetched ones.
        softcap: True if scores have a soft cap.
        residuals: number of residual pages of a block; 0 without a recent window.
        several: True if sequences have several query tokens.
        overlap: True if the kernel may start before its predecessor ends.
        dim, groups: elements and quantization groups of a row.
        queries: `take` padded to 4, 8 or 16.
        columns: columns of the product of probabilities and values.
        wide: True if a row is too long to keep its queries in registers, so that `head512` handles it.
    """

    key_side: SideLayout
    value_side: SideLayout
    ratio: int
    take: int
    tile: int
    stages: int
    softcap: bool
    residuals: int
    several: bool
    overlap: bool
    dim: int
    groups: int
    queries: int
    columns: int
    wide: bool

    @classmethod
    def of(cls, key: SideLayout, take: int, **constants: Any) -> "DecodeConfig":
        """Return a config. Derive `dim`, `groups`, `queries`, `columns` and `wide` from the arguments."""
        queries = 4 if take <= 4 else 8 if take <= 8 else 16
        return cls(key_side=key, take=take, dim=key.dim, groups=key.dim // key.group, queries=queries,
                   columns=max(queries, 8), wide=key.dim > NARROW.value, **constants)  # fmt: skip


Split = namedtuple("Split", "pages softcap end ahead length ends")
"""Work of a program: one split of a sequence, and where to find its tokens.

Attributes:
    pages: `smem.Pages` of the sequence.
    end: end of the split, in tokens, exclusive.
    ahead: end of prefetching before the recent window, in tokens, exclusive.
    length: smallest number of tokens that a query attends to.
    ends: with `several`, the number of tokens that each query attends to, int32 [queries]; otherwise ().
"""


@gluon.jit
def attend(query, smem, begin, stop, split, C: gl.constexpr):
    """Attend to tokens [begin, stop) of the split, which come before the recent window.

    Copies of stages - 1 tiles are in flight, up to token `split.ahead`. Return the stage of the tile at `stop`, and the
    running softmax.
    """
    stage = 0
    state = initial_state(C)
    unit = gl.full([C.queries], 1.0, gl.float32, COLS) if C.softcap else query.unit
    for t in range(begin, stop, C.tile):
        next_stage = stage + C.stages - 1
        next_stage = gl.where(next_stage >= C.stages, next_stage - C.stages, next_stage)
        fetch(smem, next_stage, split.pages, t + (C.stages - 1) * C.tile, split.ahead, C)
        async_copy.commit_group()
        async_copy.wait_group(C.stages - 1)
        scores = (score_wide if C.wide else score)(smem, stage, t, query, C)
        if C.softcap:
            scores = capped(scores, query, split.softcap)
        scores, limits = hide(scores, smem.meta.index(stage), t, split, C)
        state, _ = (accumulate_wide if C.wide else accumulate)(scores, unit, limits, smem, stage, state, C)
        stage = gl.where(stage == C.stages - 1, 0, stage + 1)
    return stage, state


@gluon.jit
def attend_refined(query, smem, stage, state, begin, stop, split, C: gl.constexpr):
    """Add tokens [begin, stop) of the split, which are in the recent window, to the running softmax.

    The residual digits of the tile at `stage` use the buffers of the other stages, so no other tile fits. But keys are
    free as soon as the scores are known. So copies of the next tile's keys are in flight while the values are read, and
    then copies of its values while the next keys are read.
    """
    KEY: gl.constexpr = C.key_side
    VALUE: gl.constexpr = C.value_side
    pages = split.pages
    unit = gl.full([C.queries], 1.0, gl.float32, COLS) if C.softcap else query.unit
    tile = find_tile(pages, begin, stop, C)
    fetch_digits(smem, stage, pages, tile, KEY, 1, C)
    async_copy.commit_group()
    fetch_digits(smem, stage, pages, tile, VALUE, 2, C)
    async_copy.commit_group()
    exponents = load_exponents(pages, tile, C)
    for t in range(begin, stop, C.tile):
        fine = as_fine(tile, exponents, C)
        tile = find_tile(pages, t + C.tile, stop, C)
        async_copy.wait_group(1)
        scores = (score_wide if C.wide else score)(smem, stage, t, query, C)
        if KEY.digits > 0:  # noqa: SIM102 - a constant of the launch
            if fine.there:
                scores = (refine_score_wide if C.wide else refine_score)(scores, smem, stage, query, fine, C)
        if C.softcap:
            scores = capped(scores, query, split.softcap)
        fetch_side(smem, stage, pages, tile, KEY, 1, C)
        async_copy.commit_group()
        exponents = load_exponents(pages, tile, C)
        async_copy.wait_group(1)
        scores, limits = hide(scores, smem.meta.index(stage), t, split, C)
        state, p = (accumulate_wide if C.wide else accumulate)(scores, unit, limits, smem, stage, state, C)
        if VALUE.digits > 0:  # noqa: SIM102 - a constant of the launch
            if fine.there:
                state = (refine_wide if C.wide else refine)(p, limits, smem, stage, state, fine, C)
        fetch_side(smem, stage, pages, tile, VALUE, 2, C)
        async_copy.commit_group()
    return state


@gluon.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    rotated_ptr, sums_ptr, units_ptr, apart_ptr, level_ptr, cache_ptr, residuals_ptr, newest_ptr, table_ptr,
    splits_ptr, starts_ptr, spans_ptr, bases_ptr, out_ptr, lse_ptr,
    page_stride, head_stride, table_stride, softcap, C: gl.constexpr,
):  # fmt: skip
    """Attend in one split of the plan, for `take` queries of a KV head, with one warp.

    Grid (cdiv(most rows of a sequence * ratio, take), kv_heads, splits). A row is a query token. Without `several` each
    sequence has one row. With `several` the last row attends to all tokens of the sequence, and each earlier row to one
    token less.

    rotated, sums, units, apart, level: queries, see `launch.pages.Plan`.
    cache: packed pages.
    residuals, newest: the tensors of `Residuals`; not read without residuals.
    table: int32 [sequences, blocks].
    splits: from `schedule`.
    spans, bases: from `schedule`; read only with `several`.
    starts: int32 [sequences + 1], the first row of each sequence; read only with `several`.
    out, lse: results, written to `partial` and `lse` of the `Plan`.
    C: a `DecodeConfig`.
    """
    STAGES: gl.constexpr = C.stages
    TILE: gl.constexpr = C.tile
    if C.overlap:
        gdc_launch_dependents()
    first = gl.program_id(0) * C.take if C.several or C.ratio > C.take else 0
    head = gl.program_id(1)
    heads = gl.num_programs(1)
    smem = allocate(C)
    base = cache_ptr + head.to(gl.int64) * head_stride
    split = gl.program_id(2)
    sequence = gl.load(splits_ptr + 4 * split)
    start = gl.load(splits_ptr + 4 * split + 1)
    end = gl.load(splits_ptr + 4 * split + 2)
    length = gl.load(splits_ptr + 4 * split + 3)
    row = sequence
    result = split
    rows = 1
    if C.several:
        owner = gl.maximum(sequence, 0)
        row = gl.load(starts_ptr + owner)
        rows = gl.load(starts_ptr + owner + 1) - row
        result = gl.load(bases_ptr + owner) + (split - gl.load(spans_ptr + 2 * owner)) * rows
        sequence = gl.where(first < rows * C.ratio, sequence, -1)
    if sequence >= 0:
        start = gl.multiple_of(start, TILE)
        count = gl.minimum(rows * C.ratio - first, C.take)
        # In the recent window, residual digits use the buffers of later tiles. So prefetch only up to its first tile.
        plain = end
        ahead = end
        if C.residuals > 0:
            older = (length + (C.key_side.page - 1)) // C.key_side.page - gl.load(newest_ptr)
            recent = gl.maximum(older, 0) * C.key_side.page
            plain = gl.minimum(gl.maximum(recent, start), (end + (TILE - 1)) // TILE * TILE)
            ahead = gl.minimum(plain + 1, end)
        ends = ()
        if C.several:
            after = gl.maximum(rows - 1 - (first + gl.arange(0, C.queries, COLS)) // C.ratio, 0)
            ends = length - after
            length = length - rows + 1
        pages = Pages(
            base=base, blocks=table_ptr + sequence.to(gl.int64) * table_stride, stride=page_stride,
            residuals=residuals_ptr,
        )  # fmt: skip
        work = Split(pages=pages, softcap=softcap, end=end, ahead=ahead, length=length, ends=ends)
        # `store` may still be writing two tokens: this sequence's last one, and the one before it, which another
        # sequence that shares the block stores in this step. Copy earlier tiles without waiting for `store`.
        settled = gl.minimum(end - 1 - C.tile, ahead)
        blocks = ()
        for i in gl.static_range(STAGES - 1):
            t = start + i * C.tile
            blocks = blocks + (gl.load(pages.blocks + t // C.key_side.page, mask=t < ahead, other=0),)
            if t < settled:
                fetch_tile(smem, i, pages, blocks[i], t, C)
        if C.overlap:
            gdc_wait()
        at = (row * heads + head).to(gl.int64) * C.ratio + (0 if C.several else first)
        source = Source(
            rotated=rotated_ptr, sums=sums_ptr, units=units_ptr, apart=apart_ptr, level=level_ptr, at=at, first=first,
            count=count, stride=heads * C.ratio,
        )  # fmt: skip
        shared = ()
        if C.wide:
            shared = allocate_queries(C)
            fetch_queries(shared, source, C)
        for i in gl.static_range(STAGES - 1):
            t = start + i * C.tile
            if (t >= settled) & (t < ahead):
                fetch_tile(smem, i, pages, blocks[i], t, C)
            async_copy.commit_group()
        query = load_wide_query(shared, source, C) if C.wide else load_query(source, C)
        stage, state = attend(query, smem, start, plain, work, C)
        if C.residuals > 0:  # noqa: SIM102 - a constant of the launch
            if plain < end:
                state = attend_refined(query, smem, stage, state, plain, end, work, C)
        async_copy.wait_group(0)
        at = (result * heads + head).to(gl.int64) * C.ratio + (0 if C.several else first)
        (write_wide if C.wide else write)(out_ptr + at * C.dim, lse_ptr + at, source, state, C)
    elif C.overlap:  # later kernels rely on this: when this kernel ends, all earlier writes are visible
        gdc_wait()
