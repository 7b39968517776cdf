"""Operands of decode's matrix products: copies from pages to shared memory, and codes and weights for tensor cores.

Keys are signed bytes for m16n8k32. Values are 16-bit words for m16n8k16 in float16. A row of packed codes is cut into
chunks, each the operand of one product. A plane is the set of codes that one AND extracts from all bytes, or words, of
a chunk. Its sub-plane is the place of these codes in a byte, counted from the low bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvpilot_kernels.gpu.layout.page import CUT_BITS, NARROW, ZERO_BITS, ZERO_STEPS

# Triton 3.6 and 3.9 name this function differently.
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
KEYS = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
QUERIES = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 4))
VALUES = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
SCORES = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0]))
"""Layout of a product after adjacent columns were summed. Thread t of four threads has columns t, t + 4, ..."""
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
COLS = gl.constexpr(gl.SliceLayout(0, SCORES.value))

UNIT = gl.constexpr(2.0**-24)
"""Value of the code 1 in a float16 mantissa with exponent 0."""

# PTX that splits a register's two words of metadata into two float16.
SCALES = gl.constexpr(
    f"{{ .reg .b32 x; shr.u32 x, $1, {ZERO_BITS.value - CUT_BITS.value};"
    f" and.b32 $0, x, {hex((0x7FFF >> CUT_BITS.value << CUT_BITS.value) * 0x10001)}; }}"
)
LARGEST_HALF = gl.constexpr(0x7BFF)
NAN_HALF = gl.constexpr(0x7FFF)
"""Bits of the two limits for `scales_up_to`: the largest float16, and NaN, which leaves scales unchanged."""
ZEROS = gl.constexpr(f"and.b32 $0, $1, {hex(((1 << ZERO_BITS.value) - 1) * 0x10001)};")


@gluon.constexpr_function
def value_planes(bits, dim, group):
    """Return the planes of a row as (chunk, sub-plane, odd, group). All words of a chunk and plane are in one group.

    Word w of chunk c holds element sub * dim * bits / 8 + 2 * (c * chunk_words + w) + odd.
    """
    row, words = dim * bits // 8, chunk_words(bits, dim, group)
    return tuple(
        (c, sub, odd, (sub * row + 2 * c * words) // group)
        for c in range(chunks(bits, dim, group))
        for sub in range(8 // bits)
        for odd in range(2)
    )


@gluon.constexpr_function
def key_planes(bits, dim, group):
    """Return the planes of a row as (chunk, sub-plane, group, first bit, shifted, factor).

    Byte b of chunk c holds element sub * dim * bits / 8 + 2 * c * chunk_words + b. Its code begins at the first bit of
    the byte, or of the byte's upper half if `shifted`. So the code is read too large, by `factor` * 2^`key_shift`. The
    factor, 1 or 4, differs between planes of a group, so queries are divided by it.
    """
    row, width = dim * bits // 8, 2 * chunk_words(bits, dim, group)
    planes = ()
    for c in range(chunks(bits, dim, group)):
        for sub in range(8 // bits):
            g = (sub * row + c * width) // group
            shifted = bits * sub - key_shift(bits, dim, group, g) >= 4
            first = bits * sub - 4 * shifted
            planes += ((c, sub, g, first, shifted, 1 << first - key_shift(bits, dim, group, g)),)
    return planes


@gluon.constexpr_function
def key_shift(bits, dim, group, g):
    """Return the bit at which the first element of group g begins in its byte."""
    return bits * (g * group // (dim * bits // 8))


@gluon.constexpr_function
def is_signed(bits, dim, group, g):
    """Return True if some codes of group g end at a byte's sign bit, so that they are read 128 too low."""
    return any(first + bits == 8 for _, _, at, first, _, _ in key_planes(bits, dim, group) if at == g)


