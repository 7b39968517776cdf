"""Decode of the recent window: the ring's digits, and the check that they belong to a tile's tokens.

`layouts` has the ring's layout. Digits are processed like codes (`unpack`). Tags tell whose residual the ring holds.
If a token's tags differ from those in the ring, its residual gets the scale 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.layout.unpack import ROWS, chunk_words, chunks, copy_to_shared, is_wide, row_of_copies


@gluon.constexpr_function
def places(side, stages, recent):
    """Return the number of tile buffers for keys or values: `stages`, or more if a tile and its digits need more."""
    return max(stages, 1 + side.digits) if recent else stages


@gluon.jit
def place_of_digit(stage, i: gl.constexpr, PLACES: gl.constexpr):
    """Return the buffer of digit i of the tile at `stage`: one of the next buffers, which held plain tiles."""
    return (stage + 1 + i) % PLACES


@gluon.jit
def block_of(ring_rows, place, RING: gl.constexpr):
    """Return the ring's block for each of these places [TILE]. `ring_rows` are the blocks of a sequence's ring."""
    block = place * 0 + ring_rows[0]
    for i in gl.static_range(1, len(ring_rows)):
        block = gl.where(place >= i * RING, ring_rows[i], block)
    return block


@gluon.jit
def fetch_digits(buffer, stage, ring_ptr, ring_rows, t, ring_page_stride, SIDE: gl.constexpr, D: gl.constexpr,
                 GROUP: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr, STAGES: gl.constexpr,
                 SIZE: gl.constexpr):  # fmt: skip
    """Start copying the ring's digits at the places of tokens [t, t + TILE). `is_refined` tells whose they are."""
    WIDTH: gl.constexpr = 2 * chunk_words(SIDE.bits, D, GROUP) // SIZE
    COUNT: gl.constexpr = chunks(SIDE.bits, D, GROUP)
    DIGITS: gl.constexpr = SIDE.digits
    token, element = row_of_copies(SIDE.bits, D, GROUP, TILE, SIZE)
    place = (t + token) % (RING * len(ring_rows))
    block = gl.maximum(block_of(ring_rows, place, RING), 0)
    if SIZE == 1:
        rows = (ring_ptr + SIDE.digit_codes).to(gl.pointer_type(gl.int8))
    else:
        rows = (ring_ptr + SIDE.digit_codes).to(gl.pointer_type(gl.uint16))
    # A row has a multiple of 8 bytes and a page a multiple of 16, so copies are at least 8 bytes wide. The hint of 1 is
    # needed: Triton 3.6 mistook every remainder for a multiple of 8, and copied rows of 24 bytes 16 bytes at a time.
    row = block.to(gl.int64) * (ring_page_stride // 16 * (16 // SIZE))
    row += gl.multiple_of(place % RING, [1]) * (SIDE.row // SIZE)
    for i in gl.static_range(DIGITS):
        at = place_of_digit(stage, i, places(SIDE, STAGES, True)) * COUNT
        for c in gl.static_range(COUNT):
            if is_wide(D):
                digit = rows + (i * RING * (SIDE.row // SIZE) + c * WIDTH)
                copy_to_shared(buffer.index(at + c), digit + (row[:, None] + element[None, :]))
            else:
                to = row[:, None] + (element[None, :] + (i * RING * (SIDE.row // SIZE) + c * WIDTH))
                copy_to_shared(buffer.index(at + c), rows + to)


@gluon.jit
def fetch_ring(keys, values, stage, ring_ptr, ring_rows, t, ring_page_stride, KEY: gl.constexpr,
               VALUE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """Start copying the ring's digits of keys and values for the tile of tokens [t, t + TILE), at `stage`."""
    fetch_digits(keys, stage, ring_ptr, ring_rows, t, ring_page_stride, KEY, D, GROUP, TILE, RING, STAGES, 1)
    fetch_digits(values, stage, ring_ptr, ring_rows, t, ring_page_stride, VALUE, D, GROUP, TILE, RING, STAGES, 2)


@gluon.constexpr_function
def over_lanes(tile):
    """Return the layout of a tile's tokens over the lanes of a warp."""
    return gl.BlockedLayout([max(1, tile // 32)], [32], [1], [0])


@gluon.jit
def load_recent(base, table_ptr, page_stride, ring_ptr, ring_rows, t, end, ring_page_stride, KEY: gl.constexpr,
                VALUE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
                RING: gl.constexpr):  # fmt: skip
    """Load the data that tells if the ring has the residuals of tokens [t, t + TILE). For t >= `end` it is arbitrary.

    Returns:
        The ring's metadata, uint16 [TILE] for each group, keys' groups first.
        The 16 bits of packed codes in a tag, uint16 [TILE], for the first two groups of the key and of the value.
        The ring's block, [TILE] or one for all tokens, negative for none.
    """
    GROUPS: gl.constexpr = D // GROUP
    live = t < end
    token = gl.arange(0, TILE, over_lanes(TILE))
    at = (t + token) % (RING * len(ring_rows))
    block = block_of(ring_rows, at, RING)
    at = at % RING
    u16: gl.constexpr = gl.pointer_type(gl.uint16)
    rows = (ring_ptr + KEY.ring_meta).to(u16) + (gl.maximum(block, 0).to(gl.int64) * (ring_page_stride // 2) + at)
    page = base + gl.load(table_ptr + t // PAGE, mask=live, other=0).to(gl.int64) * page_stride
    key_codes = (page + KEY.codes).to(u16) + (t % PAGE + token) * (KEY.row // 2)
    value_codes = (page + VALUE.codes).to(u16) + (t % PAGE + token) * (VALUE.row // 2)
    there = live & (token >= 0)
    ring_meta = ()
    for g in gl.static_range(2 * GROUPS):
        ring_meta = ring_meta + (gl.load(rows + g * RING, mask=there, other=0),)
    codes = ()
    for g in gl.static_range(min(GROUPS, 2)):
        codes = codes + (gl.load(key_codes + g * (KEY.row // 2 // GROUPS), mask=there, other=0),)
    for g in gl.static_range(min(GROUPS, 2)):
        codes = codes + (gl.load(value_codes + g * (VALUE.row // 2 // GROUPS), mask=there, other=0),)
    return ring_meta, codes, block


@gluon.jit
def same_tag(meta, ring_meta, codes, at: gl.constexpr, TILE: gl.constexpr):
    """Return True where the ring's metadata has the tag of the page's group `at`. Keys' groups come first."""
    own = meta.slice(at * TILE, TILE).load(over_lanes(TILE)).to(gl.uint32)
    return ring_meta.to(gl.uint32) >> 2 == (codes.to(gl.uint32) * 0x9E3779B1 + own * 0x85EBCA77) >> 18


@gluon.jit
def is_refined(meta, recent, right, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Return True for tokens whose residual is in the ring. `recent` is from `load_recent`.

    `right` is False for tokens outside of the recent window or of the split.
    """
    GROUPS: gl.constexpr = D // GROUP
    TAGGED: gl.constexpr = min(GROUPS, 2)
    ring_meta, codes, block = recent
    right = right & (block >= 0)
    for g in gl.static_range(TAGGED):
        right = right & same_tag(meta, ring_meta[g], codes[g], g, TILE)
        right = right & same_tag(meta, ring_meta[GROUPS + g], codes[TAGGED + g], GROUPS + g, TILE)
    return right


@gluon.jit
def fine_scale(fine, g: gl.constexpr, BITS: gl.constexpr):
    """Return a residual's scale relative to its codes' scale, float32 [TILE]: 2^e / n as in `layouts`.

    It is 0 if the ring holds another token's residual. `fine` has the ring's metadata by group, keys' groups first,
    and the result of `is_refined`. With several queries per sequence it also has a mask of each query's window,
    [TILE, Q], which this function ignores.
    """
    e = fine[0][g].to(gl.uint32) & 3
    factor = gl.where(e == 0, 0.5 ** (8 - BITS), gl.where(e == 1, 0.5 ** (7 - BITS), 0.5 ** (6 - BITS)))
    return gl.convert_layout(gl.where(fine[1], factor, 0.0), ROWS)
