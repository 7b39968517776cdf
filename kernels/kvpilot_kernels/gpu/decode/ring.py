"""Recent window of decode: load residuals from the ring, and check that they belong to a tile's tokens.

`kvpilot_formats.layouts` describes the ring. A residual is stored as digits of b bits, which are packed and multiplied
like codes. A tag is a hash that identifies the residual's token. If the tags of a token differ from those in the ring,
its residual gets the scale 0.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.decode.smem import buffers, copy_to_shared, row_of_copies
from kvpilot_kernels.gpu.layout.mma import ROWS, chunk_words, chunks

Tags = namedtuple("Tags", "meta codes block")
"""Data for the check that the ring holds the residuals of a tile's tokens.

Attributes:
    meta: the ring's metadata, uint16 [tile] for each group, keys' groups first.
    codes: first 16 bits of a group's packed codes, which are hashed into its tag. uint16 [tile] for each of the first
        two groups of the key, then of the value.
    block: the ring's block of each token, [tile], or one for all tokens; negative for none.
"""


Fine = namedtuple("Fine", "exponents right seen")
"""Scales of the residuals of a tile's tokens.

Attributes:
    exponents: `Tags.meta`, which has the exponents of the residuals' scales; for heads of 512 elements the first
        result of `head512.pack_exponents`.
    right: True for tokens whose residual is in the ring (`is_refined`); for heads of 512 elements the second result of
        `head512.pack_exponents`.
    seen: bool [tile, queries], True if the token is in the query's recent window; () if each sequence has one query
        token.
