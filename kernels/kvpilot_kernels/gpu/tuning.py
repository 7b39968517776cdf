"""Launch choices of decode: tile, stages, and how many programs fit a multiprocessor.

Kept as tables, so that no user waits for tuning. Measured on an H200 (2026-11-22, Triton 3.6): at head_dim 128 and 256
8, 10 to 13, 15 and 16 programs, in batches from 1 x 64K and 8 x 1K to 32 x 16K; 64 tokens of 2 stages in flight were
best before keys were 8-bit integers (2026-11-21), and 32 at 256. Rows for head_dim 64 and 96 follow from registers;
192 has what 256 has: nothing else was tried there.
Decode of 8 queries with a recent window spills up to 480 bytes, and that of several tokens up to 512
(docs/benchmarks/kernel-resources.md). At 512 6, 7 and 8 programs of 8 queries, 5 to 8 of 4, and tiles of 16 and 32
tokens were timed (2026-11-24), with splits of single tiles; that splits are multiples of 64 tokens there came after it.
Blocks of `store` and `gather`, `MERGES`, and 168 registers of decode with a window were timed on an H100 (2026-11-25
and 26), in `k4v4`, store of prompts in `k2v2`, too; other formats and GPUs follow from them. A merge of rows of 192 in
one warp spills where two are as good but for a tenth.
`benchmarks/kernels/decode.py` and `prompts.py` time what the tables say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, inf
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Choice:
    """`tile` tokens a turn, `stages` tiles in flight, `programs` that fit one multiprocessor at once.

    `registers` a thread may have, None to let the assembler weigh them against programs: it may spill some. `grain` is
    what splits are multiples of in tokens, None for the tile.
    """

    tile: int
    stages: int
    programs: int
    registers: int | None = None
    grain: int | None = None


FUSED = {"enable_fp_fusion": True}
"""Of every launch that computes with floats: a multiplication and an addition are one instruction. Triton 3.9 warns
that later versions will not do so by default; all figures of ours are with it."""

TILES: dict[int, int] = {64: 64, 96: 64, 128: 64, 192: 32, 256: 32, 512: 16}
"""Tokens of a tile by elements of a row, of up to 8 queries; of 16 it is half of that."""

PROGRAMS: dict[tuple[int, int], tuple[int, int, int]] = {
    (64, 4): (16, 16, 16), (64, 8): (16, 16, 16), (96, 4): (8, 12, 16), (96, 8): (8, 8, 8), (128, 4): (8, 12, 16),
    (128, 8): (8, 8, 8), (192, 4): (12, 12, 16), (192, 8): (8, 8, 8), (256, 4): (12, 12, 16), (256, 8): (8, 8, 8),
    (64, 16): (8, 8, 8), (96, 16): (8, 8, 8), (128, 16): (8, 8, 8), (512, 4): (8, 8, 8), (512, 8): (8, 8, 8),
}  # fmt: skip
"""By elements of a row and queries (4, 8 or 16 at most); for key and value of more than 8 bits together, 8, less.

No more are counted on than fit with what the compiled kernel takes (`Shape.settle`)."""


@dataclass(frozen=True)
class Block:
    """What a program of `store` or `gather` takes: so many `tokens` of a head, in so many `warps`."""

    tokens: int
    warps: int


@dataclass(frozen=True)
class PrefillBlock:
    """What a program of `prefill` takes: so many `queries` of a head, by so many `keys` at a time, in so many `warps`
    with so many `stages` of keys and values in flight."""

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
"""Programs of `reduce` by elements of a row: up to so many query heads of all sequences for each multiprocessor, the
query heads of a program at most, splits in flight, and warps.

