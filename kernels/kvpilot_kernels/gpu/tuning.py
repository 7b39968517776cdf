"""Launch choices of decode: tile, stages, and how many programs fit a multiprocessor.

They are tables, so that no user waits for tuning. Measured on an H200 (2026-11-22, Triton 3.6): 8, 10 to 13, 15 and 16
programs at head_dim 128 and 256, in batches from 1 x 64K and 8 x 1K to 32 x 16K. Two stages of 64 tokens were best with
16-bit keys (2026-11-21), and of 32 tokens at head_dim 256. The table's rows for head_dim 64 and 96 follow from register
counts. The row for 192 is a copy of that for 256, without a measurement.

Decode of 8 queries with a recent window spills up to 480 bytes, and that of several tokens up to 512
(docs/benchmarks/kernel-resources.md). At head_dim 512, 6 to 8 programs of 8 queries, 5 to 8 programs of 4 queries, and
tiles of 16 and 32 tokens were timed (2026-11-24). Splits consisted of single tiles then; they are multiples of 64
tokens now.

Blocks of `store` and `gather`, `MERGES`, and 168 registers of decode with a window were timed on an H100 (2026-11-25
and 26), in `k4v4`, and store of prompts in `k2v2` too; other formats and GPUs follow from them. A merge of rows of 192
in one warp spills, while two are only a tenth slower.

`benchmarks/kernels/decode.py` and `prompts.py` time the tables' choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, inf
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Choice:
    """Launch choices of decode.

    Attributes:
        tile: tokens a turn. stages: tiles in flight. programs: number that fits a multiprocessor at once.
        registers: limit per thread, with which it may spill some; None lets the assembler weigh them against programs.
        grain: tokens that splits are multiples of, None for the tile.
    """

    tile: int
    stages: int
    programs: int
    registers: int | None = None
    grain: int | None = None


FUSED = {"enable_fp_fusion": True}
"""Option of every launch that computes with floats: fuse a multiplication and an addition into one instruction.

Triton 3.9 warns that later versions will not do so by default. All our figures are measured with it.
"""

TILES: dict[int, int] = {64: 64, 96: 64, 128: 64, 192: 32, 256: 32, 512: 16}
"""Tokens of a tile, by elements of a row, for up to 8 queries. 16 queries have half as many."""

PROGRAMS: dict[tuple[int, int], tuple[int, int, int]] = {
    (64, 4): (16, 16, 16), (64, 8): (16, 16, 16), (96, 4): (8, 12, 16), (96, 8): (8, 8, 8), (128, 4): (8, 12, 16),
    (128, 8): (8, 8, 8), (192, 4): (12, 12, 16), (192, 8): (8, 8, 8), (256, 4): (12, 12, 16), (256, 8): (8, 8, 8),
    (64, 16): (8, 8, 8), (96, 16): (8, 8, 8), (128, 16): (8, 8, 8), (512, 4): (8, 8, 8), (512, 8): (8, 8, 8),
}  # fmt: skip
"""Programs per multiprocessor, by elements of a row and queries (at most 4, 8 or 16).

If key and value together have more than 8 bits, there are 8 programs less. `Shape.settle` reduces the numbers to those
that fit with the compiled kernel's resources.
"""


@dataclass(frozen=True)
class Block:
    """Work of a program of `store` or `gather`: the `tokens` of a head that it takes, and its `warps`."""

    tokens: int
    warps: int


@dataclass(frozen=True)
class PrefillBlock:
    """Work of a program of `prefill`: its `queries` of a head, the `keys` of one iteration, and its `warps`.

    `stages` of keys and values are in flight.
    """

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
"""Programs of `reduce` by elements of a row: a limit on query heads of all sequences per multiprocessor, then a choice.

A choice is the largest number of query heads of a program, splits in flight, and warps. Few sequences have many splits
and leave the GPU idle. Then each query head gets its own program, with more warps for fewer heads. Each choice covers a
range of sequences from some number to at least its double, so that a warm-up with powers of two meets all choices.
"""

FEW_TOKENS = 128
"""Largest number of tokens for which `store` uses the blocks of a decode step."""

STORES: dict[int, tuple[Block, Block]] = {
    64: (Block(8, 4), Block(8, 2)), 96: (Block(8, 4), Block(8, 1)), 128: (Block(8, 4), Block(8, 2)),
    192: (Block(8, 4), Block(8, 2)), 256: (Block(4, 4), Block(8, 4)), 512: (Block(4, 4), Block(8, 4)),
}  # fmt: skip
"""Blocks of `store` by elements of a row, for few tokens and for more.

