"""Load a program's queries, which `store` wrote as integers, into registers.

In a step with several query tokens per sequence (`several`), a program's queries are sorted by token. They are not
adjacent in memory, because between two tokens lie the queries of other KV heads.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.layout.mma import COLS, MMA, QUERIES, chunk_words, key_planes, key_shift, padded
from kvpilot_kernels.gpu.layout.unpack import UNIT, zero_unit

Source = namedtuple("Source", "rotated sums units apart level at first count stride")
"""Location of a program's queries in the output of `store`.

The first five fields are pointers, the others count queries. A query is one query head of one token.

Attributes:
    at: place of the KV head's first query in the sequence's first row; without `several`, of the program's first query.
    first: first query of the program, counted over all rows of the sequence.
    count: number of the program's queries.
    stride: number of queries from one token of the sequence to the next.
"""


Query = namedtuple("Query", "operands starts zeros unit apart level")
"""Queries as operands. With heads of 512 elements the first three are in shared memory (`head512`).

Attributes:
    operands: int8 [bytes, 2 queries] for each plane.
    starts: int32 [2 queries] for each group, initial values of the accumulators. They make up for codes that are read
        128 too low (`unpack.keep_in_bytes`).
    zeros: float32 [queries] for each group, amount that a stored zero point of 1 subtracts from a score.
    unit: float32 [queries], number that the integer 1 of a query stands for; NaN if the query has a NaN.
    apart: float32 [queries], amount to add to the score of the sequence's first token, in multiples of `unit`.
    level: float32 [queries], amount to add to all scores, in multiples of `unit`; 0 without a soft cap.
"""


@gluon.jit
def place_of(n, source, C: gl.constexpr):
    """Return the offset of the program's query n from `Source.at`, counted in queries."""
    return (source.first + n) // C.ratio * source.stride + (source.first + n) % C.ratio if C.several else n


@gluon.jit
def at_program(source, C: gl.constexpr):
    """Return the `Source` with its pointers advanced to query `at`."""
    return Source(
        rotated=source.rotated + source.at * (2 * C.dim), sums=source.sums + source.at * (3 * C.groups),
        units=source.units + source.at, apart=source.apart + source.at, level=source.level + source.at, at=source.at,
        first=source.first, count=source.count, stride=source.stride,
    )  # fmt: skip


@gluon.jit
def load_query(source, C: gl.constexpr):
    """Load a program's `Query` into registers."""
    GROUPS: gl.constexpr = C.groups
    KEY: gl.constexpr = C.key_side
    source = at_program(source, C)
    PLANES: gl.constexpr = key_planes(KEY)
    WORDS: gl.constexpr = chunk_words(KEY)
    byte = gl.arange(0, 2 * padded(WORDS), gl.SliceLayout(1, QUERIES))[:, None]
    n = gl.arange(0, 2 * C.queries, gl.SliceLayout(0, QUERIES))[None, :]
    row = (place_of(n // 2, source, C) * 2 + n % 2) * C.dim
    operands = ()
    for i in gl.static_range(len(PLANES)):
        at = PLANES[i][1] * KEY.row + 2 * PLANES[i][0] * WORDS + byte
        operands = operands + (
            gl.load(source.rotated + (row + at), mask=(n // 2 < source.count) & (byte < 2 * WORDS), other=0),
        )  # fmt: skip
    starts = ()
    zeros = ()
    for g in gl.static_range(GROUPS):
        start, zero = load_sums(source, g, C)
        starts = starts + (start,)
        zeros = zeros + (zero * 2 ** key_shift(KEY, g),)
    unit, apart, level = load_units(source, C)
    return Query(operands=operands, starts=starts, zeros=zeros, unit=unit, apart=apart, level=level)


@gluon.jit
def load_sums(source, g: gl.constexpr, C: gl.constexpr):
    """Load a group's initial sums, int32 [2 queries], and the effect of its zero points, float32 [queries].

    The initial sums have the column order of the first product. The effect is the number that a zero code of 1
    subtracts from a product, in units of UNIT.
    """
    sums_ptr = source.sums + 3 * g
    column = gl.arange(0, 2 * C.queries, gl.SliceLayout(0, MMA))
    place = place_of(column // 2, source, C) * (3 * C.groups) + column % 2
    start = gl.load(sums_ptr + place, mask=column // 2 < source.count, other=0) * 128
    i = gl.arange(0, C.queries, COLS)
    place = place_of(i, source, C) * (3 * C.groups) + 2
    total = gl.load(sums_ptr + place, mask=i < source.count, other=0)
    return start, total.to(gl.float32) * (zero_unit(C.key_side.bits) / UNIT)


@gluon.jit
def load_units(source, C: gl.constexpr):
    """Load the `unit`, `apart` and `level` of a `Query`."""
    i = gl.arange(0, C.queries, COLS)
    place = place_of(i, source, C)
    unit = gl.load(source.units + place, mask=i < source.count, other=1.0)
    apart = gl.load(source.apart + place, mask=i < source.count, other=0.0)
    level = gl.full([C.queries], 0.0, gl.float32, COLS)
    if C.softcap:
        level = gl.load(source.level + place, mask=i < source.count, other=0.0)
    return unit, apart / unit, level / unit
