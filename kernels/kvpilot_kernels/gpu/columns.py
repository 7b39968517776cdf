"""Columns of decode's matrix products: what of a query is in which, on the way in, between the two products, and out.

Tensor cores take 8 queries at a time, and models have 4 to a KV head. So the first product has a query in two
neighbouring columns, 2 i and 2 i + 1, as the upper and the lower byte of an integer of 16 bits: a thread holds both
sums and adds them. Of what follows each thread has a query of its own, and no column is empty down to 4 queries.

The second product has 8 columns. Its right operand is the transpose of what threads hold after the first, by blocks of
8 tokens and 8 numbers: `movmatrix` takes the two halves of a register as neighbouring columns, so that

- of 8 queries (Q = 8), where a register holds queries t and t + 4 of one token, column 2 t + h is query t + 4 h;
- of 16, the second 8 columns are the same for the second 8 queries;
- of 4 (Q = 4), where it holds two tokens that are 8 apart, even columns are a query's first 8 of 16 tokens, and odd
  ones its last 8. The other half of each column is zero, and a query's two columns are added at the end.

In a step with several tokens of a sequence (SEVERAL), its queries are those of all heads of its first token, then of
its second one, and so on; in memory other KV heads' are between them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.codec import LARGEST
from kvpilot_kernels.gpu.operands import (
    COLS,
    MMA,
    QUERIES,
    ROWS,
    SCORES,
    UNIT,
    WEIGHTS,
    chunk_words,
    key_planes,
    key_shift,
    padded,
    zero_unit,
)


@gluon.jit
def place_of(n, first, stride, RATIO: gl.constexpr, SEVERAL: gl.constexpr):
    """Where query `first` + n of a KV head is, in queries behind query `first`; with SEVERAL, behind query 0.

    stride: queries from a token of the sequence to its next one.
    """
    return (first + n) // RATIO * stride + (first + n) % RATIO if SEVERAL else n


@gluon.jit
def load_query(query_ptr, apart_ptr, level_ptr, first, count, stride, KEY: gl.constexpr, D: gl.constexpr,
               GROUP: gl.constexpr, RATIO: gl.constexpr, Q: gl.constexpr, LEVEL: gl.constexpr,
               SEVERAL: gl.constexpr):  # fmt: skip
    """`count` queries of a KV head, at their `place_of`, as integers, int8 [bytes, 2 Q] by plane, and what products
    with them need.

    An element x becomes round(x / factor / unit), which is at most LARGEST: off by half of its query's `unit` at most,
    or by two where the plane's factor is 4. That is 2^-16 or 2^-14 of the query's largest element, where a float16 is
    off by up to 2^-11 of the element itself. Products of integers are exact.

    Returns:
        By plane int8 [bytes, 2 Q]; by group what sums start with, int32 [2 Q], for codes that are less by 128; by group
        what a zero code takes off a product, float32 [Q], over UNIT; `unit`, float32 [Q], NaN where a query has one;
        in units what the score of the sequence's first token starts with, float32 [Q], and every score with LEVEL.
    """
    PLANES: gl.constexpr = key_planes(KEY.bits, D, GROUP)
    WORDS: gl.constexpr = chunk_words(KEY.bits, D, GROUP)
    byte = gl.arange(0, 2 * padded(WORDS), gl.SliceLayout(1, QUERIES))[:, None]
    n = gl.arange(0, 2 * Q, gl.SliceLayout(0, QUERIES))[None, :]
    elements = ()
    largest = gl.full([2 * Q], 1e-30, gl.float32, gl.SliceLayout(0, QUERIES))
    nothing = gl.full([2 * Q], 0.0, gl.float32, gl.SliceLayout(0, QUERIES))
    place = place_of(n // 2, first, stride, RATIO, SEVERAL)
    for i in gl.static_range(len(PLANES)):
        at = PLANES[i][1] * KEY.row + 2 * PLANES[i][0] * WORDS + byte
        x = gl.load(query_ptr + place * D + at, mask=(n // 2 < count) & (byte < 2 * WORDS), other=0.0)
        x = x.to(gl.float32) * (1.0 / PLANES[i][5])
        largest = gl.maximum(largest, gl.max(gl.maximum(x, -x), 0))
        nothing += gl.sum(x * 0.0, 0)  # or NaN
        elements = elements + (x,)
    per_unit = LARGEST / largest
    wholes = ()
    parts = ()
    operands = ()
    for i in gl.static_range(len(PLANES)):
        # Adding 1.5 * 2^23 rounds to integers.
        whole = ((elements[i] * per_unit[None, :] + 12582912.0) - 12582912.0).to(gl.int32)
        upper = (whole + 128) >> 8
        part = gl.where(n % 2 == 0, upper, whole - upper * 256)
        wholes = wholes + (whole,)
        parts = parts + (part,)
        operands = operands + (part.to(gl.int8),)
    starts = ()
    zeros = ()
    for g in gl.static_range(D // GROUP):
        total = gl.full([2 * Q], 0, gl.int32, gl.SliceLayout(0, QUERIES))
        start = gl.full([2 * Q], 0, gl.int32, gl.SliceLayout(0, QUERIES))
        for i in gl.static_range(len(PLANES)):
            if PLANES[i][2] == g:
                total += gl.sum(wholes[i], 0) * PLANES[i][5]
                if PLANES[i][3] + KEY.bits == 8:
                    start += gl.sum(parts[i], 0) * 128
        taken = total.to(gl.float32) * (zero_unit(KEY.bits) / UNIT * 2 ** key_shift(KEY.bits, D, GROUP, g))
        starts = starts + (gl.convert_layout(start, gl.SliceLayout(0, MMA)),)
        zeros = zeros + (even_columns(taken, Q),)
    unit = even_columns(largest * (1.0 / LARGEST) + nothing, Q)
    i = gl.arange(0, Q, COLS)
    place = place_of(i, first, stride, RATIO, SEVERAL)
    apart = gl.load(apart_ptr + place, mask=i < count, other=0.0)
    level = gl.full([Q], 0.0, gl.float32, COLS)
    if LEVEL:
        level = gl.load(level_ptr + place, mask=i < count, other=0.0)
    return operands, starts, zeros, unit, apart / unit, level / unit


@gluon.jit
def even_columns(x, Q: gl.constexpr):
    """[2 Q] of which neighbours are equal, as [Q]."""
    even, _ = gl.split(gl.reshape(gl.convert_layout(x, gl.SliceLayout(0, MMA)), [Q, 2]))
    return gl.convert_layout(even, COLS)


@gluon.jit
def join_bytes(sums, TILE: gl.constexpr, Q: gl.constexpr):
    """Sums of products with the upper and the lower bytes of queries, int32 [TILE, 2 Q], as float32 [TILE, Q]."""
    upper, lower = gl.split(gl.reshape(sums, [TILE, Q, 2]))
    return gl.convert_layout((upper * 256 + lower).to(gl.float32), SCORES, assert_trivial=True)


@gluon.jit
def transpose_blocks(x):
    """Swap rows and columns of each block of 8 x 8 that a register of a warp holds, two float16 a thread."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def keep(x, mask):
    """The bits of float16 x that are in `mask`."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def to_right(x, TILE: gl.constexpr, Q: gl.constexpr):
    """float16 [TILE, Q] as a product's right operand [TILE, 8], or 16 for 16, in the module's order of columns."""
    x = transpose_blocks(x)
    # What was a thread's row and column is now column and row of the operand; the rest keeps its place.
    if Q == 4:
        first = (gl.arange(0, TILE, ROWS)[:, None] % 2 == 0) & (gl.arange(0, Q, COLS)[None, :] >= 0)
        x = gl.join(
            keep(x, gl.where(first, 0xFFFF, 0).to(gl.uint16)), keep(x, gl.where(first, 0, 0xFFFF).to(gl.uint16))
        )
        x = gl.reshape(gl.permute(gl.reshape(x, [TILE // 16, 2, 8, 4, 2]), [0, 4, 3, 1, 2]), [TILE, 8])
    else:
        x = gl.reshape(gl.permute(gl.reshape(x, [TILE // 8, 8, Q // 8, 2, 4]), [0, 4, 3, 2, 1]), [TILE, Q])
    return gl.convert_layout(x, WEIGHTS, assert_trivial=True)


@gluon.jit
def by_columns(x, Q: gl.constexpr):
    """float32 [Q] of queries as that of the second product's columns."""
    if Q == 4:
        x = gl.reshape(gl.join(x, x), [8])
    else:
        x = gl.reshape(gl.permute(gl.reshape(x, [Q // 8, 2, 4]), [0, 2, 1]), [Q])
    return gl.convert_layout(x, gl.SliceLayout(0, MMA), assert_trivial=True)


@gluon.jit
def by_queries(x, WIDE: gl.constexpr, Q: gl.constexpr):
    """A second product, [WIDE, 8] or 16 for 16 queries, as that of queries, [WIDE, Q]."""
    if Q == 4:
        first, last = gl.split(gl.reshape(x, [WIDE, 4, 2]))
        x = first + last
    else:
        x = gl.reshape(gl.permute(gl.reshape(x, [WIDE, Q // 8, 4, 2]), [0, 1, 3, 2]), [WIDE, Q])
    return gl.convert_layout(x, SCORES, assert_trivial=True)


@gluon.jit
def over_own_rows(x, TILE: gl.constexpr, Q: gl.constexpr):
    """Sums over the rows of [TILE, Q] that a thread holds, [8, Q]."""
    return gl.convert_layout(gl.sum(gl.reshape(x, [TILE // 8, 8, Q]), 0), SCORES, assert_trivial=True)
