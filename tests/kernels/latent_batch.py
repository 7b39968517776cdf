"""Small batches of latent pages on a CPU: realistic entries, sequences of different lengths, unused memory poisoned."""

from dataclasses import dataclass, field

import torch

from kvpilot_formats.latent import ENTRY, RANK, LatentFormat, parse
from kvpilot_kernels.gpu.mla.pages import GpuLatentPages, LatentPlan, LatentShape
from kvpilot_kernels.gpu.mla.tuning import LatentChoice
from kvpilot_kernels.latent.cpu import LatentPages
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_kernels.latent.reference import round_trip
from kvpilot_kernels.reference.hadamard import hadamard

CPU = torch.device("cpu")
PAST_THE_END = -(2**30)
HALF, DEVIATIONS = 2.0**-11, 6


def generator(seed: int) -> torch.Generator:
    """Return a generator with a fixed seed."""
    return torch.Generator().manual_seed(seed)


def poisoned(blocks: int, block_size: int, fmt: LatentFormat) -> torch.Tensor:
    """Return a cache whose every byte is 0xFF: codes at their largest, and all scales NaN."""
    return torch.full((blocks, block_size, fmt.row_bytes), 255, dtype=torch.uint8)


def some_entries(count: int, rng: torch.Generator, outliers: int = 12, size: float = 1.0) -> torch.Tensor:
    """Return realistic entries, float32 [count, 576].

    Latents look like the output of an RMSNorm with a learned weight: some channels are 8 times the others, and tokens
    share a mean. RoPE parts have their own large channels, and no norm.
    """
    weight = torch.rand(ENTRY, generator=rng) + 0.5
    weight[torch.randperm(ENTRY, generator=rng)[:outliers]] *= 8
    x = torch.randn(count, ENTRY, generator=rng) + 0.3 * torch.randn(ENTRY, generator=rng)
    x[:, :RANK] /= x[:, :RANK].square().mean(-1, keepdim=True).sqrt()
    return x * weight * size


def some_factors(rng: torch.Generator) -> LatentFactors:
    """Return factors that change results: means of the data's size, and scales from a half to two."""
    scale = (torch.rand(ENTRY, generator=rng) * 2 - 1).exp2()
    return LatentFactors(torch.randn(ENTRY, generator=rng), scale)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate both parts of entries [..., 576] in float64."""
    parts = (x[..., :RANK].double(), x[..., RANK:].double())
    return torch.cat([part @ hadamard(part.shape[-1], torch.float64) for part in parts], -1)


@dataclass
class LatentBatch:
    """Sequences of `lengths` tokens, stored by the CPU code through a shuffled block table.

    Attributes:
        heads, tile, stages, warps, wave: launch parameters of decode; a small wave makes splits of many tiles.
        cache: all bytes outside stored tokens are 0xFF.
        table: int32 [sequences, blocks].
        lens: int32 [sequences].
        entries: the exact entries of each sequence, [length, 576].
    """

    name: str
    lengths: list[int]
    seed: int
    heads: int = 3
    block_size: int = 16
    tile: int = 16
    stages: int = 2
    warps: int = 4
    wave: int = 1
    calibrated: bool = False
    size: float = 1.0
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng, self.fmt, count = generator(self.seed), parse(self.name), len(self.lengths)
        self.scale = 192**-0.5 / self.size**2
        per = max(1, -(-max(self.lengths, default=1) // self.block_size))
        self.cache = poisoned(per * count + 1, self.block_size, self.fmt)
        self.factors = some_factors(self.rng) if self.calibrated else LatentFactors.identity()
        self.table = 1 + torch.randperm(per * count, generator=self.rng).view(count, per)
        self.lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.entries = [some_entries(n, self.rng, size=self.size) for n in self.lengths]
        self.cpu = LatentPages(self.cache, self.fmt, self.factors)
        for i, (n, entries) in enumerate(zip(self.lengths, self.entries, strict=True)):
            at = torch.arange(n)
            slots = self.table[i][at // self.block_size] * self.block_size + at % self.block_size
            order = torch.randperm(n, generator=self.rng)  # tokens are stored independently
            self.cpu.store(entries[order, :RANK], entries[order, RANK:], slots[order])
            self.table[i, -(-n // self.block_size) :] = PAST_THE_END
        self.table = self.table.int()
        self.shape = LatentShape(self.fmt, self.heads, self.block_size, CPU)
        self.shape.choice = LatentChoice(self.shape.choice.heads, self.tile, self.stages, self.warps, 1)
        self.shape.wave = self.wave
        self.pages = GpuLatentPages(self.cache, self.shape, self.factors)

    def queries(self) -> torch.Tensor:
        """Return queries, float32 [sequences, heads, 576]."""
        return torch.randn(len(self.lengths), self.heads, ENTRY, generator=self.rng) * self.size

    def plan(self) -> LatentPlan:
        """Return the step's plan. Its scratch memory is full of NaN."""
        plan = LatentPlan(self.shape, max(1, len(self.lengths)))
        for scratch in (plan.partial, plan.lse, plan.rotated, plan.sums):
            scratch.fill_(torch.nan)
        plan.update(self.lens)
        return plan

    def prepare(self, query: torch.Tensor, plan: LatentPlan) -> None:
        """Prepare queries in the plan."""
        self.pages.prepare(query[..., :RANK], query[..., RANK:], plan, self.scale)

    def decode(self, query: torch.Tensor) -> torch.Tensor:
        """Return the output of plan, prepare, decode and reduce, float32 [sequences, heads, 512]."""
        plan, out = self.plan(), torch.full((*query.shape[:2], RANK), torch.nan)
        self.prepare(query, plan)
        self.pages.decode(self.table, self.lens, plan, out)
        return out

    def assert_within_rounding(self, out: torch.Tensor, wanted: torch.Tensor, query: torch.Tensor, i: int) -> None:
        """Compare sequence i's output [heads, 512] with the reference, within the kernels' rounding to float16.

        Decode rounds twice. An element q_i of the prepared query is off by e_i, up to 2^-11 of itself. The output o
        then moves by sum_i e_i scale sum_t p_t x_ti (v_t - o), with probabilities p, rotated entries x and values v.
        Each token's weight is off by up to 2^-11 of its contribution. These errors are independent and uniform, so the
        mean of their squares is a third of the largest square. The root of the summed squares is one standard
        deviation.
        """
        back = round_trip(self.entries[i], self.fmt, self.factors)
        mean, scale = self.factors.mean.double(), self.factors.scale.double()
        rows = rotated((back - mean) * scale)
        turned = rotated(query.double() / scale)
        p = (torch.einsum("hd,td->ht", query.double(), back) * self.scale).softmax(-1)
        value = back[:, :RANK]
        away = value[None] - (p @ value)[:, None]  # [heads, tokens, 512]
        moved = torch.einsum("ht,ti,htd->hid", p, rows, away) * self.scale
        of_query = ((HALF * turned) ** 2 * moved.square().sum(-1)).sum(-1)
        of_weights = (p**2 * (value - mean[:RANK]).square().sum(-1)).sum(-1) * HALF**2
        limit = DEVIATIONS * ((of_query + of_weights) / 3).sqrt() + 1e-5 * wanted.norm(dim=-1)
        off = (out.double() - wanted).norm(dim=-1)
        assert (off <= limit).all(), f"off by {off.tolist()}, where rounding explains {limit.tolist()}"
