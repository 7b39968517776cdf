"""PTX of decode: codes, scales and zero points from packed registers, by one or two instructions each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvpilot_kernels.gpu.layout.page import CUT_BITS, ZERO_BITS, ZERO_STEPS

UNIT = gl.constexpr(2.0**-24)
"""Value of the code 1 in a float16 mantissa with exponent 0."""

# PTX that extracts two float16 scales from a register with two words of metadata.
SCALES = gl.constexpr(
    f"{{ .reg .b32 x; shr.u32 x, $1, {ZERO_BITS.value - CUT_BITS.value};"
    f" and.b32 $0, x, {hex((0x7FFF >> CUT_BITS.value << CUT_BITS.value) * 0x10001)}; }}"
)
LARGEST_HALF = gl.constexpr(0x7BFF)
NAN_HALF = gl.constexpr(0x7FFF)
"""Bits of the two limits for `scales_up_to`: the largest float16, and NaN, which leaves scales unchanged."""
ZEROS = gl.constexpr(f"and.b32 $0, $1, {hex(((1 << ZERO_BITS.value) - 1) * 0x10001)};")


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
def store_pairs(pointer, even, odd, mask):
    """Write pairs of float32, one of `even` and one of `odd`, from `pointer` on.

    Each store has eight bytes, so that whole sectors of memory are written.
    """
    both = even.to(gl.uint32, bitcast=True).to(gl.uint64) | (odd.to(gl.uint32, bitcast=True).to(gl.uint64) << 32)
    gl.store(pointer.to(gl.pointer_type(gl.uint64)), both, mask=mask)
