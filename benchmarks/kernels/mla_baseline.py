"""Baseline for latent decode in `mla_decode.py` without vLLM: the same attention over a cache of 16 or 8 bits.

It is a Triton kernel with splits of the context, like those that engines use on GPUs without a special kernel. In its
matrix products, heads are rows (M). A tile of cached vectors is loaded once, and used as keys and as values. The
softmax is online. The cache is bfloat16, or float8 (e4m3, scale 1) that the kernel converts to bfloat16 before the
tensor cores. `CHOICES` has the launch choices to try with `attend`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

RANK, ROPE, ENTRY = 512, 64, 576


@triton.jit
def baseline_kernel(query_ptr, cache_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, page_stride, table_stride, scale,
                    HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
                    SPLITS: tl.constexpr):  # fmt: skip
    """Compute attention over one split. Grid (cdiv(HEADS, ROWS), sequences, SPLITS).

    query: bfloat16 [sequences, HEADS, 576].
    cache: [blocks, PAGE, 576].
    out: float32 [sequences, SPLITS, HEADS, 512], the normalised result of each split.
    lse: float32 [sequences, SPLITS, HEADS], the base-2 logarithm of each split's sum of exponentials.
    scale: softmax scale times log2(e), because the kernel computes powers of 2.
    """
    sequence = tl.program_id(1)
    length = tl.load(lens_ptr + sequence)
    per = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    start = tl.program_id(2) * per
    end = tl.minimum(start + per, length)
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, 512)
    r = 512 + tl.arange(0, 64)
    at = query_ptr + (sequence * HEADS + head)[:, None] * 576
    query = tl.load(at + d[None, :], mask=(head < HEADS)[:, None], other=0.0)
    rope = tl.load(at + r[None, :], mask=(head < HEADS)[:, None], other=0.0)
    top = tl.full([ROWS], -1e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, 512], tl.float32)
    token = tl.arange(0, TILE)
    for t in range(start, end, TILE):
        page = tl.load(table_ptr + sequence * table_stride + t // PAGE).to(tl.int64) * page_stride
        rows = cache_ptr + page + ((t % PAGE) + token)[:, None] * 576
        latent = tl.load(rows + d[None, :]).to(tl.bfloat16)
        key = tl.load(rows + r[None, :]).to(tl.bfloat16)
        s = tl.dot(query, tl.trans(latent))
        s = tl.dot(rope, tl.trans(key), s) * scale
        s = tl.where((t + token < end)[None, :], s, -1e38)
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        old = tl.exp2(top - higher)
        norm = norm * old + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), latent, acc * old[:, None])
        top = higher
    to = (sequence * SPLITS + tl.program_id(2)) * HEADS + head
    norm = tl.where(start < end, norm, 1.0)
    tl.store(out_ptr + to[:, None] * 512 + d[None, :], acc / norm[:, None], mask=(head < HEADS)[:, None])
    tl.store(lse_ptr + to, tl.where(start < end, tl.log2(norm) + top, -1e30), mask=head < HEADS)


@dataclass(frozen=True)
class Choice:
    """Launch parameters of the baseline's kernel.

    Attributes:
        tile: tokens per iteration.
        stages: pipeline stages of the loop.
        warps: warps of a program.
        programs: programs per multiprocessor.
    """

    tile: int
    stages: int
    warps: int
    programs: int


CHOICES = [
    Choice(*way)
    for way in ((16, 3, 4, 2), (32, 2, 4, 2), (32, 2, 8, 2), (32, 3, 4, 1), (64, 2, 4, 1), (64, 2, 8, 1))
]  # fmt: skip


class Baseline:
    """One layer's attention over a cache of 16 or 8 bits, with the scratch memory of one step.

    Args:
        table: block table, int32 [sequences, blocks].
        lens: lengths of the sequences, int32 [sequences].
        heads: number of query heads.
        choice: launch choice.
    """

    def __init__(self, table: torch.Tensor, lens: torch.Tensor, heads: int, choice: Choice) -> None:
        self.table, self.lens, self.heads, self.choice = table, lens, heads, choice
        self.rows = 16 if heads <= 16 else 32 if heads <= 32 else 64
        self.blocks = triton.cdiv(heads, self.rows)
        count = torch.cuda.get_device_properties(table.device).multi_processor_count * choice.programs
        self.splits = max(1, count // (self.blocks * len(lens)))
        self.out = torch.empty(len(lens), self.splits, heads, RANK, device=table.device)
        self.lse = torch.empty(len(lens), self.splits, heads, device=table.device)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, scale: float) -> None:
        """Write the result of every split into `out` and `lse`.

        Args:
            query: bfloat16 [sequences, heads, 576].
            cache: bfloat16 or float8_e4m3fn [blocks, page, 576].
            scale: softmax scale.
        """
        baseline_kernel[(self.blocks, len(self.lens), self.splits)](
            query, cache, self.table, self.lens, self.out, self.lse, cache.stride(0), self.table.stride(0),
            scale * 1.4426950408889634, HEADS=self.heads, ROWS=self.rows, TILE=self.choice.tile, PAGE=cache.shape[1],
            SPLITS=self.splits, num_warps=self.choice.warps, num_stages=self.choice.stages,
        )  # fmt: skip

    def merged(self) -> torch.Tensor:
        """Merge the splits in plain torch, for checks. Return float32 [sequences, heads, 512]."""
        weight = torch.softmax(self.lse * 0.6931471805599453, 1)
        return (weight[..., None] * self.out).sum(1)


def choices(heads: int) -> Iterator[Choice]:
    """Return the launch choices to try for this many heads. More than 32 heads need 8 warps for their accumulators."""
    return (choice for choice in CHOICES if heads <= 32 or choice.warps == 8)
