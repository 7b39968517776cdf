"""Launch choices of decode: tile, stages, and how many programs fit a multiprocessor.

Kept as a table, so that no user waits for tuning. Measured on an H200 at 32 x 16K (2026-11-21, k4v4, Triton 3.6):
64 x 2 against 64 x 3, 32 x 3 and 32 x 4 at head_dim 128 and 64, and 32 x 2 against 32 x 3, 32 x 4 and 64 x 2 at 256.
The rows for 16 queries and for head_dim 96 follow from registers and shared memory. `kernels/benchmarks/decode.py`
times what the table says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch


@dataclass(frozen=True)
class Choice:
    """`tile` tokens a turn, `stages` tiles in flight, `programs` that fit one multiprocessor at once."""

    tile: int
    stages: int
    programs: int


OVERLAP_SEQUENCES, OVERLAP_SEQUENCES_WITH_RING = 8, 64
"""With fewer sequences a step takes longer where decode overlaps with `store`: a layer of Llama-3-8B in k4v4 77.9 us
against 58.5 at 1 x 128K, and with a ring 51.8 against 42.6 at 32 x 2K (docs/benchmarks/h200-decode-overlap.md)."""

CHOICES: dict[tuple[int, int], Choice] = {
    (64, 8): Choice(64, 2, 16),
    (64, 16): Choice(32, 3, 10),
    (96, 8): Choice(64, 2, 8),
    (96, 16): Choice(32, 3, 8),
    (128, 8): Choice(64, 2, 8),
    (128, 16): Choice(32, 3, 8),
    (256, 8): Choice(32, 2, 8),
    (256, 16): Choice(16, 3, 8),
}
"""By head_dim and queries of an MMA (8 or 16)."""


STORE_WARPS = {False: 4, True: 8}
"""Warps of a program of `store` up to head_dim 128, without and with a recent window; twice as many at 256."""


def store_warps(dim: int, recent: int) -> int:
    """Warps of a program of `store`."""
    return STORE_WARPS[recent > 0] * (1 if dim <= 128 else 2)


def choose(dim: int, queries: int, block_size: int) -> Choice:
    """The choice for a shape; its tile divides `block_size`, as a tile lies in one page."""
    found = CHOICES[dim, queries]
    return Choice(gcd(found.tile, block_size), found.stages, found.programs)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch, from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
