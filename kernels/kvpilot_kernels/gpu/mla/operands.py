"""Latents as MMA operands: the layout of 16-bit words over a program's warps, and copies to shared memory.

`mla.decode` computes the products. For keys and values, `layout.mma` has the layouts and `decode.smem` the copies.
"""

from collections import namedtuple
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_formats import latent as formats
from kvpilot_kernels.gpu.decode.smem import copy_to_shared
from kvpilot_kernels.gpu.layout.page import SideLayout
from kvpilot_kernels.gpu.layout.unpack import UNIT, zero_unit

RANK = gl.constexpr(formats.RANK)
ENTRY = gl.constexpr(formats.ENTRY)
ROPE_WORDS = gl.constexpr(formats.ROPE // 2)


@dataclass(frozen=True)
class LatentConfig:
    """Constants of a launch of decode.

    Attributes:
        latent, rope: layouts of latents and of RoPE parts.
        heads: query heads of this rank.
        take: query heads that a program handles.
        queries: `take` padded to a multiple of 8.
        tile: tokens of a tile.
        stages: number of tiles in shared memory at once: the present one and those that are copied ahead.
        warps: warps of a program.
        overlap: True if decode may start before `latent_prepare_kernel` ends. That kernel starts decode after all
            tokens are stored, so decode can copy pages before `gdc_wait`.
    """

    latent: SideLayout
    rope: SideLayout
    heads: int
    take: int
    queries: int
    tile: int
    stages: int
    warps: int
    overlap: bool


LatentSmem = namedtuple("LatentSmem", "codes rope_codes meta")
"""Shared memory of a program: codes of latents, codes of RoPE parts, and scale metadata, by stage."""


LatentQueries = namedtuple("LatentQueries", "latent rope sums count")
"""Queries of a program. Heads are divided into parts (`parts`), one matrix product each.

Attributes:
    latent, rope: float16 [planes, heads, words] for each part.
    sums: pointer to the `sums` of `latent_prepare_kernel` for the program's first head.
    count: number of the program's heads.
"""


@gluon.constexpr_function
def products(warps):
    """Return the layout of a product, with 16 rows for each warp and all columns."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def left(warps):
    """Return the layout of words, or of the float16 made from them, as a product's left operand."""
    return gl.DotOperandLayout(0, products(warps), 2)


@gluon.constexpr_function
def right(warps):
    """Return the layout of queries or weights as a product's right operand."""
    return gl.DotOperandLayout(1, products(warps), 2)


@gluon.constexpr_function
def halves(warps):
    """Return the layout of a product after each thread has summed its two of every 16 rows."""
    return gl.BlockedLayout([1, 2], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def copies(words, warps):
    """Return the layout in which threads copy a row's words, 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // words, words // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def chunk_words(warps):
    """Return the number of words of a row that form one operand: 16 for each warp, the rows of an MMA."""
    return 16 * warps


@gluon.constexpr_function
def parts(heads):
    """Split `heads`, a multiple of 8, into parts (first head, width) of 8, 16 or 32 heads. Each part is one product."""
    found, first = (), 0
    for width in (32, 16, 8):
        if heads - first >= width:
            found += ((first, width),)
            first += width
    return found


@gluon.constexpr_function
def planes(bits, warps):
    """Return the planes of a latent's row as (chunk, sub-plane, odd).

    Word w of a plane holds element sub * 512 * bits / 8 + 2 * (chunk * chunk_words + w) + odd.
    """
    return tuple(
        (c, sub, odd)
        for c in range(RANK.value * bits // 16 // chunk_words(warps))
        for sub in range(8 // bits)
        for odd in range(2)
    )


@gluon.jit
def stage_queries(queries, rope_queries, query_ptr, count, first: gl.constexpr, Q: gl.constexpr, C: gl.constexpr):
    """Copy Q of the `count` prepared queries, from query `first` on, to shared memory: float16 [Q, words] by plane.

    Divide them by 2^(bits * sub-plane), because the plane's codes are read too large by this factor. Queries past
    `count` become 0.
    """
    LATENT: gl.constexpr = C.latent
    PLANES: gl.constexpr = planes(C.latent.bits, C.warps)
    WORDS: gl.constexpr = chunk_words(C.warps)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [C.warps, 1], [1, 0])
    n = first + gl.arange(0, Q, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    for i in gl.static_range(len(PLANES)):
        element = PLANES[i][1] * LATENT.row + PLANES[i][2] + 2 * (PLANES[i][0] * WORDS + word)
        x = gl.load(query_ptr + n * ENTRY + element, mask=(n < count) & (word >= 0), other=0.0)
        queries.index(i).store((x.to(gl.float32) * 0.5 ** (LATENT.bits * PLANES[i][1])).to(gl.float16))
    word = gl.arange(0, ROPE_WORDS, gl.SliceLayout(0, layout))[None, :]
    for odd in gl.static_range(2):
        x = gl.load(query_ptr + n * ENTRY + (2 * word + (RANK + odd)), mask=(n < count) & (word >= 0), other=0.0)
        rope_queries.index(odd).store(x)


@gluon.jit
def load_sums(sums_ptr, count, first: gl.constexpr, Q: gl.constexpr, C: gl.constexpr):
    """Load data of the queries from `first` on, float32 [Q] each.

    Returns:
        The unit of each query.
        The number that a zero code of 1 subtracts from a product with the latent.
        The number that a zero code of 1 subtracts from a product with the RoPE part.
    """
    n = first + gl.arange(0, Q, gl.SliceLayout(0, products(C.warps)))
    unit = gl.load(sums_ptr + n, mask=n < count, other=0.0) * (1.0 / UNIT)
    taken = gl.load(sums_ptr + C.heads + n, mask=n < count, other=0.0) * zero_unit(C.latent.bits)
    rope_taken = gl.load(sums_ptr + 2 * C.heads + n, mask=n < count, other=0.0) * zero_unit(C.rope.bits)
    return unit, taken, rope_taken


@gluon.jit
def fetch(smem, stage, cache_ptr, table_ptr, t, end, page_stride, C: gl.constexpr):
    """Start copying the tile of tokens [t, t + tile) into `stage`, if t < end."""
    LATENT: gl.constexpr = C.latent
    POSITION: gl.constexpr = C.rope
    TILE: gl.constexpr = C.tile
    WORDS: gl.constexpr = chunk_words(C.warps)
    CHUNKS: gl.constexpr = LATENT.row // 2 // WORDS
    if t < end:
        page = cache_ptr + gl.load(table_ptr + t // LATENT.page).to(gl.int64) * page_stride
        place = gl.multiple_of(t % LATENT.page, TILE)
        u16: gl.constexpr = gl.pointer_type(gl.uint16)
        layout: gl.constexpr = copies(WORDS, C.warps)
        token = gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
        word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
        rows = (page + (LATENT.codes + place * LATENT.row)).to(u16)
        for c in gl.static_range(CHUNKS):
            to = token * (LATENT.row // 2) + (c * WORDS + word)
            copy_to_shared(smem.codes.index(stage * CHUNKS + c), rows + to)
        narrow: gl.constexpr = copies(ROPE_WORDS, C.warps)
        token = gl.arange(0, TILE, gl.SliceLayout(1, narrow))[:, None]
        word = gl.arange(0, ROPE_WORDS, gl.SliceLayout(0, narrow))[None, :]
        rows = (page + (POSITION.codes + place * POSITION.row)).to(u16)
        copy_to_shared(smem.rope_codes.index(stage), rows + (token * ROPE_WORDS + word))
        flat: gl.constexpr = gl.BlockedLayout([8], [32], [C.warps], [0])
        i = gl.arange(0, 2 * TILE, flat)
        # The metadata of latents and of RoPE parts are adjacent regions.
        at = (page + LATENT.meta).to(u16) + place + ((i // TILE) * LATENT.page + i % TILE)
        copy_to_shared(smem.meta.index(stage), at)


@gluon.jit
def over_own_rows(x, WARPS: gl.constexpr):
    """Sum the two of every 16 rows that a thread holds: from a product [rows, heads] to [rows / 2, heads]."""
    ROWS: gl.constexpr = x.shape[0]
    Q: gl.constexpr = x.shape[1]
    x = gl.sum(gl.reshape(x, [ROWS // 16, 2, 8, Q]), 1)
    return gl.convert_layout(gl.reshape(x, [ROWS // 2, Q]), halves(WARPS))