@gluon.constexpr_function
def chunk_words(bits, dim, group):
    """Return the number of words of a chunk."""
    return min(dim * bits // 16, group // 2)


@gluon.constexpr_function
def padded(words):
    """Return how many words a tile loads for a chunk: a power of two, at least 16 (an MMA's depth).

    The words past the chunk are unused.
    """
    return 16 if words <= 16 else 32


@gluon.constexpr_function
def chunks(bits, dim, group):
    """Return the number of chunks of a row."""
    return dim * bits // 16 // chunk_words(bits, dim, group)


@gluon.constexpr_function
def is_wide(dim):
    """Return True if a row is too long to keep its queries in registers. The module `head512` handles such rows."""
    return dim > NARROW.value


@gluon.constexpr_function
def zero_unit(bits):
    """Return the step between zero points, in codes: z = zero_code * zero_unit."""
    return ((1 << bits) - 1) / ZERO_STEPS.value


@gluon.constexpr_function
def middle(bits):
    """Return the midpoint that residual codes are centred on."""
    return ((1 << 8 - bits) - 1) / 2


@gluon.constexpr_function
def keep_in_words(bits, sub):
    """Return a PTX instruction that masks a register so that one code remains in each 16-bit half.

    The code has `bits` bits, from bit `bits * sub` of the half on.
    """
    return f"and.b32 $0, $1, {hex(((1 << bits) - 1 << bits * sub) * 0x10001)};"


@gluon.constexpr_function
def keep_in_bytes(bits, first):
    """Return a PTX instruction that masks a register so that one code remains in each byte.

    The code has `bits` bits, from bit `first` of the byte on. If it uses the byte's sign bit, the instruction also
    flips this bit: (register & mask) ^ sign. The signed byte is then 128 less than the code.
    """
    mask = hex(((1 << bits) - 1 << first) * 0x1010101)
    return f"lop3.b32 $0, $1, {mask}, 0x80808080, 0x6a;" if first + bits == 8 else f"and.b32 $0, $1, {mask};"


@gluon.jit
def store_pairs(pointer, even, odd, mask):
    """Write pairs of float32, one of `even` and one of `odd`, from `pointer` on.

    Each store has eight bytes, so that whole sectors of memory are written.
    """
    both = even.to(gl.uint32, bitcast=True).to(gl.uint64) | (odd.to(gl.uint32, bitcast=True).to(gl.uint64) << 32)
    gl.store(pointer.to(gl.pointer_type(gl.uint64)), both, mask=mask)


@gluon.jit
def word_plane(words, bits: gl.constexpr, sub: gl.constexpr):
    """Extract a sub-plane's codes from the low bytes of words, as float16 subnormals times 2^(bits * sub)."""
    return gl.inline_asm_elementwise(keep_in_words(bits, sub), "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def byte_plane(codes, bits: gl.constexpr, first: gl.constexpr):
    """Extract the codes from bit `first` on, as int8 times 2^first. They are 128 too low if they use the sign bit."""
    return gl.inline_asm_elementwise(keep_in_bytes(bits, first), "=r,r", [codes], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def upper_bytes(words):
    """Move the upper byte of each word down. `word_plane` masks the bits that come from the next word."""
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [words], dtype=gl.uint16, is_pure=True, pack=2)


@gluon.jit
def upper_halves(codes):
    """Move the upper half of each byte down. `byte_plane` masks the bits that come from the next byte."""
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 4;", "=r,r", [codes], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def to_half(x):
    """Convert float32 to float16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def scales(meta):
    """Return scales of metadata (see `layouts`), float32."""
    return gl.inline_asm_elementwise(SCALES, "=r,r", [meta], dtype=gl.float16, is_pure=True, pack=2).to(gl.float32)


@gluon.jit
def scales_up_to(meta, limits):
    """Return scales of metadata, float32, limited to the given numbers. A NaN becomes its limit.

    The limits are bits of a float16, uint16 in the shape of `meta`.
    """
    x = gl.inline_asm_elementwise(SCALES, "=r,r", [meta], dtype=gl.float16, is_pure=True, pack=2)
    x = gl.inline_asm_elementwise(
        "min.f16x2 $0, $1, $2;", "=r,r,r", [x, limits], dtype=gl.float16, is_pure=True, pack=2
    )  # fmt: skip
    return x.to(gl.float32)


@gluon.jit
def zero_codes(meta):
    """Return zero codes of metadata times UNIT, float32."""
    return gl.inline_asm_elementwise(ZEROS, "=r,r", [meta], dtype=gl.float16, is_pure=True, pack=2).to(gl.float32)


@gluon.jit
def fetch_rows(buffer, at, rows, SIDE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr,
               SIZE: gl.constexpr):  # fmt: skip
    """Start copying the codes of a tile's tokens, from pointers `rows` on, to the tile buffer `at`.

    Elements have SIZE bytes.
    """
    WIDTH: gl.constexpr = 2 * chunk_words(SIDE.bits, D, GROUP) // SIZE
    COUNT: gl.constexpr = chunks(SIDE.bits, D, GROUP)
    token, element = row_of_copies(SIDE.bits, D, GROUP, TILE, SIZE)
    for c in gl.static_range(COUNT):
        if is_wide(D):  # one offset for all chunks saves registers
            to = token[:, None] * (SIDE.row // SIZE) + element[None, :]
            copy_to_shared(buffer.index(at * COUNT + c), rows + c * WIDTH + to)
        else:
            to = token[:, None] * (SIDE.row // SIZE) + (element[None, :] + c * WIDTH)
            copy_to_shared(buffer.index(at * COUNT + c), rows + to)


@gluon.jit
def row_of_copies(BITS: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, SIZE: gl.constexpr):
    """Return tokens of a tile and elements of a chunk in the layout of a warp's copies, 16 bytes per thread."""
    WIDE: gl.constexpr = 2 * padded(chunk_words(BITS, D, GROUP)) // SIZE
    each: gl.constexpr = 16 // SIZE
    layout: gl.constexpr = gl.BlockedLayout([1, each], [32 * each // WIDE, WIDE // each], [1, 1], [1, 0])
    return gl.arange(0, TILE, gl.SliceLayout(1, layout)), gl.arange(0, WIDE, gl.SliceLayout(0, layout))


@gluon.jit
def fetch(keys, values, meta, stage, base, table_ptr, t, end, page_stride, KEY: gl.constexpr, VALUE: gl.constexpr,
          D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Start copying the tile of tokens [t, t + TILE) into `stage`, if t < end."""
    if t < end:
        block = gl.load(table_ptr + t // PAGE)
        fetch_tile(keys, values, meta, stage, base, block, t, page_stride, KEY, VALUE, D, GROUP, TILE, PAGE)


@gluon.jit
def fetch_tile(keys, values, meta, stage, base, block, t, page_stride, KEY: gl.constexpr, VALUE: gl.constexpr,
               D: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Start copying the tile of tokens [t, t + TILE), which are in `block`, into `stage`."""
    page = base + block.to(gl.int64) * page_stride
    place = gl.multiple_of(t % PAGE, TILE)
    s8: gl.constexpr = gl.pointer_type(gl.int8)
    u16: gl.constexpr = gl.pointer_type(gl.uint16)
    fetch_rows(keys, stage, (page + (KEY.codes + place * KEY.row)).to(s8), KEY, D, GROUP, TILE, 1)
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    i = gl.arange(0, 2 * (D // GROUP) * TILE, layout)
    # The metadata of keys and of values are adjacent regions.
    copy_to_shared(meta.index(stage), (page + KEY.meta).to(u16) + place + ((i // TILE) * PAGE + i % TILE))
    fetch_rows(values, stage, (page + (VALUE.codes + place * VALUE.row)).to(u16), VALUE, D, GROUP, TILE, 2)


@gluon.jit
def load_keys(buffer, at, COUNT: gl.constexpr):
    """Load a tile's keys, int8 [TILE, bytes]: each chunk's bytes, then the bytes' upper halves moved down."""
    codes = ()
    for c in gl.static_range(COUNT):
        low = buffer.index(at * COUNT + c).load(KEYS)
        codes = codes + (low, upper_halves(low))
    return codes


@gluon.jit
def load_values(buffer, at, COUNT: gl.constexpr):
    """Load a tile's values, uint16 [words, TILE]: each chunk's words, then the words' upper bytes moved down."""
    words = ()
    for c in gl.static_range(COUNT):
        low = buffer.index(at * COUNT + c).permute([1, 0]).load(VALUES)
        words = words + (low, upper_bytes(low))
    return words
