"""Sequences with a recent window, in pages and rings of one pool. The CPU or the GPU code stores them."""

from dataclasses import dataclass, field

import torch

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import attend, round_trip
from kvpilot_kernels.ring import ring_slots
from support.gpu_batch import generator, ordinals, poisoned, some_factors


@dataclass
class Sequences:
    """Keys and values of sequences, and the tokens in their rings.

    Attributes:
        cache: pages and rings, as blocks of one pool; every unwritten byte is 0xFF.
        table: int32 [sequences, blocks].
        ring_table: int32 [sequences, ring_blocks].
        drafts: largest number of draft tokens in a step; the rings have room for them.
        keys, values: [length, kv_heads, dim] for each sequence.
        fine: bool [length] for each sequence, True for tokens written to the ring.
        plain: keys and values as read from pages, float64 [2, length, kv_heads, dim] for each sequence.
        refined: the same, as read from the ring.
    """

    name: str
    dim: int
    lengths: list[int]
    recent: int
    seed: int
    kv_heads: int = 2
    ratio: int = 2
    block_size: int = 16
    calibrated: bool = False
    drafts: int = 0
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng, self.fmt, self.scale = generator(self.seed), formats.parse(self.name), self.dim**-0.5
        count, per = len(self.lengths), -(-max(self.lengths) // self.block_size)
        rings = self.fmt.ring_blocks(self.recent + self.drafts, self.dim, self.block_size)
        self.cache = poisoned(1 + count * (per + rings), self.kv_heads, self.block_size, self.fmt, self.dim)
        blocks = 1 + torch.randperm(count * (per + rings), generator=self.rng).int()
        self.table, self.ring_table = blocks[: count * per].view(count, per), blocks[count * per :].view(count, rings)
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
        self.ring_tokens = self.fmt.ring_layout(self.dim, self.block_size).tokens
        self.cpu = PackedPages(
            self.cache, self.fmt, self.dim, self.factors, ring=self.cache, recent=self.recent, drafts=self.drafts
        )

    def slots(self, sequence: int, begin: int, end: int) -> torch.Tensor:
        """Return the slots of tokens [begin, end) in the pages, int64 [end - begin]."""
        at = torch.arange(begin, end)
        return self.table[sequence].long()[at // self.block_size] * self.block_size + at % self.block_size

    def ring_slots(self, sequence: int, begin: int, end: int) -> torch.Tensor:
        """Return the ring slots of tokens [begin, end), int64, for a step that ends at `end`."""
        at = torch.arange(begin, end)
        rows = self.ring_table[sequence].expand(len(at), -1)
        return ring_slots(at, torch.full_like(at, end), rows, self.recent + self.drafts, self.ring_tokens)

    def store(self, sequence: int, begin: int, end: int, ring: bool = True) -> None:
        """Store tokens [begin, end) in one step.

        Without `ring`, store them only in pages, as if for an earlier request.
        """
        ring_slots = self.ring_slots(sequence, begin, end)
        if not ring:
            ring_slots = torch.full_like(ring_slots, -1)
        new = slice(begin, end)
        self.cpu.store(
            self.keys[sequence][new], self.values[sequence][new], self.slots(sequence, begin, end), ring_slots,
            ordinals(begin, end),
        )  # fmt: skip
        self.fine[sequence][new] = ring_slots >= 0
        # Use the same batch, because another order of sums would sometimes change a code.
        for side, (name, x) in enumerate((("key", self.keys), ("value", self.values))):
            for kept, recent in ((self.plain, False), (self.refined, True)):
                kept[sequence][side, new] = round_trip(x[sequence][new], self.fmt, name, self.factors, recent, begin)

    def poison_rings(self) -> None:
        """Fill every ring with valid rows of tokens that are in no page."""
        tokens = self.ring_table.shape[1] * self.ring_tokens
        for i in range(len(self.lengths)):
            key, value = (torch.randn(tokens, self.kv_heads, self.dim, generator=self.rng) for _ in "kv")
            at = torch.arange(tokens)
            rows = self.ring_table[i].expand(tokens, -1)
            where = ring_slots(at, torch.full_like(at, tokens), rows, tokens, self.ring_tokens)
            # Their pages are unused: always block 0.
            for part in range(0, tokens, self.block_size):
                these = slice(part, part + self.block_size)
                self.cpu.store(key[these], value[these], torch.arange(len(key[these])), where[these])

    def queries(self) -> torch.Tensor:
        """Return queries, float32 [sequences, heads, dim]."""
        return torch.randn(len(self.lengths), self.kv_heads * self.ratio, self.dim, generator=self.rng)

    def decode(self, query: torch.Tensor) -> torch.Tensor:
        """Decode by the CPU code."""
        lens = torch.tensor(self.lengths)
        return self.cpu.decode(query, self.table, lens, self.scale, ring_table=self.ring_table)

    def read_back(self, sequence: int, length: int) -> torch.Tensor:
        """Return keys and values of the first `length` tokens, float64 [2, tokens, kv_heads, dim]."""
        fine = self.fine[sequence][:length] & (torch.arange(length) >= length - self.recent)
        plain, refined = self.plain[sequence][:, :length], self.refined[sequence][:, :length]
        return torch.where(fine[:, None, None], refined, plain)

    def wanted(self, query: torch.Tensor, sequence: int, length: int) -> torch.Tensor:
        """Return the reference's answer to a query over the first `length` tokens, float64 [heads, dim]."""
        key, value = self.read_back(sequence, length)
        return attend(query[None], key, value, self.scale)[0]

    def assert_decode_equals_the_reference(
        self, order: list[int] | None = None, lengths: list[int] | None = None
    ) -> None:
        """Compare every head of every sequence with the reference. `order` is the order of the batch."""
        order, lengths = order or list(range(len(self.lengths))), lengths or self.lengths
        query = self.queries()
        lens = torch.tensor([lengths[i] for i in order])
        out = self.cpu.decode(query, self.table[order], lens, self.scale, ring_table=self.ring_table[order])
        for row, i in enumerate(order):
            wanted = self.wanted(query[row], i, lengths[i])
            assert ((out[row] - wanted).norm(dim=-1) < 1e-4 * wanted.norm(dim=-1)).all()
