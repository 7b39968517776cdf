"""Byte layout of kvpilot's own formats: groups, pages and rings. Pure Python; `formats` lists the formats.

Group format (all data of a token is in its page; nothing depends on other tokens)
-----------------------------------------------------------------------------------
A row is one token's key or value of one KV head. Its D elements are cut into groups of g = 64 (g = 48 at D = 96 and
192). Each group stores codes of b bits, which are unsigned integers, and 16 bits of scale metadata (little endian)::

    meta = (float16 bits of `scale` >> 4) << 5 | zero_code        scale: positive, rounded up to 6 mantissa bits
    qmax = 2^b - 1        z = zero_code * qmax / 30, zero_code in 0..30        x is read back as scale * (code - z)

Byte j of a 4-bit row holds element j in its low nibble and element j + D/2 in its high nibble. Byte j of a 2-bit row
holds j, j + D/4, j + D/2 and j + 3D/4, from the low bits up. So a kernel unpacks contiguous tiles without interleaving.

D is one of `formats.HEAD_DIMS`. A head x of d < D elements is padded with D - d zeros and then rotated by the D x D
Hadamard matrix H. This equals x H_d, where H_d is the first d rows of H. The row x' is read back as x' H_d^T, and
q . k = (q H_d) . (k H_d).

Page layout (one flat region per block and KV head; T = tokens in a block, kb/vb = code bits, G = D / g groups)
---------------------------------------------------------------------------------------------------------------
=============  =====================================  =========================  ================
region         offset in bytes                        shape, row-major           element
=============  =====================================  =========================  ================
`key_codes`    0                                      [T, D * kb / 8]            packed codes, u8
`value_codes`  T * D * kb / 8                         [T, D * vb / 8]            packed codes, u8
`key_meta`     T * D * (kb + vb) / 8                  [G, T]                     u16
`value_meta`   T * D * (kb + vb) / 8 + T * 2 * G      [G, T]                     u16
(end)          T * `row_bytes(D)`
=============  =====================================  =========================  ================

D is a multiple of 32 and T of 16, so every region starts at a multiple of 16 bytes. A group's metadata is contiguous
over the tokens, so a kernel loads the scales of a tile as one vector.

Ring layout (recent window: a ring buffer of pages that refines the codes of the last tokens to 8 bits)
-------------------------------------------------------------------------------------------------------
A sequence's ring is a fixed number of pages, as large as the pages above, so one pool serves both. A ring page holds C
tokens. The token at position p has row p mod (pages * C). Pages stay readable without the ring. A ring row only adds a
residual r of 8 - b bits to each code of b bits, with n = 2^(8 - b). Codes of 8 bits get no residual::

    x is read back as scale * (code - z) + scale * 2^e / n * (r - (n - 1) / 2)        e in 0..2 for a token's group

r is stored in digits of b bits, the highest first: one digit if b is 4, three if b is 2. A digit of all elements is
packed like a row of codes. Each group i of the key and of the value has 16 bits for e and a tag, which is a hash of the
token's row in the page::

    meta = (h >> 18) << 2 | e        h = (0x9E3779B1 * u + 0x85EBCA77 * w) mod 2^32
    w: the group's scale metadata        u: 16 bits of the row's packed codes, from byte i * row bytes / G on

A reader uses a ring row only if its tags match the token's row in the page. Otherwise it reads the token with b bits.
The reader compares the tags of groups 0 and 1 of key and value, or of the only group. So rings need no clearing. The
ring row of another token matches with a probability of 2^-56 (2^-28 at D = 64). Its residual would then move an element
by at most 2 scales.

Regions of a ring page, with m = 8 / b - 1 digits of a key or of a value:

===============  ================================================  ======================  ================
region           offset in bytes                                   shape, row-major        element
===============  ================================================  ======================  ================
`key_digits`     0                                                 [m, C, D * kb / 8]      packed digits, u8
`value_digits`   C * D * (8 - kb) / 8                              [m, C, D * vb / 8]      packed digits, u8
`meta`           C * D * (16 - kb - vb) / 8                        [2 * G, C]              u16, keys' first
(end)            C * (D * (16 - kb - vb) / 8 + 4 * G)              at most T * `row_bytes(D)`
===============  ================================================  ======================  ================

C is the largest number that fits: at D = 128 and T = 64 it is 177 for `k8v4`, 64 for `k4v4`, 39 for `k4v2` and 23 for
`k2v2`.
"""

