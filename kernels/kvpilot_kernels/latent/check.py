"""Checks of arguments for latent pages, which have one entry per token.

The checks read only shapes, types and strides, and never wait for a GPU. `kvpilot_kernels.check` has the checks for all
other pages.
"""

import torch

from kvpilot_formats.latent import RANK, ROPE, LatentFormat
from kvpilot_kernels.check import FLOATS, BadInputError, one_slot_each, pages, shown


def page_cache(cache: torch.Tensor, fmt: LatentFormat) -> None:
    """Check a layer's cache: uint8 [blocks, block_size, row_bytes]. Each block is one contiguous page."""
    pages(cache, ("blocks", "block_size"), fmt.row_bytes, fmt.name)


def tokens(latent: torch.Tensor, rope: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Check the entries of new tokens.

    Args:
        latent: floats [tokens, 512].
        rope: RoPE parts, floats [tokens, 64].
        slot_mapping: int64 [tokens or fewer].
    """
    for name, x, width in (("latent", latent, RANK), ("rope", rope, ROPE)):
        if x.dtype not in FLOATS or x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1:
            remedy = f"give floats [tokens, {width}], each row contiguous"
            raise BadInputError(name, f"is {shown(x)} with strides {x.stride()}", remedy)
    one_slot_each(slot_mapping, {"latents": latent, "RoPE keys": rope})


def queries(absorbed: torch.Tensor, rope: torch.Tensor, heads: int | None = None) -> None:
    """Check queries: floats [rows, heads, 512] absorbed into latent space, and RoPE parts, floats [rows, heads, 64]."""
    for name, x, width in (("query", absorbed, RANK), ("query_rope", rope, ROPE)):
        if x.dtype not in FLOATS or x.dim() != 3 or x.shape[2] != width or x.shape[1] != (heads or absorbed.shape[1]):
            raise BadInputError(name, f"is {shown(x)}", f"give floats [rows, {heads or 'heads'}, {width}]")
    if absorbed.shape[:2] != rope.shape[:2] or absorbed.shape[1] == 0:
        remedy = f"give the rows and heads of query, {tuple(absorbed.shape)}"
        raise BadInputError("query_rope", f"is {tuple(rope.shape)}", remedy)
