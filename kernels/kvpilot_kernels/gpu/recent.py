"""The recent window's half of decode: digits of the ring's pages, and whether they belong to the tokens of a tile.

`formats` has the ring's layout. Digits go the way that codes go (`operands`); a token whose tag is not that of its row
in the page gets the scale 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.operands import ROWS, chunk_words, chunks, copy_to_shared, row_of_copies


@gluon.jit
def fetch_digits(buffer, ring_ptr, ring_table_ptr, t, ring_page_stride, SIDE: gl.constexpr, D: gl.constexpr,
                 GROUP: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr, RING_BLOCKS: gl.constexpr,
                 SIZE: gl.constexpr):  # fmt: skip
    """Start copying the digits that the ring may have for the tile of tokens [t, t + TILE), as `fetch_rows` does."""
    WIDTH: gl.constexpr = 2 * chunk_words(SIDE.bits, D, GROUP) // SIZE
    COUNT: gl.constexpr = chunks(SIDE.bits, D, GROUP)
    DIGITS: gl.constexpr = SIDE.digits
    token, element = row_of_copies(SIDE.bits, D, GROUP, TILE, SIZE)
    place = (t + token) % (RING * RING_BLOCKS)
    block = gl.maximum(gl.load(ring_table_ptr + place // RING), 0)
    if SIZE == 1:
        rows = (ring_ptr + SIDE.digit_codes).to(gl.pointer_type(gl.int8))
    else:
        rows = (ring_ptr + SIDE.digit_codes).to(gl.pointer_type(gl.uint16))
    # A row has a multiple of 8 bytes and a page of 16: copies go by 8 bytes at least.
    row = block.to(gl.int64) * (ring_page_stride // 16 * (16 // SIZE)) + (place % RING) * (SIDE.row // SIZE)
    for i in gl.static_range(DIGITS):
        for c in gl.static_range(COUNT):
            to = row[:, None] + (element[None, :] + (i * RING * (SIDE.row // SIZE) + c * WIDTH))
            copy_to_shared(buffer.index(i * COUNT + c), rows + to)


@gluon.jit
def fetch_ring(key_digits, value_digits, ring_ptr, ring_table_ptr, t, ring_page_stride, KEY: gl.constexpr,
               VALUE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr,
               RING_BLOCKS: gl.constexpr):  # fmt: skip
    """Start copying both sides' digits of the tile of tokens [t, t + TILE)."""
    fetch_digits(
        key_digits, ring_ptr, ring_table_ptr, t, ring_page_stride, KEY, D, GROUP, TILE, RING, RING_BLOCKS, 1
    )  # fmt: skip
    fetch_digits(
        value_digits, ring_ptr, ring_table_ptr, t, ring_page_stride, VALUE, D, GROUP, TILE, RING, RING_BLOCKS, 2
    )  # fmt: skip


@gluon.constexpr_function
def over_lanes(tile):
    """A tile's tokens over the lanes of a warp."""
    return gl.BlockedLayout([max(1, tile // 32)], [32], [1], [0])


@gluon.jit
def load_recent(page, ring_ptr, ring_table_ptr, t, place, ring_page_stride, KEY: gl.constexpr, VALUE: gl.constexpr,
                D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr,
                RING_BLOCKS: gl.constexpr):  # fmt: skip
    """What tells whether the ring has the tokens from t on, whose rows begin at `place` of their page.

    By group, keys before values: the ring's metadata, uint32 [TILE], and of the first two groups of a side the codes
    that are in its tag, uint32 [TILE]. Then whether there is a ring, [TILE] or one for all.
    """
    GROUPS: gl.constexpr = D // GROUP
    token = gl.arange(0, TILE, over_lanes(TILE))
    at = (t + token) % (RING * RING_BLOCKS)
    if RING_BLOCKS == 1:
        block = gl.load(ring_table_ptr)
    else:
        block = gl.load(ring_table_ptr + at // RING)
        at = at % RING
    rows = (ring_ptr + KEY.ring_meta).to(gl.pointer_type(gl.uint16))
    rows = rows + (gl.maximum(block, 0).to(gl.int64) * (ring_page_stride // 2) + at)
    key_codes = (page + KEY.codes).to(gl.pointer_type(gl.uint16)) + (place + token) * (KEY.row // 2)
    value_codes = (page + VALUE.codes).to(gl.pointer_type(gl.uint16)) + (place + token) * (VALUE.row // 2)
    ring_meta = ()
    for g in gl.static_range(2 * GROUPS):
        ring_meta = ring_meta + (gl.load(rows + g * RING).to(gl.uint32),)
    codes = ()
    for g in gl.static_range(min(GROUPS, 2)):
        codes = codes + (gl.load(key_codes + g * (KEY.row // 2 // GROUPS)).to(gl.uint32),)
    for g in gl.static_range(min(GROUPS, 2)):
        codes = codes + (gl.load(value_codes + g * (VALUE.row // 2 // GROUPS)).to(gl.uint32),)
    return ring_meta, codes, block >= 0


@gluon.jit
def same_tag(meta, ring_meta, codes, at: gl.constexpr, TILE: gl.constexpr):
    """Whether a ring's metadata has the tag of group `at` of the page, keys' groups before values'."""
    own = meta.slice(at * TILE, TILE).load(over_lanes(TILE)).to(gl.uint32)
    return ring_meta >> 2 == (codes * 0x9E3779B1 + own * 0x85EBCA77) >> 18


@gluon.jit
def fine_scale(ring_meta, right, BITS: gl.constexpr):
    """A residual's scale in scales of its codes, float32 [TILE]: 2^e / n, 0 where not `right`."""
    e = ring_meta & 3
    factor = gl.where(e == 0, 0.5 ** (8 - BITS), gl.where(e == 1, 0.5 ** (7 - BITS), 0.5 ** (6 - BITS)))
    return gl.convert_layout(gl.where(right, factor, 0.0), ROWS)


@gluon.jit
def refine(meta, ring_meta, codes, right, KEY: gl.constexpr, VALUE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
           TILE: gl.constexpr):  # fmt: skip
    """`fine_scale` by group, keys before values, of what `load_recent` loaded; 0 where the ring has another token."""
    GROUPS: gl.constexpr = D // GROUP
    TAGGED: gl.constexpr = min(GROUPS, 2)
    for g in gl.static_range(TAGGED):
        right = right & same_tag(meta, ring_meta[g], codes[g], g, TILE)
        right = right & same_tag(meta, ring_meta[GROUPS + g], codes[TAGGED + g], GROUPS + g, TILE)
    fine = ()
    for g in gl.static_range(GROUPS):
        fine = fine + (fine_scale(ring_meta[g], right, KEY.bits),)
    for g in gl.static_range(GROUPS):
        fine = fine + (fine_scale(ring_meta[GROUPS + g], right, VALUE.bits),)
    return fine