from dataclasses import dataclass

ZERO_STEPS = 30
"""Number of steps in which a zero point can go from 0 to qmax. It is even, so a symmetric group has an exact zero."""

ZERO_BITS = 5
"""Number of low bits of the scale metadata that hold the zero point."""

CUT_BITS = 4
"""Number of low mantissa bits of a float16 that a stored scale leaves out."""

SHRINK: dict[int, tuple[float, ...]] = {8: (1.0,), 4: (1.0, 0.9, 0.8), 2: (1.0, 0.85, 0.75, 0.65, 0.55)}
"""Factors by which the encoder tries to shrink a group's range, by code width in bits."""

GAIN_BITS = 2
"""Largest code width in bits at which the encoder stretches scales, because decoded vectors would be too short."""

GAIN_LIMIT = 2.0
"""Largest factor by which the encoder stretches a scale. It bounds groups too small for a float16 scale."""

RING_REACH = 0.6
"""Largest residual that a group's exponent e covers, in units of scale * 2^e. Clipped values need e = 1 or 2."""


@dataclass(frozen=True)
class Region:
    """One row-major array [rows, row_bytes] in a page. It begins `offset` bytes after the page's start."""

    offset: int
    rows: int
    row_bytes: int


@dataclass(frozen=True)
class PageLayout:
    """Layout of the page of one block and KV head, in bytes; see the first table of this module."""

    key_codes: Region
    value_codes: Region
    key_meta: Region
    value_meta: Region
    size: int


@dataclass(frozen=True)
class RingLayout:
    """Layout of a ring page of one KV head; see the second table of this module."""

    tokens: int
    """Number of tokens of a ring page (C)."""
    key_digits: Region
    value_digits: Region
    meta: Region
    size: int
    """Number of bytes of the page that are used, at most the page's size."""


def page(key_bits: int, value_bits: int, head_dim: int, groups: int, tokens: int) -> PageLayout:
    """Return the layout of a page of `tokens` tokens, a multiple of 16 (first table of this module).

    Args:
        key_bits, value_bits: bits of a code of a key and of a value.
        head_dim: elements of a stored row (D).
        groups: quantization groups of a row (G).
    """
    codes, meta = tokens * head_dim // 8, tokens * 2
    value_codes = codes * key_bits
    key_meta = value_codes + codes * value_bits
    value_meta = key_meta + groups * meta
    return PageLayout(
        key_codes=Region(0, tokens, head_dim * key_bits // 8),
        value_codes=Region(value_codes, tokens, head_dim * value_bits // 8),
        key_meta=Region(key_meta, groups, meta),
        value_meta=Region(value_meta, groups, meta),
        size=value_meta + groups * meta,
    )


def ring(key_bits: int, value_bits: int, head_dim: int, groups: int, size: int) -> RingLayout:
    """Return the layout of a ring page, with as many tokens as fit in `size` bytes (second table of this module).

    The other arguments are those of `page`.
    """
    tokens = size // (head_dim * (16 - key_bits - value_bits) // 8 + 4 * groups)
    value_digits = tokens * head_dim * (8 - key_bits) // 8
    meta = value_digits + tokens * head_dim * (8 - value_bits) // 8
    return RingLayout(
        tokens=tokens,
        key_digits=Region(0, (8 // key_bits - 1) * tokens, head_dim * key_bits // 8),
        value_digits=Region(value_digits, (8 // value_bits - 1) * tokens, head_dim * value_bits // 8),
        meta=Region(meta, 2 * groups, 2 * tokens),
        size=meta + 4 * groups * tokens,
    )
