"""Launch parameters of the kernels, as tables, so that no user waits for tuning.

`benchmarks/kernels/decode.py` and `prompts.py` time the kernels with these parameters, which were chosen by
measurements with Triton 3.6:

- decode, head_dim 128 and 256, H200 (2026-11-21 and 22): 8 to 16 programs per multiprocessor, in batches from 1 x 64K
  and 8 x 1K to 32 x 16K. Two stages were best, of 64 tokens at head_dim 128 and of 32 at 256.
- decode, head_dim 512, H200 (2026-11-24): 5 to 8 programs, tiles of 16 and 32 tokens, with splits of single tiles.
- decode, head_dim 64 and 96: not timed, but derived from register counts. 192: a copy of the row for 256.
- `store`, `gather`, `MERGES`, and the limit of 168 registers: H100 (2026-11-25 and 26), `k4v4`, and for the store of
  prompts also `k2v2`. Other formats and GPUs use the same numbers.

docs/benchmarks/kernel-resources.md lists registers and spills of the kernels for common shapes.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd, inf
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Choice:
    """Launch parameters of decode.

    Attributes:
        tile: number of tokens of a tile.
        stages: number of tiles in flight.
        programs: number of programs that fit on a multiprocessor at once.
        registers: largest number of registers per thread; None lets the assembler balance registers against programs.
        grain: splits are multiples of this many tokens; None means multiples of the tile.
    """

    tile: int
    stages: int
    programs: int
    registers: int | None = None
    grain: int | None = None


FUSED = {"enable_fp_fusion": True}
"""Option of every launch with float arithmetic: fuse a multiplication and an addition into one instruction.

Triton 3.9 warns that later versions will not fuse by default. All our figures were measured with fusion.
"""

TILES: dict[int, int] = {64: 64, 96: 64, 128: 64, 192: 32, 256: 32, 512: 16}
"""Tokens of a tile for programs of up to 8 queries, by elements of a row. Programs of 16 queries use half as many."""

PROGRAMS: dict[tuple[int, int], tuple[int, int, int]] = {
    (64, 4): (16, 16, 16), (64, 8): (16, 16, 16), (96, 4): (8, 12, 16), (96, 8): (8, 8, 8), (128, 4): (8, 12, 16),
    (128, 8): (8, 8, 8), (192, 4): (12, 12, 16), (192, 8): (8, 8, 8), (256, 4): (12, 12, 16), (256, 8): (8, 8, 8),
    (64, 16): (8, 8, 8), (96, 16): (8, 8, 8), (128, 16): (8, 8, 8), (512, 4): (8, 8, 8), (512, 8): (8, 8, 8),
}  # fmt: skip
"""Number of programs that run on a multiprocessor at once, by (elements of a row, largest number of queries).

The three numbers hold if the bits of key and value add up to more than 8, to 8, or to less. `Shape.settle` lowers a
number if fewer programs fit with the resources that the compiled kernel needs.
"""


@dataclass(frozen=True)
class Block:
    """Size of a program of `store` or `gather`: number of `tokens` of one head, and number of `warps`."""

    tokens: int
    warps: int


@dataclass(frozen=True)
class PrefillBlock:
    """Size of a program of `prefill`: `queries` of one head, `keys` per iteration, `warps`, and `stages` in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


MERGES: dict[int, tuple[tuple[float, tuple[int, int, int]], ...]] = {
    **dict.fromkeys((64, 128), ((0.5, (1, 128, 8)), (1, (1, 64, 4)), (2, (1, 32, 2)), (4, (1, 16, 1)), (16, (2, 8, 1)),
                                (inf, (2, 4, 1)))),
    96: ((0.5, (1, 64, 4)), (2, (1, 32, 2)), (8, (1, 8, 1)), (inf, (2, 4, 1))),
    192: ((0.5, (1, 64, 8)), (2, (1, 32, 4)), (16, (2, 8, 2)), (inf, (2, 4, 1))),
    256: ((0.5, (1, 64, 8)), (inf, (1, 4, 1))),
    512: ((0.5, (1, 32, 16)), (inf, (1, 8, 2))),
}  # fmt: skip
"""Launch parameters of `merge`, by elements of a row: pairs of an upper limit and a choice.

The limit applies to the number of query heads of all sequences, divided by the number of the GPU's multiprocessors. A
choice has three numbers: the most query heads of a program, the splits that it reads at once, and its warps. In batches
of few sequences each sequence has many splits, so every query head gets its own program. Each limit is at least twice
the one before, so that a warm-up with powers of two meets all choices.
"""

FEW_TOKENS = 128
"""Largest number of tokens for which `store` uses the first of its `STORES` blocks."""

STORES: dict[int, tuple[Block, Block]] = {
    64: (Block(8, 4), Block(8, 2)), 96: (Block(8, 4), Block(8, 1)), 128: (Block(8, 4), Block(8, 2)),
    192: (Block(8, 4), Block(8, 2)), 256: (Block(4, 4), Block(8, 4)), 512: (Block(4, 4), Block(8, 4)),
}  # fmt: skip
"""Blocks of `store` by elements of a row: for launches of at most `FEW_TOKENS` tokens, and for larger launches.

Small programs are best, because warps exchange little. Rows with signs (96, 192) need at least 8 tokens: with 4, Triton
3.6 made programs that wrote wrong queries on an H100.
"""

