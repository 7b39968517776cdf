"""Residual pages of the recent window: the map that finds them, and their bytes on a CPU (`layouts` has the layout)."""

from typing import NamedTuple

import torch


class Residuals(NamedTuple):
    """Residual pages of an engine's blocks. All layers share them, and both tensors keep their addresses.

    Attributes:
        pages: int32 [blocks, n], the residual pages of each block; 0 for none. Block 0 holds no tokens. A block has all
            n pages or none. Its pages have the residuals of all tokens that were stored in the block.
        newest: int32 [1], how many of a sequence's newest blocks decode reads with residuals.
    """

    pages: torch.Tensor
    newest: torch.Tensor


def first_recent(ends: torch.Tensor, newest: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the position of the first token of the `newest` blocks of sequences with `ends` stored tokens."""
    return ((ends + block_size - 1) // block_size - newest).clamp(min=0) * block_size