A thread has adjacent elements of a row, and warps exchange little, so small programs are best. Rows with signs (96,
192) need 8 tokens, the number of a product's rows: with 4, Triton 3.6 made programs that wrote wrong queries on an
H100.
"""

GATHERS: dict[int, Block] = {
    64: Block(8, 2), 96: Block(16, 2), 128: Block(8, 2), 192: Block(4, 1), 256: Block(8, 4), 512: Block(8, 4)
}  # fmt: skip
"""Blocks of `gather` by elements of a row."""


def store_block(dim: int, tokens: int) -> Block:
    """Return the block of `store` for a launch of this many tokens."""
    return STORES[dim][tokens > FEW_TOKENS]


def gather_block(dim: int) -> Block:
    """Return the block of `gather`."""
    return GATHERS[dim]


def weigh_warps(tokens: int) -> int:
    """Return the warps of a program of `weigh` that takes this many tokens at once.

    An operand has 16 tokens. With more warps than operands, registers spill on compute capability 9.0.
    """
    return min(max(tokens // 16, 1), 4)


def prefill_block(capability: tuple[int, int]) -> PrefillBlock:
    """Return the block of `prefill`: 64 queries are an operand of Hopper's warp groups, and spill elsewhere."""
    return PrefillBlock(64 if capability[0] == 9 else 32, 32, 8, 2)


def program_queries(dim: int, ratio: int, tokens: int) -> int:
    """Return the queries of a program, for `ratio` heads of a KV head times the most `tokens` of a sequence in a step.

    With one token a program takes at most 8 heads, and two programs share a larger number. With several tokens it takes
    4, 8 or 16 queries, so that pages are read once for as many as fit and few variants are compiled. At head_dim 256 a
    program of 16 queries would spill registers.
    """
    if tokens == 1:
        return -(-ratio // -(-ratio // 8))
    queries = ratio * tokens
    return 4 if queries <= 4 else 8 if queries <= 8 or dim > 128 else 16


def choose(dim: int, queries: int, bits: int, block_size: int, recent: int, capability: tuple[int, int]) -> Choice:
    """Return the choice for `queries` of a program and `bits` of a key's and a value's element together.

    A tile lies in one page, so it divides `block_size`. On compute capability 9.0, which was measured, the assembler
    balances registers against programs. With a window it misses 12 programs by a few registers, so the limit is 168. On
    other GPUs it would spill some, so a thread may have all 255. With a window of `recent` tokens, 2-bit codes need the
    shared memory and registers of 4-bit codes. At head_dim 192 tiles of 32 would spill up to 896 bytes on 9.0, and
    those of 16 spill 168.
    """
    most = 4 if queries <= 4 else 8 if queries <= 8 else 16
    programs = PROGRAMS[dim, most][0 if bits > 8 else 1 if bits == 8 else 2]
    if recent:
        programs = min(programs, 8 if bits == 4 else 12)
    tile, stages = (TILES[dim], 2) if most <= 8 else (TILES[dim] // 2, 3)
    if dim == 192 and bits == 4 and recent:
        tile = 16
    if dim > 256:
        return Choice(gcd(tile, block_size), stages, programs, 255, grain=64)
    registers = (168 if recent and programs == 12 and 64 < dim <= 128 else None) if capability[0] == 9 else 255
    return Choice(gcd(tile, block_size), stages, programs, registers)


class Taken(NamedTuple):
    """Resources of a program of one warp, from the compiler: registers per thread, and bytes of shared memory."""

    registers: int
    shared: int


def fitting(taken: Taken, shared: int) -> int:
    """Return the number of one-warp programs that fit on a multiprocessor with `shared` bytes of shared memory.

    On compute capability 8.0 to 12.0 a multiprocessor has 65,536 registers of 32 bits. A warp takes a multiple of 256
    of them, and each program reserves 1 KiB of shared memory.
    """
    return min(65536 // (-(-taken.registers // 8) * 8 * 32), shared // (taken.shared + 1024))


def merging(dim: int, groups: int, ratio: int, device: torch.device) -> tuple[int, int, int]:
    """Return query heads, splits in flight, and warps of a program of `reduce`, for the KV heads of all sequences."""
    rows = groups * ratio / multiprocessors(device)
    most, splits, warps = next(way for bound, way in MERGES[dim] if rows <= bound)
    return max(n for n in range(1, most + 1) if ratio % n == 0), splits, warps


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 for a CPU, where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a GPU's multiprocessor; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def overlaps(device: torch.device) -> bool:
    """Return True if a kernel may start while its predecessor ends (programmatic dependent launch, from Hopper on)."""
    return capability(device) >= (9, 0)
