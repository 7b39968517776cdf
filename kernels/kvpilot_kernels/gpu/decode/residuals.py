"""Recent window of decode: copy digits and load exponents from the residual pages of a tile's block.

`kvpilot_formats.layouts` describes these pages, and a map finds them (`kvpilot_kernels.residuals`). A residual has
digits of b bits, which are packed and multiplied like codes. A block has residuals for all of its tokens or for none,
so a whole tile is refined or not.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.decode.smem import buffers, copy_to_shared, fetch_codes, fetch_meta, row_of_copies
from kvpilot_kernels.gpu.layout.mma import ROWS, chunk_words, chunks

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""Layout in which each loaded exponent has its own register, so that the program waits only at its first use."""


Tile = namedtuple("Tile", "live block pages place")
"""Place of a tile in the recent window.

Attributes:
    live: False if the tile is past the end of the split.
    block: the tile's block.
    pages: the block's residual pages, 0 for none.
    place: offset of the tile's first token in the block.
"""


Fine = namedtuple("Fine", "there exponents")
"""Residuals of a tile.

Attributes:
    there: True if the tile's block has residual pages.
    exponents: exponents of all groups, two bits each, keys' groups first: uint32 [tile]; arbitrary unless `there`.
"""


@gluon.jit
def find_tile(pages, t, end, C: gl.constexpr):
    """Return the `Tile` of tokens [t, t + tile). It is not live if t >= `end`."""
    PAGES: gl.constexpr = C.residuals
    TILE: gl.constexpr = C.tile
    block = gl.load(pages.blocks + t // C.key_side.page, mask=t < end, other=0)
    found = ()
    for i in gl.static_range(PAGES):
        found = found + (gl.load(pages.residuals + (block * PAGES + i)),)
    return Tile(live=t < end, block=block, pages=found, place=gl.multiple_of(t % C.key_side.page, TILE))


@gluon.jit
def fetch_side(smem, stage, pages, tile, SIDE: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Start copying a tile's codes, scale metadata and digits into `stage`: of keys if SIZE is 1, otherwise of values.

    SIZE is the number of bytes of an element in shared memory.
    """
    HALF: gl.constexpr = C.groups * C.tile
    if tile.live:
        page = pages.base + tile.block.to(gl.int64) * pages.stride
        fetch_codes(smem.key if SIZE == 1 else smem.value, stage, page, tile.place, SIDE, SIZE, C)
        meta = smem.meta.index(stage).slice(0 if SIZE == 1 else HALF, HALF)
        fetch_meta(meta, page, tile.place, SIDE, C.groups, C)
    fetch_digits(smem, stage, pages, tile, SIDE, SIZE, C)


@gluon.jit
def fetch_digits(smem, stage, pages, tile, SIDE: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Start copying a tile's digits into the buffers after `stage`, if its block has residual pages.

    The other arguments are those of `fetch_side`.
    """
    DIGITS: gl.constexpr = SIDE.digits
    WIDTH: gl.constexpr = 2 * chunk_words(SIDE) // SIZE
    ROW: gl.constexpr = SIDE.row // SIZE
    buffer = smem.key if SIZE == 1 else smem.value
    if tile.pages[0] > 0:
        token, element = row_of_copies(SIDE, C.tile, SIZE)
        rows = (pages.base + SIDE.digit_codes).to(gl.pointer_type(gl.int8 if SIZE == 1 else gl.uint16))
        row = first_elements(pages, tile, token, ROW, SIZE, C)
        for i in gl.static_range(DIGITS):
            at = digit_buffer(stage, i, SIDE, C) * chunks(SIDE)
            for c in gl.static_range(chunks(SIDE)):
                if C.wide:  # one offset for all chunks saves registers
                    digit = rows + (i * SIDE.residual * ROW + c * WIDTH)
                    copy_to_shared(buffer.index(at + c), digit + (row[:, None] + element[None, :]))
                else:
                    to = row[:, None] + (element[None, :] + (i * SIDE.residual * ROW + c * WIDTH))
                    copy_to_shared(buffer.index(at + c), rows + to)


@gluon.jit
def digit_buffer(stage, i: gl.constexpr, SIDE: gl.constexpr, C: gl.constexpr):
    """Return the shared-memory buffer for digit i of the tile at `stage`.

    The digits use the buffers after the tile's own. These held tiles before the recent window, and are free by now.
    """
    return (stage + 1 + i) % buffers(SIDE, C.stages, C.residuals)


@gluon.jit
def first_elements(pages, tile, token, ROW: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Return where each token's row in its residual page begins, in elements of SIZE bytes from the first page on.

    `token` counts from the tile's first token. A row has ROW elements.
    """
    TOKENS: gl.constexpr = C.key_side.residual
    PAGES: gl.constexpr = C.residuals
    place = tile.place + token
    page = tile.pages[0]
    row = place
    for i in gl.static_range(1, PAGES):
        page = gl.where(place >= i * TOKENS, tile.pages[i], page)
        row = gl.where(place >= i * TOKENS, place - i * TOKENS, row)
    # Pages are a multiple of 16 bytes long, and rows of 8. Without `multiple_of(..., [1])`, Triton wrongly assumes that
    # `row` is a multiple of 8. It then copies 16 bytes at once, even from rows of 24 bytes.
    row = gl.multiple_of(row, [1]) if PAGES > 1 else row
    return page.to(gl.int64) * (pages.stride // 16 * (16 // SIZE)) + row * ROW


@gluon.constexpr_function
def first_group(C):
    """Return the first group whose exponents are needed: keys' groups come first, but keys of 8 bits need none."""
    return 0 if C.key_side.digits else C.groups


@gluon.jit
def load_exponents(pages, tile, C: gl.constexpr):
    """Load the exponents of a tile's residuals: uint16 [tile] for each group from `first_group` on."""
    FIRST: gl.constexpr = first_group(C)
    END: gl.constexpr = 2 * C.groups
    token = gl.arange(0, C.tile, LANES)
    rows = (pages.base + C.key_side.residual_meta).to(gl.pointer_type(gl.uint16))
    rows += first_elements(pages, tile, token, 1, 2, C)
    exponents = ()
    for g in gl.static_range(FIRST, END):
        exponents = exponents + (gl.load(rows + g * C.key_side.residual),)
    return exponents


@gluon.jit
def as_fine(tile, exponents, C: gl.constexpr):
    """Return the `Fine` of a tile whose exponents were loaded."""
    FIRST: gl.constexpr = first_group(C)
    packed = (exponents[0].to(gl.uint32) & 3) << 2 * FIRST
    for i in gl.static_range(1, len(exponents)):
        packed = packed | ((exponents[i].to(gl.uint32) & 3) << 2 * (FIRST + i))
    return Fine(there=tile.pages[0] > 0, exponents=gl.convert_layout(packed, ROWS))


@gluon.jit
def fine_scale(fine, g: gl.constexpr, BITS: gl.constexpr):
    """Return the scale of group g's residuals relative to that of its codes, float32 [tile]: 2^e / m as in `layouts`.

    This function builds the bits of the float32 directly.
    """
    return ((((fine.exponents >> 2 * g) & 3) + (127 + BITS - 8)) << 23).to(gl.float32, bitcast=True)
