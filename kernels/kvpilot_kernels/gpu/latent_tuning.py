"""Launch choices of latent decode: heads, warps, tile, stages, and how many programs fit a multiprocessor.

They follow from registers and shared memory (docs/benchmarks/kernel-resources.md), the merge from what an H200 took
(docs/benchmarks/h200-mla.md). `benchmarks/kernels/mla_decode.py --sweep` times others beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from kvpilot_formats.latent import ENTRY, LatentFormat

MOST_HEADS = 24
"""Heads of a program: accumulators of 512 elements for each are all that registers hold."""

STORE_TOKENS, STORE_WARPS = 1, 1
"""Rows of a program of `store` and of `prepare`, and its warps."""

GATHER_TOKENS, GATHER_WARPS = 8, 4
"""Tokens of a program of `gather`, and its warps."""


@dataclass(frozen=True)
class Merge:
    """Of a program of `reduce`: its `heads`, the `splits` in flight, a power of two, and its `warps`."""

    heads: int
    splits: int
    warps: int


def merging(splits: int) -> Merge:
    """The merge where a sequence may have so many splits.

    One sequence alone has as many as the GPU has room for, and few programs merge them: these take many splits at once,
    or memory's latency is paid for each pair. Measured with 264, 33 and 8 splits a sequence.
    """
    if splits > 64:
        return Merge(1, 32, 16)
    return Merge(1, 32, 8) if splits > 16 else Merge(1, 4, 1)


def shared_kib(capability: tuple[int, int]) -> int:
    """Shared memory of a multiprocessor; a program may have all but one KiB, and one more goes with each program."""
    if capability in ((8, 6), (8, 9)) or capability[0] == 12:
        return 100
    return 164 if capability[0] == 8 else 228


@dataclass(frozen=True)
class LatentChoice:
    """`heads` of a program padded to a multiple of 8, `tile` tokens a turn, `stages` tiles in flight, `warps`, and the
    `programs` that fit a multiprocessor at once. `registers` a thread may have, None for what the assembler takes."""

    heads: int
    tile: int
    stages: int
    warps: int
    programs: int
    registers: int | None = None

    def shared_bytes(self, fmt: LatentFormat) -> int:
        """Bytes of shared memory that a program takes, but for a few that reductions over warps need."""
        return self.stages * self.tile * fmt.row_bytes + self.heads * (2 * ENTRY + 2 * self.tile)


def program_heads(heads: int) -> int:
    """Heads of a program, of so many in all: as even a share as can be of at most MOST_HEADS."""
    return -(-heads // -(-heads // MOST_HEADS))


def choose(fmt: LatentFormat, heads: int, block_size: int, capability: tuple[int, int]) -> LatentChoice:
    """The choice for a model's `heads` (of this rank). The tile divides `block_size`, as a tile lies in one page."""
    wide = -(-program_heads(heads) // 8) * 8
    for most in (64, 32):
        choice = LatentChoice(wide, gcd(most, block_size), 2, 4, 2)
        fit = shared_kib(capability) * 1024 // (choice.shared_bytes(fmt) + 2048)
        if fit:
            break
    return replace(choice, programs=min(2, fit))
