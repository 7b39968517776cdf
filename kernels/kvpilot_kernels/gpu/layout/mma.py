"""Order of queries in the columns of decode's two matrix products.

Tensor cores take 8 columns at once, but models often have 4 query heads per KV head. So in the first product query i
has two columns: 2 i with the upper bytes of its 16-bit integers, and 2 i + 1 with the lower bytes. A thread holds the
sums of both columns and adds them. Then each thread has its own query. With 4 queries or more no column is empty.

The second product has 8 columns. `movmatrix` makes its right operand from the registers after the first product. It
transposes blocks of 8 x 8 numbers, and the two halves of a register become adjacent columns:

- With 8 queries (Q = 8), a register holds queries t and t + 4 of one token. Column 2 t + h is query t + 4 h.
- With 16 queries, the second 8 columns are the second 8 queries in the same order.
- With 4 queries, a register holds two tokens that are 8 apart. Of 16 tokens, a query's even column has the first 8 and
  its odd column the last 8. The other half of each column is zero. A query's two columns are added at the end.

In a step with several query tokens of a sequence (SEVERAL), a KV head's queries are in the order of the tokens. In
memory, the queries of other KV heads lie between the queries of two tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.layout.unpack import (
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
    """Return the offset in memory of query `first` + n of a KV head.

    It counts queries from query `first`, or with SEVERAL from query 0 of the sequence. `stride` is the number of
    queries from one token of the sequence to the next.
    """
    return (first + n) // RATIO * stride + (first + n) % RATIO if SEVERAL else n


@gluon.jit
def load_query(rotated_ptr, sums_ptr, units_ptr, apart_ptr, level_ptr, first, count, stride, KEY: gl.constexpr,
               D: gl.constexpr, GROUP: gl.constexpr, RATIO: gl.constexpr, Q: gl.constexpr, LEVEL: gl.constexpr,
               SEVERAL: gl.constexpr):  # fmt: skip
    """Load `count` queries of a KV head into registers, as the integers that `store` wrote.

    Returns:
        The queries, int8 [bytes, 2 Q] for each plane.
        The initial sums and the effect of zero points, for each group, from `load_sums`.
        The unit and the offsets of scores, from `load_units`.
    """
    PLANES: gl.constexpr = key_planes(KEY.bits, D, GROUP)
    WORDS: gl.constexpr = chunk_words(KEY.bits, D, GROUP)
    byte = gl.arange(0, 2 * padded(WORDS), gl.SliceLayout(1, QUERIES))[:, None]
    n = gl.arange(0, 2 * Q, gl.SliceLayout(0, QUERIES))[None, :]
    row = (place_of(n // 2, first, stride, RATIO, SEVERAL) * 2 + n % 2) * D
    operands = ()
    for i in gl.static_range(len(PLANES)):
        at = PLANES[i][1] * KEY.row + 2 * PLANES[i][0] * WORDS + byte
        operands = operands + (
            gl.load(rotated_ptr + (row + at), mask=(n // 2 < count) & (byte < 2 * WORDS), other=0),
        )  # fmt: skip
    starts = ()
    zeros = ()
    for g in gl.static_range(D // GROUP):
        start, zero = load_sums(sums_ptr, first, count, stride, g, KEY.bits, D, GROUP, RATIO, Q, SEVERAL)
        starts = starts + (start,)
        zeros = zeros + (zero * 2 ** key_shift(KEY.bits, D, GROUP, g),)
    unit, apart, level = load_units(units_ptr, apart_ptr, level_ptr, first, count, stride, RATIO, Q, LEVEL, SEVERAL)
    return operands, starts, zeros, unit, apart, level


@gluon.jit
def load_sums(sums_ptr, first, count, stride, g: gl.constexpr, BITS: gl.constexpr, D: gl.constexpr,
              GROUP: gl.constexpr, RATIO: gl.constexpr, Q: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Load a group's initial sums, int32 [2 Q], and the effect of its zero points, float32 [Q].

    The initial sums, in the columns of the first product, correct for codes that are read 128 too low. The effect is
    the number that a zero code of 1 subtracts from a product, in units of UNIT.
    """
    sums_ptr += 3 * g
    column = gl.arange(0, 2 * Q, gl.SliceLayout(0, MMA))
    place = place_of(column // 2, first, stride, RATIO, SEVERAL) * (3 * (D // GROUP)) + column % 2
    start = gl.load(sums_ptr + place, mask=column // 2 < count, other=0) * 128
    i = gl.arange(0, Q, COLS)
    place = place_of(i, first, stride, RATIO, SEVERAL) * (3 * (D // GROUP)) + 2
    total = gl.load(sums_ptr + place, mask=i < count, other=0)
    return start, total.to(gl.float32) * (zero_unit(BITS) / UNIT)


@gluon.jit
def load_units(units_ptr, apart_ptr, level_ptr, first, count, stride, RATIO: gl.constexpr, Q: gl.constexpr,
               LEVEL: gl.constexpr, SEVERAL: gl.constexpr):  # fmt: skip
    """Load the units of `count` queries and the offsets of their scores, float32 [Q] each.

    Returns:
        The unit: the value of a query's integer 1. It is NaN if the query has a NaN.
        The offset of the score of the sequence's first token, in this unit.
        The offset of all scores, in this unit; 0 without LEVEL.
    """
    i = gl.arange(0, Q, COLS)
    place = place_of(i, first, stride, RATIO, SEVERAL)
    unit = gl.load(units_ptr + place, mask=i < count, other=1.0)
    apart = gl.load(apart_ptr + place, mask=i < count, other=0.0)
    level = gl.full([Q], 0.0, gl.float32, COLS)
    if LEVEL:
        level = gl.load(level_ptr + place, mask=i < count, other=0.0)
    return unit, apart / unit, level / unit


@gluon.jit
def join_bytes(sums, TILE: gl.constexpr, Q: gl.constexpr):
    """Add the products with the queries' upper and lower bytes, int32 [TILE, 2 Q], to float32 [TILE, Q]."""
    upper, lower = gl.split(gl.reshape(sums, [TILE, Q, 2]))
    return gl.convert_layout((upper * 256 + lower).to(gl.float32), SCORES, assert_trivial=True)


@gluon.jit
def transpose_blocks(x):
    """Transpose each block of 8 x 8 that a register of a warp holds, two float16 a thread."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def keep(x, mask):
    """Return the bits of float16 x that are set in `mask`."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def to_right(x, TILE: gl.constexpr, Q: gl.constexpr):
    """Return float16 [TILE, Q] as a right operand in the module's order of columns: 16 columns for Q = 16, else 8."""
    x = transpose_blocks(x)
    # A thread's row and column become the operand's column and row; the other indices stay.
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
    """Return float32 [Q], one number per query, in the columns of the second product."""
    if Q == 4:
        x = gl.reshape(gl.join(x, x), [8])
    else:
        x = gl.reshape(gl.permute(gl.reshape(x, [Q // 8, 2, 4]), [0, 2, 1]), [Q])
    return gl.convert_layout(x, gl.SliceLayout(0, MMA), assert_trivial=True)


@gluon.jit
def by_queries(x, WIDE: gl.constexpr, Q: gl.constexpr):
    """Return a second product, [WIDE, 8] or for 16 queries [WIDE, 16], as [WIDE, Q] with one column per query."""
    if Q == 4:
        first, last = gl.split(gl.reshape(x, [WIDE, 4, 2]))
        x = first + last
    else:
        x = gl.reshape(gl.permute(gl.reshape(x, [WIDE, Q // 8, 4, 2]), [0, 1, 3, 2]), [WIDE, Q])
    return gl.convert_layout(x, SCORES, assert_trivial=True)


@gluon.jit
def over_own_rows(x, TILE: gl.constexpr, Q: gl.constexpr):
    """Sum the rows of x [TILE, Q] that a thread holds, and return [8, Q]."""
    return gl.convert_layout(gl.sum(gl.reshape(x, [TILE // 8, 8, Q]), 0), SCORES, assert_trivial=True)
