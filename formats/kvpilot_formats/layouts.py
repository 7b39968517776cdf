"""Byte layout of kvpilot's own formats: groups, pages and residual pages. Pure Python; `formats` lists the formats.

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

Residual pages (recent window: they refine the codes of one block's tokens to 8 bits)
-------------------------------------------------------------------------------------
A block may have n residual pages, which are as large as its page, so one pool serves both. Token t of the block has row
t % C of residual page t // C, with C = ceil(T / n). n is the smallest number for which C rows fit in a page. A page
stays readable without its residual pages. A residual row only adds a residual r of 8 - b bits to each code of b bits,
with m = 2^(8 - b). Codes of 8 bits get no residual, and nobody reads their e::

    x is read back as scale * (code - z) + scale * 2^e / m * (r - (m - 1) / 2)        e in 0..2 for a token's group

r is stored in digits of b bits, the highest first: one digit if b is 4, three if b is 2. A digit of all elements is
packed like a row of codes. A map from blocks to their residual pages tells which residuals belong to a block, so a
residual row does not name its token (`kvpilot_kernels.residuals`).

Regions of a residual page, with d = 8 / b - 1 digits of a key or of a value:

===============  ================================================  ======================  ================
region           offset in bytes                                   shape, row-major        element
===============  ================================================  ======================  ================
`key_digits`     0                                                 [d, C, D * kb / 8]      packed digits, u8
`value_digits`   C * D * (8 - kb) / 8                              [d, C, D * vb / 8]      packed digits, u8
`meta`           C * D * (16 - kb - vb) / 8                        [2 * G, C]              u16: e, keys' first
(end)            C * (D * (16 - kb - vb) / 8 + 4 * G)              at most T * `row_bytes(D)`
===============  ================================================  ======================  ================

At D = 128 and T = 64, n is 1 for `k8v4` and `k4v4`, 2 for `k4v2` (C = 32) and 3 for `k2v2` (C = 22).
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

RESIDUAL_REACH = 0.6
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
class ResidualLayout:
    """Layout of a residual page of one KV head; see the second table of this module."""

    tokens: int
    """Number of tokens of a residual page (C)."""
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


def residual(key_bits: int, value_bits: int, head_dim: int, groups: int, block_size: int, size: int) -> ResidualLayout:
    """Return the layout of the residual pages of a block (second table of this module).

    Args:
        key_bits, value_bits, head_dim, groups: as in `page`.
        block_size: tokens of a block.
        size: bytes of a page.
    """
    most = size // (head_dim * (16 - key_bits - value_bits) // 8 + 4 * groups)
    pages = -(-block_size // most)
    tokens = -(-block_size // pages)
    value_digits = tokens * head_dim * (8 - key_bits) // 8
    meta = value_digits + tokens * head_dim * (8 - value_bits) // 8
    return ResidualLayout(
        tokens=tokens,
        key_digits=Region(0, (8 // key_bits - 1) * tokens, head_dim * key_bits // 8),
        value_digits=Region(value_digits, (8 // value_bits - 1) * tokens, head_dim * value_bits // 8),
        meta=Region(meta, 2 * groups, 2 * tokens),
        size=meta + 4 * groups * tokens,
    )
