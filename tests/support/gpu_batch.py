"""Small batches for the GPU kernels on a CPU. Launch parameters are fixed, and all unused memory has poison values."""

import itertools
from dataclasses import dataclass, field

import torch

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.pages import Cut, GpuPages, Plan, Several, Shape
from kvpilot_kernels.gpu.launch.tuning import Choice
from kvpilot_kernels.reference.attention import round_trip

CPU = torch.device("cpu")
PADDED = (48, 80, 112, 160, 200, 384)
"""Head dimensions whose rows have padding, one for each of `formats.HEAD_DIMS`."""
DIMS = (*formats.HEAD_DIMS, *PADDED)
PAST_THE_END = -(2**30)
"""Block index after a sequence's end. A kernel that uses it leaves the cache, and so fails."""


def generator(seed: int) -> torch.Generator:
    """Return a generator of random numbers with this seed."""
    return torch.Generator().manual_seed(seed)


def poisoned(blocks: int, kv_heads: int, block_size: int, fmt: formats.Format, dim: int) -> torch.Tensor:
    """Return a cache in which every byte is 0xFF, so that codes have their largest value and all scales are NaN."""
    return torch.full((blocks, kv_heads, block_size, fmt.row_bytes(dim)), 255, dtype=torch.uint8)


BLOCK_OUTERMOST = ("BHLNC", "BLHNC")
"""vLLM's cache layouts in which a block holds the pages of all layers.

The letters are the dimensions, outermost first: blocks, layers, heads, tokens (N) and bytes of a token (C).
"""
MINE, OTHERS = 1, (0, 2)
"""Layers in the memory that `among_layers` returns: the layer under test, and the layers that no kernel may
change."""


