"""Sequences with a recent window, in blocks and residual pages of one pool. The CPU or the GPU code stores them."""

from dataclasses import dataclass, field

import torch

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import attend, round_trip
from kvpilot_kernels.residuals import Residuals
from support.gpu_batch import generator, ordinals, poisoned, some_factors


@dataclass
class Sequences:
    """Keys and values of sequences. Some of their blocks have residual pages.

    Attributes:
        newest: how many of a sequence's newest blocks decode reads with residuals.
        mapped: chance that a block has residual pages from the start.
        cache: blocks and residual pages of one pool; every unwritten byte is 0xFF.
        table: int32 [sequences, blocks].
        residuals: the map from blocks to residual pages.
        free: ids of residual pages that no block has.
        keys, values: [length, kv_heads, dim] for each sequence.
        fine: bool [length] for each sequence, True for tokens that were stored with residuals.
        plain: keys and values as read without residuals, float64 [2, length, kv_heads, dim] for each sequence.
        refined: the same, as read with residuals.
    """

    name: str
    dim: int
    lengths: list[int]
    newest: int
    seed: int
    kv_heads: int = 2
    ratio: int = 2
    block_size: int = 16
    calibrated: bool = False
    mapped: float = 1.0
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng, self.fmt, self.scale = generator(self.seed), formats.parse(self.name), self.dim**-0.5
        count, per = len(self.lengths), -(-max(self.lengths) // self.block_size)
        n = self.fmt.residual_pages(self.dim, self.block_size)
        blocks = 1 + torch.randperm(count * per * (1 + n), generator=self.rng).int()
        self.cache = poisoned(1 + len(blocks), self.kv_heads, self.block_size, self.fmt, self.dim)
        self.table, self.free = blocks[: count * per].view(count, per), blocks[count * per :].tolist()
        self.residuals = Residuals(
            torch.zeros(len(self.cache), n, dtype=torch.int32), torch.tensor([self.newest], dtype=torch.int32)
        )
        self.factors = Factors.identity(self.kv_heads, self.dim)
        if self.calibrated:
            self.factors = some_factors(self.kv_heads, self.dim, self.rng)
        self.keys, self.values = (
            [torch.randn(n, self.kv_heads, self.dim, generator=self.rng) for n in self.lengths] for _ in "kv"
        )
        self.fine = [torch.zeros(n, dtype=torch.bool) for n in self.lengths]
        self.plain, self.refined = (
            [torch.full((2, *key.shape), torch.nan, dtype=torch.float64) for key in self.keys] for _ in "pr"
        )
        self.cpu = PackedPages(self.cache, self.fmt, self.dim, self.factors, self.residuals)
        for sequence, block in torch.nonzero(torch.rand(count, per, generator=self.rng) < self.mapped).tolist():
            self.claim(sequence, block)

    def claim(self, sequence: int, block: int) -> None:
        """Give free residual pages to a block of a sequence."""
        n = self.residuals.pages.shape[1]
        pages, self.free = self.free[:n], self.free[n:]
        self.residuals.pages[self.table[sequence, block]] = torch.tensor(pages, dtype=torch.int32)

    def give_up(self, sequence: int, block: int) -> None:
        """Take a block's residual pages. The next claim gets them, with the residuals that they hold."""
        pages = self.residuals.pages[self.table[sequence, block]]
        self.free = pages.tolist() + self.free
        pages.zero_()
        self.fine[sequence][block * self.block_size : (block + 1) * self.block_size] = False

    def slots(self, sequence: int, begin: int, end: int) -> torch.Tensor:
        """Return the slots of tokens [begin, end), int64 [end - begin]."""
        at = torch.arange(begin, end)
        return self.table[sequence].long()[at // self.block_size] * self.block_size + at % self.block_size

    def store(self, sequence: int, begin: int, end: int) -> None:
        """Store tokens [begin, end) in one step."""
        new, slots = slice(begin, end), self.slots(sequence, begin, end)
        self.cpu.store(self.keys[sequence][new], self.values[sequence][new], slots, ordinals(begin, end))
        self.fine[sequence][new] = self.residuals.pages[slots // self.block_size, 0] > 0
        # Use the same batch, because another order of sums would sometimes change a code.
        for side, (name, x) in enumerate((("key", self.keys), ("value", self.values))):
            for kept, recent in ((self.plain, False), (self.refined, True)):
                kept[sequence][side, new] = round_trip(x[sequence][new], self.fmt, name, self.factors, recent, begin)

    def queries(self) -> torch.Tensor:
        """Return queries, float32 [sequences, heads, dim]."""
        return torch.randn(len(self.lengths), self.kv_heads * self.ratio, self.dim, generator=self.rng)

    def decode(self, query: torch.Tensor) -> torch.Tensor:
        """Decode by the CPU code."""
        return self.cpu.decode(query, self.table, torch.tensor(self.lengths), self.scale)

    def read_back(self, sequence: int, length: int, end: int | None = None) -> torch.Tensor:
        """Return keys and values of the first `length` tokens, float64 [2, tokens, kv_heads, dim].

        `end` is the number of stored tokens, if it is not `length`.
        """
        first = (-(-(end or length) // self.block_size) - int(self.residuals.newest)) * self.block_size
        fine = self.fine[sequence][:length] & (torch.arange(length) >= first)
        plain, refined = self.plain[sequence][:, :length], self.refined[sequence][:, :length]
        return torch.where(fine[:, None, None], refined, plain)

    def wanted(self, query: torch.Tensor, sequence: int, length: int, end: int | None = None) -> torch.Tensor:
        """Return the reference's answer to a query over the first `length` tokens, float64 [heads, dim]."""
        key, value = self.read_back(sequence, length, end)
        return attend(query[None], key, value, self.scale)[0]

    def assert_decode_equals_the_reference(
        self, order: list[int] | None = None, lengths: list[int] | None = None, ends: list[int] | None = None
    ) -> None:
        """Compare every head of every row with the reference.

        Args:
            order: the sequence of each row of the batch; a sequence may have several rows.
            lengths: tokens that each row attends to.
            ends: stored tokens of each row's sequence, if they are not `lengths`.
        """
        order = order or list(range(len(self.lengths)))
        lengths = lengths or [self.lengths[i] for i in order]
        query = torch.randn(len(order), self.kv_heads * self.ratio, self.dim, generator=self.rng)
        out = self.cpu.decode(query, self.table[order], torch.tensor(lengths), self.scale,
                              newest_ends=None if ends is None else torch.tensor(ends))  # fmt: skip
        for row, (i, length, end) in enumerate(zip(order, lengths, ends or lengths, strict=True)):
            wanted = self.wanted(query[row], i, length, end)
            assert ((out[row] - wanted).norm(dim=-1) < 1e-4 * wanted.norm(dim=-1)).all()
