"""Copy tiles from pages to a program's shared memory, and load their codes as MMA operands."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvpilot_kernels.gpu.layout.mma import KEYS, VALUES, chunk_words, chunks, padded
from kvpilot_kernels.gpu.layout.unpack import upper_bytes, upper_halves

# Triton 3.6 and 3.9 name this function differently.
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


Smem = namedtuple("Smem", "key value meta")
"""Shared memory of a program. A buffer holds a tile's codes, or one digit of each of its residuals (`residuals`).

Attributes:
    key: int8 [buffers * chunks, tile, bytes].
    value: uint16 [buffers * chunks, tile, words].
    meta: uint16 [stages, 2 * groups * tile], scale metadata of a tile, keys' groups first.
"""


Pages = namedtuple("Pages", "base blocks stride residuals")
"""Pages of a sequence and a KV head.

Attributes:
    base: pointer to the KV head's page in block 0.
    blocks: pointer to the sequence's block table.
    stride: bytes from one block to the next.
    residuals: pointer to the map of residual pages (`Residuals.pages`); not read without residuals.
"""


@gluon.constexpr_function
def buffers(side, stages, residuals):
    """Return the number of tile buffers for keys or values: `stages`, or more if a tile and its digits need more."""
    return max(stages, 1 + side.digits) if residuals else stages


@gluon.jit
def allocate(C: gl.constexpr):
    """Allocate a program's `Smem`."""
    KEY: gl.constexpr = C.key_side
    VALUE: gl.constexpr = C.value_side
    KEY_WORDS: gl.constexpr = 2 * padded(chunk_words(KEY))
    VALUE_WORDS: gl.constexpr = padded(chunk_words(VALUE))
    key = gl.allocate_shared_memory(
        gl.int8, [buffers(KEY, C.stages, C.residuals) * chunks(KEY), C.tile, KEY_WORDS],
        gl.SwizzledSharedLayout(16, 128 // KEY_WORDS, KEY_WORDS // 16, [1, 0]),
    )  # fmt: skip
    value = gl.allocate_shared_memory(
        gl.uint16, [buffers(VALUE, C.stages, C.residuals) * chunks(VALUE), C.tile, VALUE_WORDS],
        gl.SwizzledSharedLayout(8, 64 // VALUE_WORDS, VALUE_WORDS // 8, [1, 0]),
    )  # fmt: skip
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    meta = gl.allocate_shared_memory(gl.uint16, [C.stages, 2 * C.groups * C.tile], flat)
    return Smem(key=key, value=value, meta=meta)


@gluon.jit
def row_of_copies(SIDE: gl.constexpr, TILE: gl.constexpr, SIZE: gl.constexpr):
    """Return tokens of a tile and elements of a chunk in the layout of a warp's copies, 16 bytes per thread."""
    WIDE: gl.constexpr = 2 * padded(chunk_words(SIDE)) // SIZE
    each: gl.constexpr = 16 // SIZE
    layout: gl.constexpr = gl.BlockedLayout([1, each], [32 * each // WIDE, WIDE // each], [1, 1], [1, 0])
    return gl.arange(0, TILE, gl.SliceLayout(1, layout)), gl.arange(0, WIDE, gl.SliceLayout(0, layout))


@gluon.jit
def fetch_rows(buffer, at, rows, SIDE: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Start copying the codes of a tile's tokens from `rows` to tile buffer `at`, in elements of SIZE bytes."""
    WIDTH: gl.constexpr = 2 * chunk_words(SIDE) // SIZE
    token, element = row_of_copies(SIDE, C.tile, SIZE)
    for c in gl.static_range(chunks(SIDE)):
        if C.wide:  # one offset for all chunks saves registers
            to = token[:, None] * (SIDE.row // SIZE) + element[None, :]
            copy_to_shared(buffer.index(at * chunks(SIDE) + c), rows + c * WIDTH + to)
        else:
            to = token[:, None] * (SIDE.row // SIZE) + (element[None, :] + c * WIDTH)
            copy_to_shared(buffer.index(at * chunks(SIDE) + c), rows + to)


@gluon.jit
def fetch(smem, stage, pages, t, end, C: gl.constexpr):
    """Start copying the tile of tokens [t, t + tile) into `stage`, if t < end."""
    if t < end:
        block = gl.load(pages.blocks + t // C.key_side.page)
        fetch_tile(smem, stage, pages, block, t, C)


@gluon.jit
def fetch_tile(smem, stage, pages, block, t, C: gl.constexpr):
    """Start copying the tile of tokens [t, t + tile), which are in `block`, into `stage`."""
    KEY: gl.constexpr = C.key_side
    VALUE: gl.constexpr = C.value_side
    TILE: gl.constexpr = C.tile
    page = pages.base + block.to(gl.int64) * pages.stride
    place = gl.multiple_of(t % KEY.page, TILE)
    fetch_codes(smem.key, stage, page, place, KEY, 1, C)
    # The metadata of keys and of values are adjacent regions.
    fetch_meta(smem.meta.index(stage), page, place, KEY, 2 * C.groups, C)
    fetch_codes(smem.value, stage, page, place, VALUE, 2, C)


@gluon.jit
def fetch_codes(buffer, stage, page, place, SIDE: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Start copying a tile's codes of keys or values (SIDE), which begin at `place` of `page`, into `stage`."""
    rows = (page + (SIDE.codes + place * SIDE.row)).to(gl.pointer_type(gl.int8 if SIZE == 1 else gl.uint16))
    fetch_rows(buffer, stage, rows, SIDE, SIZE, C)


@gluon.jit
def fetch_meta(meta, page, place, SIDE: gl.constexpr, GROUPS: gl.constexpr, C: gl.constexpr):
    """Start copying a tile's scale metadata of GROUPS groups, from the first group of keys or values (SIDE) on."""
    TILE: gl.constexpr = C.tile
    i = gl.arange(0, GROUPS * TILE, gl.BlockedLayout([8], [32], [1], [0]))
    rows = (page + SIDE.meta).to(gl.pointer_type(gl.uint16)) + place
    copy_to_shared(meta, rows + ((i // TILE) * SIDE.page + i % TILE))


@gluon.jit
def load_keys(smem, at, C: gl.constexpr):
    """Load a tile's keys. For each chunk, return two tensors, int8 [tile, bytes].

    The first has the chunk's bytes, whose lower halves are codes. The second has their upper halves as lower ones.
    """
    KEY: gl.constexpr = C.key_side
    codes = ()
    for c in gl.static_range(chunks(KEY)):
        low = smem.key.index(at * chunks(KEY) + c).load(KEYS)
        codes = codes + (low, upper_halves(low))
    return codes


@gluon.jit
def load_values(smem, at, C: gl.constexpr):
    """Load a tile's values, uint16 [words, tile], two for each chunk: its words, and their upper bytes moved down."""
    VALUE: gl.constexpr = C.value_side
    words = ()
    for c in gl.static_range(chunks(VALUE)):
        low = smem.value.index(at * chunks(VALUE) + c).permute([1, 0]).load(VALUES)
        words = words + (low, upper_bytes(low))
    return words