"""


@gluon.jit
def digit_buffer(stage, i: gl.constexpr, SIDE: gl.constexpr, C: gl.constexpr):
    """Return the shared-memory buffer for residual digit i of the tile at `stage`.

    The digits use the buffers after the tile's own. These held tiles before the recent window, and are free by now.
    """
    return (stage + 1 + i) % buffers(SIDE, C.stages, True)


@gluon.jit
def block_of(ring, place, RING: gl.constexpr):
    """Return the ring's block that holds each place, [tile]. A place counts tokens from the ring's start."""
    block = place * 0 + ring.blocks[0]
    for i in gl.static_range(1, len(ring.blocks)):
        block = gl.where(place >= i * RING, ring.blocks[i], block)
    return block


@gluon.jit
def fetch_digits(buffer, stage, ring, t, SIDE: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Start copying the residual digits at the ring's places for tokens [t, t + tile).

    A place may still hold another token's digits. `is_refined` detects that later.
    """
    DIGITS: gl.constexpr = SIDE.digits
    WIDTH: gl.constexpr = 2 * chunk_words(SIDE) // SIZE
    RING: gl.constexpr = SIDE.ring
    token, element = row_of_copies(SIDE, C.tile, SIZE)
    place = (t + token) % (RING * len(ring.blocks))
    block = gl.maximum(block_of(ring, place, RING), 0)
    if SIZE == 1:
        rows = (ring.base + SIDE.digit_codes).to(gl.pointer_type(gl.int8))
    else:
        rows = (ring.base + SIDE.digit_codes).to(gl.pointer_type(gl.uint16))
    # Rows are a multiple of 8 bytes long and pages a multiple of 16, so a copy is at least 8 bytes wide. Without
    # `multiple_of(..., [1])`, Triton 3.6 wrongly assumes that the result of `%` is a multiple of 8. It then copies 16
    # bytes at once, even from rows of 24 bytes, whose addresses are only multiples of 8.
    row = block.to(gl.int64) * (ring.stride // 16 * (16 // SIZE))
    row += gl.multiple_of(place % RING, [1]) * (SIDE.row // SIZE)
    for i in gl.static_range(DIGITS):
        at = digit_buffer(stage, i, SIDE, C) * chunks(SIDE)
        for c in gl.static_range(chunks(SIDE)):
            if C.wide:
                digit = rows + (i * RING * (SIDE.row // SIZE) + c * WIDTH)
                copy_to_shared(buffer.index(at + c), digit + (row[:, None] + element[None, :]))
            else:
                to = row[:, None] + (element[None, :] + (i * RING * (SIDE.row // SIZE) + c * WIDTH))
                copy_to_shared(buffer.index(at + c), rows + to)


@gluon.jit
def fetch_ring(smem, stage, ring, t, C: gl.constexpr):
    """Start copying the ring's digits of keys and values for the tile of tokens [t, t + tile), at `stage`."""
    KEY: gl.constexpr = C.key_side
    VALUE: gl.constexpr = C.value_side
    fetch_digits(smem.key, stage, ring, t, KEY, 1, C)
    fetch_digits(smem.value, stage, ring, t, VALUE, 2, C)


@gluon.constexpr_function
def over_lanes(tile):
    """Return the layout of a tile's tokens over the lanes of a warp."""
    return gl.BlockedLayout([max(1, tile // 32)], [32], [1], [0])


@gluon.jit
def load_tags(pages, ring, t, end, C: gl.constexpr):
    """Load the `Tags` of tokens [t, t + tile). For t >= `end` they are arbitrary."""
    GROUPS: gl.constexpr = C.groups
    KEY: gl.constexpr = C.key_side
    VALUE: gl.constexpr = C.value_side
    live = t < end
    token = gl.arange(0, C.tile, over_lanes(C.tile))
    at = (t + token) % (KEY.ring * len(ring.blocks))
    block = block_of(ring, at, KEY.ring)
    at = at % KEY.ring
    u16: gl.constexpr = gl.pointer_type(gl.uint16)
    rows = (ring.base + KEY.ring_meta).to(u16) + (gl.maximum(block, 0).to(gl.int64) * (ring.stride // 2) + at)
    page = pages.base + gl.load(pages.blocks + t // KEY.page, mask=live, other=0).to(gl.int64) * pages.stride
    key_codes = (page + KEY.codes).to(u16) + (t % KEY.page + token) * (KEY.row // 2)
    value_codes = (page + VALUE.codes).to(u16) + (t % KEY.page + token) * (VALUE.row // 2)
    there = live & (token >= 0)
    meta = ()
    for g in gl.static_range(2 * GROUPS):
        meta = meta + (gl.load(rows + g * KEY.ring, mask=there, other=0),)
    codes = ()
    for g in gl.static_range(min(GROUPS, 2)):
        codes = codes + (gl.load(key_codes + g * (KEY.row // 2 // GROUPS), mask=there, other=0),)
    for g in gl.static_range(min(GROUPS, 2)):
        codes = codes + (gl.load(value_codes + g * (VALUE.row // 2 // GROUPS), mask=there, other=0),)
    return Tags(meta=meta, codes=codes, block=block)


@gluon.jit
def same_tag(meta, ring_meta, codes, at: gl.constexpr, TILE: gl.constexpr):
    """Return True where the ring's metadata has the tag of the page's group `at`. Keys' groups come first."""
    own = meta.slice(at * TILE, TILE).load(over_lanes(TILE)).to(gl.uint32)
    return ring_meta.to(gl.uint32) >> 2 == (codes.to(gl.uint32) * 0x9E3779B1 + own * 0x85EBCA77) >> 18


@gluon.jit
def is_refined(meta, tags, right, C: gl.constexpr):
    """Return True for tokens whose residual is in the ring.

    `right` is False for tokens outside of the recent window or of the split.
    """
    TAGGED: gl.constexpr = min(C.groups, 2)
    right = right & (tags.block >= 0)
    for g in gl.static_range(TAGGED):
        right = right & same_tag(meta, tags.meta[g], tags.codes[g], g, C.tile)
        right = right & same_tag(meta, tags.meta[C.groups + g], tags.codes[TAGGED + g], C.groups + g, C.tile)
    return right


@gluon.jit
def fine_scale(fine, g: gl.constexpr, BITS: gl.constexpr):
    """Return a residual's scale relative to its codes' scale, float32 [tile]: 2^e / n as in `layouts`.

    The result is 0 for tokens whose residual is not in the ring.
    """
    e = fine.exponents[g].to(gl.uint32) & 3
    factor = gl.where(e == 0, 0.5 ** (8 - BITS), gl.where(e == 1, 0.5 ** (7 - BITS), 0.5 ** (6 - BITS)))
    return gl.convert_layout(gl.where(fine.right, factor, 0.0), ROWS)
