"""Ring of the recent window on a CPU: the slots of tokens in a ring, and its pages. `layouts` has the byte layout."""

import torch

from kvpilot_formats.formats import Format
from kvpilot_kernels import check
from kvpilot_kernels.reference.quantize import view_region
from kvpilot_kernels.reference.residual import (
    decode_residual,
    encode_residual,
    pack_digits,
    ring_meta,
    split_ring_meta,
    tags,
    unpack_digits,
)


def ring_slots(
    positions: torch.Tensor, ends: torch.Tensor, ring_rows: torch.Tensor, recent: int, ring_tokens: int
) -> torch.Tensor:
    """Return the slots of a step's tokens in their sequences' rings.

    Args:
        positions: int [tokens], each token's position in its sequence, counted from 0; negative for padding.
        ends: int [tokens], stored tokens of the token's sequence after this step.
        ring_rows: int [tokens, ring_blocks], ring blocks of the token's sequence; negative for none.
        recent: number of tokens that the ring keeps: the window, plus the largest number of drafts in a step.
        ring_tokens: number of tokens of a ring page (`RingLayout.tokens`).

    Returns:
        int64 [tokens]: block * ring_tokens + offset, different for all tokens of a sequence. It is -1 for padding, for
        a token whose ring has no block, and for a token before the last `recent` ones.
    """
    place = positions.long().clamp(min=0) % (ring_rows.shape[1] * ring_tokens)
    block = ring_rows.long().gather(1, (place // ring_tokens)[:, None])[:, 0]
    live = (positions >= 0) & (positions >= ends - recent) & (block >= 0)
    return torch.where(live, block * ring_tokens + place % ring_tokens, -1)


class RingPages:
    """Ring pages of one layer on a CPU.

    Args:
        cache: uint8 [blocks, kv_heads, block_size, row_bytes], pages of the shape of the layer's own pages; it may be
            the same tensor.
        fmt: a format with a ring.
        head_dim: elements of a key.
        recent: tokens of the window.
        drafts: largest number of draft tokens in a step. The ring keeps as many additional tokens, because drafts may
            be rejected.

    Raises:
        BadInputError: the cache does not have the layout of `fmt`.
        FormatError: the format has no ring, or the window is negative.
    """

    def __init__(self, cache: torch.Tensor, fmt: Format, head_dim: int, recent: int, drafts: int = 0) -> None:
        check.page_cache(cache, fmt, head_dim, "ring")
        layout = fmt.ring_layout(head_dim, cache.shape[2])
        self.blocks, self.tokens = cache.shape[0], layout.tokens
        self.per_sequence = fmt.ring_blocks(recent + drafts, head_dim, cache.shape[2])
        pages = cache.flatten(2)
        meta = view_region(pages, layout.meta).view(torch.int16)
        groups = meta.shape[2] // 2
        self.sides: list[tuple[int, torch.Tensor | None, torch.Tensor]] = []
        for side, at, part in (
            (fmt.key, layout.key_digits, meta[:, :, :groups]),
            (fmt.value, layout.value_digits, meta[:, :, groups:]),
        ):
            by_digit = (*pages.shape[:2], side.digits, self.tokens, at.row_bytes)
            digits = view_region(pages, at).view(by_digit) if side.digits else None
            self.sides.append((side.bits, digits, part))

    def store(
        self, side: int, x: torch.Tensor, codes: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the residuals and tags of tokens' keys (side 0) or values (side 1) into their slots of the ring.

        Args:
            x: [tokens, kv_heads, D], rotated but not quantized.
            codes: uint8 [tokens, kv_heads, D], codes of x.
            packed: uint8 [tokens, kv_heads, bytes], the same codes, packed.
            meta: int16 [tokens, kv_heads, groups], scale metadata of x.
            slots: int64 [tokens], from `ring_slots`; negative for tokens to leave out.
        """
        bits, digits, meta_at = self.sides[side]
        kept = slots >= 0
        x, codes, packed, meta, slots = x[kept], codes[kept], packed[kept], meta[kept], slots[kept]
        block, place = slots // self.tokens, slots % self.tokens
        exponents = torch.zeros_like(meta)
        if digits is not None:
            r, exponents = encode_residual(x, codes, meta, bits)
            digits[block, :, :, place] = pack_digits(r, bits)
        meta_at[block, :, :, place] = ring_meta(tags(packed, meta), exponents)

    def fine_rows(
        self, positions: torch.Tensor, ring_table: torch.Tensor, pages: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor | None]:
        """Return the residuals of the recent tokens, for rotated keys and then for rotated values.

        Each result is float32 [sequences, kv_heads, recent, D]. A residual is 0 if the ring does not hold it. Codes of
        8 bits have no residuals, so their result is None.

        Args:
            positions: int64 [sequences, recent], negative for no token.
            ring_table: int [sequences, ring_blocks].
            pages: these tokens' packed codes, uint8 [sequences, recent, kv_heads, bytes], and scale metadata, int16
                [sequences, recent, kv_heads, groups], for keys and then for values.
        """
        place = positions.clamp(min=0) % (self.per_sequence * self.tokens)
        block = ring_table.long().gather(1, place // self.tokens)
        right = ((positions >= 0) & (block >= 0)).unsqueeze(-1)
        at = (block.clamp(min=0), slice(None), slice(None), place % self.tokens)
        exponents = []
        for (_, _, meta_at), (packed, meta) in zip(self.sides, pages, strict=True):
            found, same = split_ring_meta(meta_at[at], tags(packed, meta))
            exponents.append(found)
            right = right & same  # [sequences, recent, kv_heads]
        return [
            None if digits is None
            else decode_residual(unpack_digits(digits[at], bits), e, meta, bits)
            .masked_fill(~right.unsqueeze(-1), 0.0).transpose(1, 2)
            for (bits, digits, _), (_, meta), e in zip(self.sides, pages, exponents, strict=True)
        ]  # fmt: skip