GATHERS: dict[int, Block] = {
    64: Block(8, 2), 96: Block(16, 2), 128: Block(8, 2), 192: Block(4, 1), 256: Block(8, 4), 512: Block(8, 4)
}  # fmt: skip
"""Blocks of `gather` by elements of a row."""


def store_block(dim: int, tokens: int) -> Block:
    """Return the block of `store` for rows of `dim` elements and a launch of this many tokens."""
    return STORES[dim][tokens > FEW_TOKENS]


def gather_block(dim: int) -> Block:
    """Return the block of `gather` for rows of `dim` elements."""
    return GATHERS[dim]


class Gpu(NamedTuple):
    """Choices that depend on the compute capability.

    Attributes:
        overlaps: True if a kernel may start while its predecessor ends (programmatic dependent launch).
        prefill_queries: queries of a program of `prefill`. 64 suit Hopper's warp groups, and spill on other GPUs.
        balanced: True if the assembler balances registers against programs. If False, a limit would cause spills.
        shared_kib: shared memory of a multiprocessor in KiB.
    """

    overlaps: bool
    prefill_queries: int
    balanced: bool
    shared_kib: int


GPUS: dict[tuple[int, int], Gpu] = {
    (0, 0): Gpu(False, 32, False, 228), (8, 0): Gpu(False, 32, False, 164), (8, 6): Gpu(False, 32, False, 100),
    (8, 7): Gpu(False, 32, False, 164), (8, 9): Gpu(False, 32, False, 100), (9, 0): Gpu(True, 64, True, 228),
    (10, 0): Gpu(True, 32, False, 228), (12, 0): Gpu(True, 32, False, 100),
}  # fmt: skip
"""Choices by the lowest compute capability that they hold for. (0, 0) stands for a CPU with Triton's interpreter."""


def gpu(capability: tuple[int, int]) -> Gpu:
    """Return the choices for a compute capability."""
    return GPUS[max(first for first in GPUS if first <= capability)]


def prefill_block(capability: tuple[int, int]) -> PrefillBlock:
    """Return the block of `prefill`."""
    return PrefillBlock(gpu(capability).prefill_queries, 32, 8, 2)


def program_queries(dim: int, ratio: int, tokens: int) -> int:
    """Return the number of queries of a decode program.

    With one query token, a program takes at most 8 query heads. More heads are divided evenly among several programs.
    With several query tokens, a program takes 4, 8 or 16 queries, so that few variants are compiled. For rows of more
    than 128 elements it takes at most 8, because 16 would spill registers.

    Args:
        dim: elements of a row.
        ratio: query heads per KV head.
        tokens: largest number of query tokens per sequence.
    """
    if tokens == 1:
        return -(-ratio // -(-ratio // 8))
    queries = ratio * tokens
    return 4 if queries <= 4 else 8 if queries <= 8 or dim > 128 else 16


def choose(dim: int, queries: int, bits: int, block_size: int, residuals: int, capability: tuple[int, int]) -> Choice:
    """Return the launch parameters of decode.

    The tile divides `block_size`, so that it lies in one page. If the assembler may choose the number of registers
    (`Gpu.balanced`), it takes slightly too many for 12 programs with a recent window. So this case gets a limit of 168.

    With a recent window, 2-bit codes need as much shared memory and as many registers as 4-bit codes. At head_dim 192
    they get tiles of 16, which spill 8 bytes on 9.0 with 8 queries. Tiles of 32 spill up to 400 bytes.

    Args:
        dim: elements of a row.
        queries: queries of a program.
        bits: bits of a key's and a value's element together.
        residuals: see `Shape`.
    """
    most = 4 if queries <= 4 else 8 if queries <= 8 else 16
    programs = PROGRAMS[dim, most][0 if bits > 8 else 1 if bits == 8 else 2]
    if residuals:
        programs = min(programs, 8 if bits == 4 else 12)
    tile, stages = (TILES[dim], 2) if most <= 8 else (TILES[dim] // 2, 3)
    if dim == 192 and bits == 4 and residuals:
        tile = 16
    if dim > 256:
        return Choice(gcd(tile, block_size), stages, programs, 255, grain=64)
    registers = (168 if residuals and programs == 12 and 64 < dim <= 128 else None) if gpu(capability).balanced else 255
    return Choice(gcd(tile, block_size), stages, programs, registers)


class Taken(NamedTuple):
    """Resources of a compiled program of one warp: registers per thread, and bytes of shared memory."""

    registers: int
    shared: int


def fitting(taken: Taken, shared: int) -> int:
    """Return the number of one-warp programs that fit on a multiprocessor with `shared` bytes of shared memory.

    On compute capability 8.0 to 12.0 a multiprocessor has 65,536 registers of 32 bits. A warp takes a multiple of 256
    of them, and each program reserves 1 KiB of shared memory.
    """
    return min(65536 // (-(-taken.registers // 8) * 8 * 32), shared // (taken.shared + 1024))


def merging(dim: int, groups: int, ratio: int, device: torch.device) -> tuple[int, int, int]:
    """Return the query heads, the splits that are read at once, and the warps of a program of `merge`.

    `groups` is the number of KV heads, summed over all sequences.
    """
    rows = groups * ratio / multiprocessors(device)
    most, splits, warps = next(way for bound, way in MERGES[dim] if rows <= bound)
    return max(n for n in range(1, most + 1) if ratio % n == 0), splits, warps


@cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; 1 for a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory of a GPU's multiprocessor in bytes; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def overlaps(device: torch.device) -> bool:
    """Return True if a kernel may start while its predecessor ends."""
    return gpu(capability(device)).overlaps