def among_layers(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """Return memory for three layers in vLLM's `layout`, uint8 [3, *cache.shape].

    Layer `MINE` is a copy of the cache. Every byte of the other layers is 0x55.
    """
    shape = (3, *cache.shape)
    memory = torch.full([shape["LBHNC".index(dim)] for dim in layout], 0x55, dtype=torch.uint8)
    layers = memory.permute([layout.index(dim) for dim in "LBHNC"])
    layers[MINE] = cache
    return layers


def ordinals(begin: int, end: int) -> torch.Tensor:
    """Return the numbers 1, 2, ... of the tokens at positions `begin` to `end` - 1, int32 [end - begin]."""
    return torch.arange(begin + 1, end + 1, dtype=torch.int32)


def some_factors(kv_heads: int, dim: int, rng: torch.Generator) -> Factors:
    """Return factors with an effect: means of the data's size, doubled for the first key, and scales of 0.5 to 2."""
    means = [torch.randn(kv_heads, dim, generator=rng) for _ in "kv"]
    first = 2 * means[0].roll(1, -1)
    scales = [(torch.rand(kv_heads, dim, generator=rng) * 2 - 1).exp2() for _ in "kv"]
    return Factors(means[0], scales[0], means[1], scales[1], first)


def launch_as(shape: Shape, tile: int, stages: int, wave: int) -> Shape:
    """Return the shape with these launch parameters.

    Args:
        tile: tokens of a tile.
        stages: tiles in flight.
        wave: number of splits that run at once. If it is small, splits have many tiles.
    """

    def cut(tokens: int = 1) -> Cut:
        take = tuning.program_queries(shape.row_dim, shape.ratio, tokens)
        return Cut(take, -(-shape.ratio * tokens // take), Choice(tile, stages, 1), wave)

    shape.cut = cut  # type: ignore[method-assign]
    return shape


def several(counts: list[int], padding: int = 0) -> Several:
    """Return the row metadata of a step: `counts` query tokens for each sequence, followed by rows of padding."""
    owners = torch.cat([torch.full((n,), i) for i, n in enumerate(counts)] + [torch.full((padding,), -1)])
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return Several(starts, owners.int(), max(2, *counts))


def decode_rows(pages: GpuPages, table: torch.Tensor, lengths: list[int], counts: list[int] | None, query: torch.Tensor,
                scale: float) -> torch.Tensor:  # fmt: skip
    """Decode queries whose own tokens are not stored in pages. Return float32 [rows, heads, dim].

    Args:
        table: block table, [sequences, blocks].
        lengths: tokens of each sequence in pages.
        counts: rows of `query` for each sequence; None means one row each. Further rows of `query` are padding.
        query: [rows, heads, dim].
        scale: factor on scores.
    """
    rows = None if counts is None else several(counts, len(query) - sum(counts))
    plan = Plan(pages.shape, len(lengths), rows.most if rows else 1, len(query))
    for scratch in (plan.partial, plan.lse, plan.units, plan.apart, plan.level):
        scratch.fill_(torch.nan)
    lens, table = torch.tensor(lengths, dtype=torch.int32), table.clone()
    for i, n in enumerate(lengths):
        table[i, -(-n // pages.shape.block_size) :] = PAST_THE_END
    plan.update(lens, several=rows)
    nothing = torch.full((len(query), pages.shape.kv_heads, pages.shape.head_dim), torch.nan)
    padding = torch.full((len(query),), -1)
    pages.store(query, nothing, nothing, padding, plan, len(query), scale)
    out = torch.full_like(query, torch.nan)
    pages.decode(table, lens, plan, out)
    return out


@dataclass
class Batch:
    """Sequences of `lengths` tokens, stored by the CPU code through a shuffled block table.

    Attributes:
        name: the KV-cache dtype.
        ratio: query heads for each KV head.
        tile, stages, wave: launch parameters of decode, as in `launch_as`.
        softcap: cap on scores; 0 for none.
        calibrated: True for random factors in place of the identity.
        cache: all bytes outside stored tokens are 0xFF.
        table: int32 [sequences, blocks].
        lens: int32 [sequences].
        keys, values: the exact vectors of each sequence, [length, kv_heads, dim].
    """

    name: str
    dim: int
    lengths: list[int]
    seed: int
    kv_heads: int = 2
    ratio: int = 1
    block_size: int = 16
    tile: int = 16
    stages: int = 2
    wave: int = 1
    softcap: float = 0.0
    calibrated: bool = False
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng, self.fmt = generator(self.seed), formats.parse(self.name)
        self.scale, count = self.dim**-0.5, len(self.lengths)
        per = max(1, -(-max(self.lengths, default=1) // self.block_size))
        self.cache = poisoned(per * count + 1, self.kv_heads, self.block_size, self.fmt, self.dim)
        self.factors = Factors.identity(self.kv_heads, self.dim)
        if self.calibrated:
            self.factors = some_factors(self.kv_heads, self.dim, self.rng)
        self.table = 1 + torch.randperm(per * count, generator=self.rng).view(count, per)
        self.lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.keys, self.values = (
            [torch.randn(n, self.kv_heads, self.dim, generator=self.rng) for n in self.lengths] for _ in "kv"
        )
        self.cpu = PackedPages(self.cache, self.fmt, self.dim, self.factors)
        self.slots = [self._slots(i, n) for i, n in enumerate(self.lengths)]
        for key, value, slots in zip(self.keys, self.values, self.slots, strict=True):
            self.cpu.store(key, value, slots, ordinals=ordinals(0, len(slots)))
        for i, n in enumerate(self.lengths):
            self.table[i, -(-n // self.block_size) :] = PAST_THE_END
        self.table = self.table.int()
        self.shape = Shape(self.fmt, self.dim, self.kv_heads, self.ratio, self.block_size, CPU,
                           self.softcap)  # fmt: skip
        launch_as(self.shape, self.tile, self.stages, self.wave)
        self.pages = GpuPages(self.cache, self.shape, self.factors)

    def _slots(self, sequence: int, length: int) -> torch.Tensor:
        at = torch.arange(length)
        return self.table[sequence][at // self.block_size] * self.block_size + at % self.block_size

    def plan(self) -> Plan:
        """Return the step's plan. All numbers in its scratch memory are NaN."""
        plan = Plan(self.shape, max(1, len(self.lengths)))
        for scratch in (plan.partial, plan.lse, plan.units, plan.apart, plan.level):
            scratch.fill_(torch.nan)
        plan.update(self.lens)
        return plan

    def queries(self) -> torch.Tensor:
        """Return random queries, float32 [sequences, heads, dim]."""
        return torch.randn(len(self.lengths), self.kv_heads * self.ratio, self.dim, generator=self.rng)

    def read_back(self, sequence: int) -> list[torch.Tensor]:
        """Return keys and values as the CPU code would read them from pages, float64 [tokens, kv_heads, dim]."""
        return [
            round_trip(x[sequence], self.fmt, side, self.factors)
            for x, side in ((self.keys, "key"), (self.values, "value"))
        ]

    def rotate(self, query: torch.Tensor, plan: Plan) -> None:
        """Rotate queries into the plan by `store`, which writes no token, because every slot is padding."""
        nothing = torch.full((len(self.lengths), self.kv_heads, self.dim), torch.nan)
        padding = torch.full((len(self.lengths),), -1)
        self.pages.store(query, nothing, nothing, padding, plan, len(self.lengths), self.scale)

    def decode(self, query: torch.Tensor) -> torch.Tensor:
        """Run store, plan, decode and reduce, and return the attention, float32 [sequences, heads, dim]."""
        plan, out = self.plan(), torch.full_like(query, torch.nan)
        self.rotate(query, plan)
        self.pages.decode(self.table, self.lens, plan, out)
        return out
