"""KV-cache formats of multi-head latent attention (MLA): bits and page layout. Pure Python.

With MLA (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash) a token has one entry for all heads of a layer. The entry has two
parts. Keys and values are computed from the latent of 512 elements. The RoPE part, 64 elements, belongs only to keys::

    score of head h = q_h . latent + q_rope_h . rope        output of head h = sum_t p_t latent_t        (absorbed form)

Both parts are rotated by a Hadamard matrix. Codes of the latent have 8 or 4 bits, codes of the RoPE part 8 bits. Each
part has one scale and zero point per token. `kvpilot_formats.layouts` describes the 16 bits of scale and zero point,
and the byte order of codes.

A latent has a single scale, because the same codes serve as keys and as values. Scores and probabilities can then be
scaled per token, and matrix products need not be split by group (docs/decisions/0025).

Page layout (one flat region per block; T = tokens in a block, b = code bits)
----------------------------------------------------------------------------
============  =====================  ====================  =====================
region        offset in bytes        shape, row-major      element
============  =====================  ====================  =====================
`codes`       0                      [T, 512 * b / 8]      packed codes, u8
`rope_codes`  T * 64 * b             [T, 64]               codes, u8
`meta`        T * 64 * (b + 1)       [2, T]                u16: latent's, RoPE's
(end)         T * `row_bytes`
============  =====================  ====================  =====================

T is a multiple of 16, so every region starts at a multiple of 16 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from kvpilot_formats.formats import FormatError, named
from kvpilot_formats.layouts import Region

RANK = 512
"""Number of elements of a token's latent (`kv_lora_rank`)."""

ROPE = 64
"""Number of elements of a token's RoPE part (`qk_rope_head_dim`)."""

ENTRY = RANK + ROPE
"""Number of elements of a token's entry: the latent's, then the RoPE part's."""

ROPE_BITS = 8
"""Width in bits of the RoPE part's codes, in every format."""


@dataclass(frozen=True)
class LatentLayout:
    """Layout of a block's page, in bytes; see the table in this module's docstring."""

    codes: Region
    rope_codes: Region
    meta: Region
    size: int


@dataclass(frozen=True)
class LatentFormat:
    """KV-cache format of MLA. Fields and methods that `formats.Format` also has mean the same as there."""

    name: str
    bits: int
    """Width of a latent's code."""
    ours: ClassVar[bool] = True
    latent: ClassVar[bool] = True
    calibrated_only: ClassVar[bool] = False
    has_residuals: ClassVar[bool] = False

    @property
    def row_bytes(self) -> int:
        """Size in bytes of a token's entry with all metadata."""
        return RANK * self.bits // 8 + ROPE * ROPE_BITS // 8 + 2 * 2

    def bits_per_element(self, head_dim: int = ENTRY) -> float:
        """Return the average bits per element of an entry, with all metadata."""
        return self.row_bytes * 8 / ENTRY

    def recent_tokens(self, asked: int | None = None, context: int | None = None) -> int:
        """Return 0, because formats of MLA have no recent window."""
        return 0

    def page_layout(self, block_size: int) -> LatentLayout:
        """Return the layout of a page of `block_size` tokens. Raise FormatError if it is not a multiple of 16."""
        if block_size <= 0 or block_size % 16:
            raise FormatError(f"block_size {block_size} is not a multiple of 16 tokens; use 16, 32, 64 or 128")
        row, rope_row = RANK * self.bits // 8, ROPE * ROPE_BITS // 8
        rope_codes = block_size * row
        meta = rope_codes + block_size * rope_row
        return LatentLayout(
            codes=Region(0, block_size, row),
            rope_codes=Region(rope_codes, block_size, rope_row),
            meta=Region(meta, 2, 2 * block_size),
            size=meta + 4 * block_size,
        )


LATENT_FORMATS: Mapping[str, LatentFormat] = MappingProxyType(
    {f.name: f for f in (LatentFormat("mla8", 8), LatentFormat("mla4", 4))}
)
"""Formats of MLA by name, largest first."""


def parse(name: str) -> LatentFormat:
    """Return the format called `name`."""
    return named(LATENT_FORMATS, name)


def names() -> tuple[str, ...]:
    """Return the names of all formats of MLA."""
    return tuple(LATENT_FORMATS)
