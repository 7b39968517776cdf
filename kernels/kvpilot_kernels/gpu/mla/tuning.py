"""Launch parameters of latent decode: heads, warps, tile, stages, and programs per multiprocessor.

They were derived from registers and shared memory (docs/benchmarks/kernel-resources.md). Only the merge was tuned by
timing, on an H200 (docs/benchmarks/h200-mla.md). `benchmarks/kernels/mla_decode.py --sweep` times alternatives.
"""

from dataclasses import dataclass, replace
from math import gcd

from kvpilot_formats.latent import ENTRY, LatentFormat
from kvpilot_kernels.gpu.launch.tuning import gpu

MOST_HEADS = 24
"""Largest number of heads of a program. Registers limit it: each head needs accumulators of 512 elements."""

STORE_TOKENS, STORE_WARPS = 1, 1
"""Rows and warps of a program of `store` and `prepare`."""

GATHER_TOKENS, GATHER_WARPS = 8, 4
"""Tokens and warps of a program of `gather`."""


@dataclass(frozen=True)
class Merge:
    """Launch parameters of `merge`: `heads` and `warps` of a program, and the `splits` that it reads at once (2^n)."""

    heads: int
    splits: int
    warps: int


def merging(splits: int) -> Merge:
    """Return the launch parameters of `merge` for sequences of at most this many splits.

    With few sequences, each sequence has many splits, and few programs merge them. Such a program reads many splits at
    once, so that it waits for memory less often. The choices were measured with 264, 33 and 8 splits per sequence.
    """
    if splits > 64:
        return Merge(1, 32, 16)
    return Merge(1, 32, 8) if splits > 16 else Merge(1, 4, 1)


@dataclass(frozen=True)
class LatentChoice:
    """Launch parameters of latent decode.

    Attributes:
        heads: heads of a program, padded to a multiple of 8.
        tile: number of tokens of a tile.
        stages: number of tiles in flight.
        warps: number of warps of a program.
        programs: number of programs that fit on a multiprocessor at once.
        registers: largest number of registers per thread; None to let the assembler choose.
    """

    heads: int
    tile: int
    stages: int
    warps: int
    programs: int
    registers: int | None = None

    def shared_bytes(self, fmt: LatentFormat) -> int:
        """Return the shared memory of a program in bytes, without the few bytes for reductions across warps."""
        return self.stages * self.tile * fmt.row_bytes + self.heads * (2 * ENTRY + 2 * self.tile)


def program_heads(heads: int) -> int:
    """Return the number of heads of a program: an even share of `heads`, at most MOST_HEADS."""
    return -(-heads // -(-heads // MOST_HEADS))


def choose(fmt: LatentFormat, heads: int, block_size: int, capability: tuple[int, int]) -> LatentChoice:
    """Return launch parameters for this rank's `heads`. The tile divides `block_size`, so that it lies in one page."""
    wide = -(-program_heads(heads) // 8) * 8
    for most in (64, 32):
        choice = LatentChoice(wide, gcd(most, block_size), 2, 4, 2)
        fit = gpu(capability).shared_kib * 1024 // (choice.shared_bytes(fmt) + 2048)  # a program costs 1 KiB more
        if fit:
            break
    return replace(choice, programs=min(2, fit))
