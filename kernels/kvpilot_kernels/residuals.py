"""Residual pages of the recent window: the map that finds them, and their bytes on a CPU (`layouts` has the layout)."""

from typing import NamedTuple

import torch

from kvpilot_formats.formats import Format
from kvpilot_kernels.reference.quantize import view_region
from kvpilot_kernels.reference.residual import decode_residual, encode_residual, pack_digits, unpack_digits


class Residuals(NamedTuple):
    """Residual pages of an engine's blocks. All layers share them, and both tensors keep their addresses.

    Attributes:
        pages: int32 [blocks, n], the residual pages of each block; 0 for none. Block 0 holds no tokens. A block has all
            n pages or none. Its pages have the residuals of all tokens that were stored in the block.
        newest: int32 [1], how many of a sequence's newest blocks decode reads with residuals.
    """

    pages: torch.Tensor
    newest: torch.Tensor


class ResidualPages:
    """Residual pages of one layer on a CPU.

    Args:
        pages: uint8 [blocks, kv_heads, page bytes], the layer's cache.
        fmt: a format with residuals.
        head_dim: elements of a key.
        block_size: tokens of a block.
        residuals: the engine's map.
    """

    def __init__(self, pages: torch.Tensor, fmt: Format, head_dim: int, block_size: int, residuals: Residuals) -> None:
        layout = fmt.residual_layout(head_dim, block_size)
        self.map, self.newest = residuals
        self.tokens, self.block_size = layout.tokens, block_size
        self.sides: dict[str, tuple[int, torch.Tensor, torch.Tensor]] = {}
        metas = view_region(pages, layout.meta).view(torch.int16).chunk(2, 2)
        for name, side, region, meta in (
            ("key", fmt.key, layout.key_digits, metas[0]), ("value", fmt.value, layout.value_digits, metas[1]),
        ):  # fmt: skip
            if side.digits:
                digits = view_region(pages, region).view(*pages.shape[:2], side.digits, layout.tokens, -1)
                self.sides[name] = side.bits, digits, meta

    def store(
        self, side: str, x: torch.Tensor, codes: torch.Tensor, meta: torch.Tensor, block: torch.Tensor,
        place: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write residuals of keys or values, for tokens in blocks that have residual pages. Codes of 8 bits have none.

        Args:
            side: "key" or "value".
            x: [tokens, kv_heads, D], rotated but not quantized.
            codes: uint8 [tokens, kv_heads, D], codes of x.
            meta: int16 [tokens, kv_heads, groups], scale metadata of x.
            block: int [tokens].
            place: int [tokens], offsets in the blocks.
        """
        if side in self.sides:
            bits, digits_at, meta_at = self.sides[side]
            page, row = self.map[block, place // self.tokens].long(), place % self.tokens
            kept = page > 0
            page, row = page[kept], row[kept]
            r, exponents = encode_residual(x[kept], codes[kept], meta[kept], bits)
            digits_at[page, :, :, row] = pack_digits(r, bits)
            meta_at[page, :, :, row] = exponents.short()

    def read(self, side: str, blocks: torch.Tensor, meta: torch.Tensor) -> torch.Tensor | None:
        """Return what residuals add to the keys or values of blocks that have residual pages; None for codes of 8 bits.

        Args:
            blocks: int [count].
            meta: int16 [count, kv_heads, block_size, groups], scale metadata of the blocks.

        Returns:
            float32 [count, kv_heads, block_size, D], arbitrary for tokens that were not stored.
        """
        if side not in self.sides:
            return None
        bits, digits_at, meta_at = self.sides[side]
        pages = self.map[blocks].long()
        digits = digits_at[pages].permute(0, 2, 1, 4, 3, 5).flatten(2, 3)[:, :, : self.block_size]
        exponents = meta_at[pages].permute(0, 2, 1, 4, 3).flatten(2, 3)[:, :, : self.block_size]
        return decode_residual(unpack_digits(digits, bits), exponents, meta, bits)
