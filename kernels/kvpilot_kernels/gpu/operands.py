"""Operands of decode's matrix products: pages on their way to shared memory, codes and queries to tensor cores.

The layouts of a product's operands and result, the planes that a row of codes divides into, and how a code becomes a
float16: see `decode`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvpilot_kernels import formats

# Renamed between Triton 3.6 and 3.9.
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA.value))
COLS = gl.constexpr(gl.SliceLayout(0, MMA.value))

SCALE_SHIFT = gl.constexpr(formats.ZERO_BITS - formats.CUT_BITS)
SCALE_MASK = gl.constexpr((0x7FFF >> formats.CUT_BITS) << formats.CUT_BITS)
ZERO_MASK = gl.constexpr((1 << formats.ZERO_BITS) - 1)

UNIT = gl.constexpr(2.0**-24)
"""The value of the code 1 in a float16 mantissa with exponent 0."""


@gluon.constexpr_function
def planes(bits, dim, group):
    """Planes of a row as (chunk, sub-plane, odd, group); a chunk's words share their group in each plane.

    Element of word w of chunk c: sub * dim * bits / 8 + 2 * (c * chunk_words + w) + odd.
    """
    row, words = dim * bits // 8, min(dim * bits // 16, group // 2)
    return tuple(
        (c, sub, odd, (sub * row + 2 * c * words) // group)
        for c in range(dim * bits // 16 // words)
        for sub in range(8 // bits)
        for odd in range(2)
    )


@gluon.constexpr_function
def chunk_words(bits, dim, group):
    """Words of a chunk."""
    return min(dim * bits // 16, group // 2)


@gluon.constexpr_function
def padded(words):
    """Words that a tile loads for a chunk: a power of two, 16 at least (an MMA's depth). The rest is not used."""
    return 16 if words <= 16 else 32


@gluon.constexpr_function
def chunks(bits, dim, group):
    """Chunks of a row."""
    return dim * bits // 16 // min(dim * bits // 16, group // 2)


@gluon.constexpr_function
def zero_unit(bits):
    """A zero point's unit in codes: z = zero_code * zero_unit."""
    return ((1 << bits) - 1) / formats.ZERO_STEPS


@gluon.constexpr_function
def middle(bits):
    """What a residual is counted from: half of its largest value."""
    return ((1 << 8 - bits) - 1) / 2


@gluon.constexpr_function
def and_mask(bits, sub):
    """PTX that keeps one code in each half of a register."""
    return f"and.b32 $0, $1, {hex(((1 << bits) - 1 << bits * sub) * 0x10001)};"


@gluon.jit
def plane(words, bits: gl.constexpr, sub: gl.constexpr):
    """Codes of a sub-plane of the low bytes as float16 subnormals times 2^(bits * sub)."""
    return gl.inline_asm_elementwise(and_mask(bits, sub), "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def high(words):
    """The upper byte of each word, moved down; what comes from the neighbour above is masked by `plane`."""
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [words], dtype=gl.uint16, is_pure=True, pack=2)


@gluon.jit
def to_half(x):
    """float32 to float16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def scale_and_zero(meta):
    """Metadata (see `formats`) as float32 scale and zero code: an integer becomes float by its place in a mantissa."""
    wide = meta.to(gl.uint32)
    scale = ((wide >> SCALE_SHIFT) & SCALE_MASK).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)
    return scale, ((wide & ZERO_MASK) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def fetch_rows(buffer, at, rows, SIDE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Start copying a tile's rows of codes, uint16 words from `rows` + int [TILE] on, into buffers `at` and on."""
    WORDS: gl.constexpr = chunk_words(SIDE.bits, D, GROUP)
    WIDE: gl.constexpr = padded(WORDS)
    COUNT: gl.constexpr = chunks(SIDE.bits, D, GROUP)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [1, 1], [1, 0])
    word = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    token = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    for c in gl.static_range(COUNT):
        to = token[:, None] * (SIDE.row // 2) + (word[None, :] + c * WORDS)
        copy_to_shared(buffer.index(at * COUNT + c), rows + to)


@gluon.jit
def fetch(keys, values, meta, stage, base, table_ptr, t, end, page_stride, KEY: gl.constexpr, VALUE: gl.constexpr,
          D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Start copying the tile of tokens [t, t + TILE) into `stage`, if t < end."""
    if t < end:
        page = base + gl.load(table_ptr + t // PAGE).to(gl.int64) * page_stride
        place = gl.multiple_of(t % PAGE, TILE)
        u16: gl.constexpr = gl.pointer_type(gl.uint16)
        fetch_rows(keys, stage, (page + (KEY.codes + place * KEY.row)).to(u16), KEY, D, GROUP, TILE)
        layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
        i = gl.arange(0, 2 * (D // GROUP) * TILE, layout)
        # The words of keys and of values are one region after the other.
        copy_to_shared(meta.index(stage), (page + KEY.meta).to(u16) + place + ((i // TILE) * PAGE + i % TILE))
        fetch_rows(values, stage, (page + (VALUE.codes + place * VALUE.row)).to(u16), VALUE, D, GROUP, TILE)


@gluon.jit
def load_words(buffer, at, COUNT: gl.constexpr, TRANSPOSED: gl.constexpr):
    """A tile's codes as operands of an MMA: of each chunk its words, and their upper bytes moved down."""
    words = ()
    for c in gl.static_range(COUNT):
        if TRANSPOSED:
            low = buffer.index(at * COUNT + c).permute([1, 0]).load(LEFT)
        else:
            low = buffer.index(at * COUNT + c).load(LEFT)
        words = words + (low, high(low))
    return words


@gluon.jit
def load_query(query_ptr, KEY: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, RATIO: gl.constexpr,
               N: gl.constexpr):  # fmt: skip
    """The queries of a KV head by plane, float16 [words, N], and by group the sums that zero points take, float32 [N].

    A plane's codes are times 2^(bits * sub-plane), and its queries divided by that.
    """
    PLANES: gl.constexpr = planes(KEY.bits, D, GROUP)
    WORDS: gl.constexpr = chunk_words(KEY.bits, D, GROUP)
    word = gl.arange(0, padded(WORDS), gl.SliceLayout(1, RIGHT))[:, None]
    n = gl.arange(0, N, gl.SliceLayout(0, RIGHT))[None, :]
    query = ()
    for i in gl.static_range(len(PLANES)):
        element = PLANES[i][1] * KEY.row + PLANES[i][2] + 2 * (PLANES[i][0] * WORDS + word)
        query = query + (gl.load(query_ptr + n * D + element, mask=(n < RATIO) & (word < WORDS), other=0.0),)
    sums = ()
    for g in gl.static_range(D // GROUP):
        total = gl.full([N], 0.0, gl.float32, gl.SliceLayout(0, RIGHT))
        for i in gl.static_range(len(PLANES)):
            if PLANES[i][3] == g:
                total += gl.sum(query[i].to(gl.float32), 0)
        sums = sums + (gl.convert_layout(total, COLS) * (zero_unit(KEY.bits) * UNIT),)
    scaled = ()
    for i in gl.static_range(len(PLANES)):
        scaled = scaled + ((query[i] * (0.5 ** (KEY.bits * PLANES[i][1]))).to(gl.float16),)
    return scaled, sums
