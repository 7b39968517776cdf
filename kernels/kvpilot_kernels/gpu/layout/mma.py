"""Operands of decode's two matrix products: their MMA layouts, planes of codes, and the order of queries in columns.

Keys are signed bytes for m16n8k32. Values are 16-bit words for m16n8k16 in float16. A row of packed codes is cut into
chunks, each the operand of one product. A plane is the set of codes that one AND extracts from all bytes, or words, of
a chunk. Its sub-plane is the place of these codes in a byte, counted from the low bits.

Tensor cores take 8 columns at once, but models often have 4 query heads per KV head. So in the first product query i
has two columns: 2 i with the upper bytes of its 16-bit integers, and 2 i + 1 with the lower bytes. A thread holds the
sums of both columns and adds them. Then each thread has its own query. With 4 queries or more no column is empty.

The second product has 8 columns. `movmatrix` makes its right operand from the registers after the first product. It
transposes blocks of 8 x 8 numbers, and the two halves of a register become adjacent columns:

- With 8 queries (Q = 8), a register holds queries t and t + 4 of one token. Column 2 t + h is query t + 4 h.
- With 16 queries, the second 8 columns are the second 8 queries in the same order.
- With 4 queries, a register holds two tokens that are 8 apart. Of 16 tokens, a query's even column has the first 8 and
  its odd column the last 8. The other half of each column is zero. A query's two columns are added at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
KEYS = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
QUERIES = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 4))
VALUES = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
SCORES = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0]))
"""Layout of a product after adjacent columns were summed. Thread t of four threads has columns t, t + 4, ..."""
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
COLS = gl.constexpr(gl.SliceLayout(0, SCORES.value))


@gluon.constexpr_function
def value_planes(side):
    """Return the planes of a row as (chunk, sub-plane, odd, group). All words of a chunk and plane are in one group.

    Word w of chunk c holds element sub * row + 2 * (c * chunk_words + w) + odd.
    """
    words = chunk_words(side)
    return tuple(
        (c, sub, odd, (sub * side.row + 2 * c * words) // side.group)
        for c in range(chunks(side))
        for sub in range(8 // side.bits)
        for odd in range(2)
    )


@gluon.constexpr_function
def key_planes(side):
    """Return the planes of a row as (chunk, sub-plane, group, first bit, shifted, factor).

    Byte b of chunk c holds element sub * row + 2 * c * chunk_words + b. If `shifted` is True, the byte's upper half is
    first moved down. Then the code begins at `first bit`. So the byte is read as the code times
    `factor` * 2^`key_shift`. All planes of a group have the same `key_shift`, but the factor may be 1 or 4. So `store`
    divides queries by the factor.
    """
    planes = ()
    for c in range(chunks(side)):
        for sub in range(8 // side.bits):
            g = (sub * side.row + 2 * c * chunk_words(side)) // side.group
            shift = key_shift(side, g)
            shifted = side.bits * sub - shift >= 4
            first = side.bits * sub - 4 * shifted
            planes += ((c, sub, g, first, shifted, 1 << first - shift),)
    return planes


@gluon.constexpr_function
def key_shift(side, g):
    """Return the bit at which the first element of group g begins in its byte."""
    return side.bits * (g * side.group // side.row)


@gluon.constexpr_function
def is_signed(side, g):
    """Return True if some codes of group g end at a byte's sign bit, so that they are read 128 too low."""
    return any(first + side.bits == 8 for _, _, at, first, _, _ in key_planes(side) if at == g)


@gluon.constexpr_function
def chunk_words(side):
    """Return the number of words of a chunk."""
    return min(side.row // 2, side.group // 2)


@gluon.constexpr_function
def padded(words):
    """Return how many words a tile loads for a chunk: a power of two, at least 16 (an MMA's depth).

    The words past the chunk are unused.
    """
    return 16 if words <= 16 else 32


@gluon.constexpr_function
def chunks(side):
    """Return the number of chunks of a row."""
    return side.row // 2 // chunk_words(side)


@gluon.jit
def join_bytes(sums, TILE: gl.constexpr, Q: gl.constexpr):
    """Add the products with the queries' upper and lower bytes, int32 [TILE, 2 Q], to float32 [TILE, Q]."""
    upper, lower = gl.split(gl.reshape(sums, [TILE, Q, 2]))
    return gl.convert_layout((upper * 256 + lower).to(gl.float32), SCORES, assert_trivial=True)


@gluon.jit
def transpose_blocks(x):
    """Transpose each 8 x 8 block of float16 that a warp holds in one register per thread, two numbers each."""
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
    """Return the product of values and probabilities as [WIDE, Q], with one column per query.

    `x` is this product as the MMA returns it: [WIDE, 8], or for 16 queries [WIDE, 16].
    """
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
