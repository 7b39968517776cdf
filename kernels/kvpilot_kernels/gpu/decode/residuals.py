"""Residuals of decode: copy the digits and load the exponents of a tile from its block's residual pages.

`kvpilot_formats.layouts` describes these pages, and a map finds them (`kvpilot_kernels.residuals`). A residual has
digits of b bits, which are packed and multiplied like codes. In a block without residual pages every exponent is NONE,
whose scale is 0. The buffers of the digits then keep old codes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.decode.smem import buffers, copy_to_shared, row_of_copies
from kvpilot_kernels.gpu.layout.mma import ROWS, chunk_words, chunks

NONE = gl.constexpr(3)


@gluon.jit
def digit_buffer(stage, i: gl.constexpr, SIDE: gl.constexpr, C: gl.constexpr):
    """Return the shared-memory buffer for residual digit i of the tile at `stage`.

    The digits use the buffers after the tile's own. These held tiles before the recent window, and are free by now.
    """
    return (stage + 1 + i) % buffers(SIDE, C.stages, C.residuals)


@gluon.jit
def fetch_residuals(smem, stage, pages, t, end, C: gl.constexpr):
    """Start copying the residual digits of tokens [t, t + tile), for the tile at `stage`. Return their exponents.

    The exponents of all groups are packed, two bits each, keys' groups first: uint32 [tile]. They are NONE if the
    tokens have no residuals, or if t >= `end`.
    """
    KEY: gl.constexpr = C.key_side
    GROUPS: gl.constexpr = C.groups
    PAGES: gl.constexpr = C.residuals
    TILE: gl.constexpr = C.tile
    DIGITS: gl.constexpr = (KEY.digits, C.value_side.digits)
    block = gl.load(pages.blocks + t // KEY.page, mask=t < end, other=0)
    found = ()
    for i in gl.static_range(PAGES):
        found = found + (gl.load(pages.residuals + (block * PAGES + i)),)
    place = gl.multiple_of(t % KEY.page, TILE)
    if found[0] > 0:
        fetch_digits(smem.key, stage, pages, found, place, KEY, 1, C)
        fetch_digits(smem.value, stage, pages, found, place, C.value_side, 2, C)
    token = gl.arange(0, TILE, gl.BlockedLayout([max(1, TILE // 32)], [32], [1], [0]))
    rows = (pages.base + KEY.residual_meta).to(gl.pointer_type(gl.uint16))
    rows += row_of_residual(pages, found, place + token, 1, 2, C)
    packed = (token * 0).to(gl.uint32)
    for g in gl.static_range(2 * GROUPS):
        if DIGITS[g // GROUPS] > 0:
            exponent = gl.load(rows + g * KEY.residual, mask=(found[0] > 0) & (token >= 0), other=NONE)
            packed = packed | ((exponent.to(gl.uint32) & 3) << 2 * g)
    return gl.convert_layout(packed, ROWS)


@gluon.jit
def row_of_residual(pages, found, place, ROW: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Return where the rows of ROW elements of a block's tokens begin in its residual pages, relative to page 0.

    Args:
        found: the block's residual pages.
        place: place of each token in the block.
        SIZE: bytes of an element.
    """
    TOKENS: gl.constexpr = C.key_side.residual
    PAGES: gl.constexpr = C.residuals
    page = found[0]
    row = place
    for i in gl.static_range(1, PAGES):
        page = gl.where(place >= i * TOKENS, found[i], page)
        row = gl.where(place >= i * TOKENS, place - i * TOKENS, row)
    # Pages are a multiple of 16 bytes long, and rows of 8. Without `multiple_of(..., [1])`, Triton wrongly assumes that
    # rows are a multiple of 8. It then copies 16 bytes at once, even from rows of 24 bytes.
    row = gl.multiple_of(row, [1]) if PAGES > 1 else row
    return page.to(gl.int64) * (pages.stride // 16 * (16 // SIZE)) + row * ROW


@gluon.jit
def fetch_digits(buffer, stage, pages, found, place, SIDE: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Start copying the residual digits of a tile's keys or values (SIDE), whose first token has this `place`."""
    DIGITS: gl.constexpr = SIDE.digits
    WIDTH: gl.constexpr = 2 * chunk_words(SIDE) // SIZE
    token, element = row_of_copies(SIDE, C.tile, SIZE)
    if SIZE == 1:
        rows = (pages.base + SIDE.digit_codes).to(gl.pointer_type(gl.int8))
    else:
        rows = (pages.base + SIDE.digit_codes).to(gl.pointer_type(gl.uint16))
    row = row_of_residual(pages, found, place + token, SIDE.row // SIZE, SIZE, C)
    for i in gl.static_range(DIGITS):
        at = digit_buffer(stage, i, SIDE, C) * chunks(SIDE)
        for c in gl.static_range(chunks(SIDE)):
            if C.wide:  # one offset for all chunks saves registers
                digit = rows + (i * SIDE.residual * (SIDE.row // SIZE) + c * WIDTH)
                copy_to_shared(buffer.index(at + c), digit + (row[:, None] + element[None, :]))
            else:
                to = row[:, None] + (element[None, :] + (i * SIDE.residual * (SIDE.row // SIZE) + c * WIDTH))
                copy_to_shared(buffer.index(at + c), rows + to)


@gluon.jit
def fine_scale(exponents, g: gl.constexpr, BITS: gl.constexpr):
    """Return the scale of group g's residuals relative to that of its codes, float32 [tile]: 2^(e + BITS - 8), or 0."""
    e = (exponents >> 2 * g) & 3
    return (gl.where(e == NONE, 0, e + (127 + BITS - 8)) << 23).to(gl.float32, bitcast=True)