Few sequences leave the GPU idle, and have many splits: then each query head gets a program of its own, and the more
warps the fewer they are. Each choice holds from some number of sequences to its double at least, so that a warm-up with
powers of two meets all of them."""

FEW_TOKENS = 128
"""So many tokens at most are stored as those of a decode step are."""

STORES: dict[int, tuple[Block, Block]] = {
    64: (Block(8, 4), Block(8, 2)), 96: (Block(8, 4), Block(8, 1)), 128: (Block(8, 4), Block(8, 2)),
    192: (Block(8, 4), Block(8, 2)), 256: (Block(4, 4), Block(8, 4)), 512: (Block(4, 4), Block(8, 4)),
}  # fmt: skip
"""Of `store` by elements of a row, for few tokens and for more.

A thread has neighbours of a row, and little crosses warps: small programs are best. Rows with signs (96, 192) need 8
tokens, as many as a product has rows for: of 4, Triton 3.6 made programs that wrote wrong queries on an H100."""

GATHERS: dict[int, Block] = {
    64: Block(8, 2), 96: Block(16, 2), 128: Block(8, 2), 192: Block(4, 1), 256: Block(8, 4), 512: Block(8, 4)
}  # fmt: skip
"""Of `gather` by elements of a row."""


def store_block(dim: int, tokens: int) -> Block:
    """The block of `store` for a launch of so many tokens."""
    return STORES[dim][tokens > FEW_TOKENS]


def gather_block(dim: int) -> Block:
    """The block of `gather`."""
    return GATHERS[dim]


def weigh_warps(tokens: int) -> int:
    """Warps of a program of `weigh` that takes so many tokens at a time: 16 are an operand of one; with more warps than
    that, registers spill on 9.0."""
    return min(max(tokens // 16, 1), 4)


def prefill_block(capability: tuple[int, int]) -> PrefillBlock:
    """The block of `prefill`: 64 queries are an operand of Hopper's warp groups, and spill elsewhere."""
    return PrefillBlock(64 if capability[0] == 9 else 32, 32, 8, 2)


def program_queries(dim: int, ratio: int, tokens: int) -> int:
    """Queries that a program takes of the `ratio` heads of a KV head times the most `tokens` of a sequence in a step.

    Of one token, 8 heads at most, and of more than 8 heads each of two programs takes half. Of several tokens 4, 8 or
    16: pages are read once for as many as fit, and few variants are compiled. At head_dim 256 registers of 16 spill.
    """
    if tokens == 1:
        return -(-ratio // -(-ratio // 8))
    queries = ratio * tokens
    return 4 if queries <= 4 else 8 if queries <= 8 or dim > 128 else 16


def choose(dim: int, queries: int, bits: int, block_size: int, recent: int, capability: tuple[int, int]) -> Choice:
    """The choice for `queries` of a program and `bits` of a key's and a value's element together.

    The tile divides `block_size`, as a tile lies in one page. On 9.0, where that was measured, the assembler weighs
    registers against programs, but where it is a few off with a window: 12 programs fit with 168. On others it would
    spill some, and a thread may have all 255. With a window of `recent`
    tokens 2 bits need the shared memory and registers of 4; at head_dim 192 tiles of 32 would spill up to 896 bytes on
    9.0, those of 16 168.
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
    """What a program of one warp takes, as it was compiled: registers of a thread, and bytes of shared memory."""

    registers: int
    shared: int


def fitting(taken: Taken, shared: int) -> int:
    """Programs of one warp that a multiprocessor with so many bytes of `shared` memory holds at once.

    From compute capability 8.0 to 12.0: it has 65,536 registers of 32 bits, of which a warp takes 256 at a time, and
    keeps 1 KiB of shared memory of each program for itself.
    """
    return min(65536 // (-(-taken.registers // 8) * 8 * 32), shared // (taken.shared + 1024))


def merging(dim: int, groups: int, ratio: int, device: torch.device) -> tuple[int, int, int]:
    """Query heads, splits in flight, and warps of a program of `reduce`, for the KV heads of all sequences together."""
    rows = groups * ratio / multiprocessors(device)
    most, splits, warps = next(way for bound, way in MERGES[dim] if rows <= bound)
    return max(n for n in range(1, most + 1) if ratio % n == 0), splits, warps


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a GPU's multiprocessor; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch, from Hopper on)."""
    return capability(device) >= (9, 0)
