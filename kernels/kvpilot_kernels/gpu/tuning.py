"""Launch choices of decode: tile, stages, and how many programs fit a multiprocessor.

Kept as tables, so that no user waits for tuning. Measured on an H200 (2026-11-22, Triton 3.6): at head_dim 128 and 256
8, 10 to 13, 15 and 16 programs, in batches from 1 x 64K and 8 x 1K to 32 x 16K; 64 tokens of 2 stages in flight were
best before keys were 8-bit integers (2026-11-21), and 32 at 256. Rows for head_dim 64 and 96 follow from registers.
`kernels/benchmarks/decode.py` times what the tables say.
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

TILES: dict[int, int] = {64: 64, 96: 64, 128: 64, 256: 32}
"""Tokens of a tile by head_dim."""

PROGRAMS: dict[tuple[int, int], tuple[int, int, int]] = {
    (64, 4): (16, 16, 16), (64, 8): (16, 16, 16), (96, 4): (8, 12, 16), (96, 8): (8, 8, 8), (128, 4): (8, 12, 16),
    (128, 8): (8, 8, 8), (256, 4): (12, 12, 16), (256, 8): (8, 8, 8),
}  # fmt: skip
"""By head_dim and queries (at most 4 or 8); for a key and a value of more than 8 bits together, of 8, and of less."""


STORE_WARPS = {False: 4, True: 8}
"""Warps of a program of `store` up to head_dim 128, without and with a recent window; twice as many at 256."""


def store_warps(dim: int, recent: int) -> int:
    """Warps of a program of `store`."""
    return STORE_WARPS[recent > 0] * (1 if dim <= 128 else 2)


def choose(dim: int, queries: int, bits: int, block_size: int) -> Choice:
    """The choice for `queries` of a program and `bits` of a key's and a value's element together.

    The tile divides `block_size`, as a tile lies in one page.
    """
    programs = PROGRAMS[dim, 4 if queries <= 4 else 8][0 if bits > 8 else 1 if bits == 8 else 2]
    return Choice(gcd(TILES[dim], block_size), 2, programs)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch, from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
