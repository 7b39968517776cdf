"""Checks of arguments for latent pages, which have one entry per token. `kvpilot_kernels.check` has those for others.

They look only at shapes, types and strides, and never wait for a GPU.
"""

from __future__ import annotations

import torch

from kvpilot_formats.latent import RANK, ROPE, LatentFormat
from kvpilot_kernels.check import FLOATS, BadInputError


def page_cache(cache: torch.Tensor, fmt: LatentFormat) -> None:
    """Check a layer's cache: uint8 [blocks, block_size, row_bytes], every block one contiguous page."""
    row = fmt.row_bytes
    right = cache.dtype == torch.uint8 and cache.dim() == 3 and cache.shape[2] == row
    if not right or cache.stride()[1:] != (row, 1) or cache.shape[1] % 16 or cache.shape[1] == 0:
        raise BadInputError(
            "cache",
            f"is {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()}",
            f"{fmt.name} takes uint8 [blocks, block_size, {row}] with contiguous pages and a block_size that is a "
            "multiple of 16",
        )
    if cache.shape[0] > 1 and cache.stride(0) < cache.shape[1] * row:
        raise BadInputError(
            "cache",
            f"has strides {cache.stride()}",
            f"its pages of {cache.shape[1] * row} bytes must not lie over one another",
        )
    if cache.data_ptr() % 16 or cache.stride(0) % 16:
        raise BadInputError(
            "cache",
            f"starts at byte {cache.data_ptr() % 16} of 16 with strides {cache.stride()}",
            "pages start at multiples of 16 bytes: allocate and pad them so",
        )


def tokens(latent: torch.Tensor, rope: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Check new tokens: floats [tokens, 512] and [tokens, 64], slots an int64 for each of them or fewer."""
    for name, x, width in (("latent", latent, RANK), ("rope", rope, ROPE)):
        if x.dtype not in FLOATS or x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1:
            raise BadInputError(
                name,
                f"is {x.dtype} {tuple(x.shape)} with strides {x.stride()}",
                f"give floats [tokens, {width}], each row contiguous",
            )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise BadInputError(
            "slots", f"is {slot_mapping.dtype} {tuple(slot_mapping.shape)}", "give one int64 for each token"
        )
    if slot_mapping.shape[0] > min(latent.shape[0], rope.shape[0]):
        raise BadInputError(
            "slots",
            f"has {slot_mapping.shape[0]} entries for {latent.shape[0]} latents and {rope.shape[0]} RoPE keys",
            "give one for each token",
        )


def queries(absorbed: torch.Tensor, rope: torch.Tensor, heads: int | None = None) -> None:
    """Check queries: floats [rows, heads, 512] and [rows, heads, 64]."""
    for name, x, width in (("query", absorbed, RANK), ("query_rope", rope, ROPE)):
        if x.dtype not in FLOATS or x.dim() != 3 or x.shape[2] != width or x.shape[1] != (heads or absorbed.shape[1]):
            raise BadInputError(
                name, f"is {x.dtype} {tuple(x.shape)}", f"give floats [rows, {heads or 'heads'}, {width}]"
            )
    if absorbed.shape[:2] != rope.shape[:2] or absorbed.shape[1] == 0:
        raise BadInputError(
            "query_rope", f"is {tuple(rope.shape)}", f"give the rows and heads of query, {tuple(absorbed.shape)}"
        )
