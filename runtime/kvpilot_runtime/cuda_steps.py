"""What a step of the CUDA backend does, worked out once for all layers: which rows decode, how contexts are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu import tuning
from kvpilot_kernels.gpu.pages import GpuPages, Plan, Shape
from kvpilot_kernels.gpu.ring import fill_ring_slots
from kvpilot_runtime.backend import PackedBuilder
from kvpilot_runtime.recent import Rings
from kvpilot_runtime.speculation import drafts, owners

MOST_ROWS = 2048
"""Rows of decode in a step with drafts: the kernel that cuts their work compares 128 splits with each, and for 4,096
takes 12 s to compile. Sequences that come after so many rows are served as prompts are."""


def decode_rows(vllm_config: Any) -> int:
    """The most rows that decode in a step, padding of captured graphs among them."""
    scheduler = vllm_config.scheduler_config
    batch, graphs = scheduler.max_num_batched_tokens, vllm_config.compilation_config.max_cudagraph_capture_size or 0
    drafted = min(scheduler.max_num_seqs * (1 + drafts(vllm_config)), batch, MOST_ROWS)
    return int(max(scheduler.max_num_seqs, drafted, min(graphs, batch)))


class RowTable:
    """A block table with a row for each token that decodes, at a fixed address that captured graphs read.

    `table`: int32 [rows, columns], a multiple of 16 columns.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.table = torch.zeros(rows, -(-columns // 16) * 16, dtype=torch.int32, device=device)

    def fill(self, block_table: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """The rows of the sequences `owner`, int64 [rows], of `block_table`, int32 [sequences, blocks]."""
        columns = min(block_table.shape[1], self.table.shape[1])
        rows = self.table[: owner.shape[0]]
        rows[:, :columns] = block_table[:, :columns][owner]
        return rows


@dataclass
class ContextChunk:
    """A part of the context of all prefilling sequences: tokens [begin, begin + length) of each.

    Attributes:
        longest, total: of the lengths. rows: int32 [sequences + 1], where each sequence's tokens start in 16 bits.
    """

    begin: int
    longest: int
    total: int
    rows: torch.Tensor


@dataclass
class Prefills:
    """The sequences with several new tokens; they follow those that decode.

    Attributes:
        starts: int32 [sequences + 1], first rows counted from the first prefilling token.
        longest, tokens: new tokens of one sequence at most, and of all; rows after them are padding.
        block_table: int32 [sequences, blocks]. ordinals: int32 [tokens], each one's place in its sequence from 1 on.
        context_chunks: of their contexts, empty where nobody has one.
        whole: context and new tokens at once, where chunks read themselves back (`PREFILL_FROM_PAGES`).
    """

    starts: torch.Tensor
    longest: int
    tokens: int
    block_table: torch.Tensor
    ordinals: torch.Tensor
    context_chunks: list[ContextChunk]
    whole: ContextChunk | None = None


@dataclass
class Metadata:
    """What `forward` needs of a batch: the first `decodes` rows decode, the others are `prefills`.

    Attributes:
        block_table: int32 [decodes or more, blocks], of the rows that decode. seq_lens: int32 [decodes], how many
            tokens each of them sees.
        ordinals: int32 [tokens without padding], each token's place in its sequence from 1 on.
    """

    plan: Plan
    decodes: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    ordinals: torch.Tensor
    prefills: Prefills | None


class CudaRingBuilder(PackedBuilder):
    """Where a step's tokens go in the rings, in buffers that captured graphs read."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.width = self.reorder_batch_threshold = 1 + drafts(vllm_config)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        rows = max(vllm_config.scheduler_config.max_num_batched_tokens, graphs)
        self.slots = torch.full((rows,), -1, device=device)
        self.rows = RowTable(decode_rows(vllm_config), kv_cache_spec.ring_blocks, device) if self.width > 1 else None
        sequences = max(vllm_config.scheduler_config.max_num_seqs, graphs)
        for count in {2**i for i in range(sequences.bit_length())}:  # every variant that serving can reach
            zeros = torch.zeros(count + 1, kv_cache_spec.ring_blocks, dtype=torch.int32, device=device)
            self._fill(self.slots[:1], zeros[:, 0].contiguous(), zeros[:-1, 0].contiguous(), zeros[:-1])

    def describe(self, common: Any) -> Rings:
        """Rings of one batch; what a captured graph reads is rewritten in place."""
        slots = self.slots[: common.slot_mapping.shape[0]]
        table = common.block_table_tensor[: common.num_reqs, : self.kv_cache_spec.ring_blocks]
        lens = common.seq_lens[: common.num_reqs]
        self._fill(slots, common.query_start_loc, lens, table)
        if self.rows is not None:  # the rows that decode are among the first
            rows = min(len(slots), common.num_reqs * self.width, len(self.rows.table))
            owner, _ = owners(common.query_start_loc[: common.num_reqs + 1], lens, rows)
            table = self.rows.fill(table, owner)[:, : self.kv_cache_spec.ring_blocks]
        return Rings(slots, table)

    def _fill(self, slots: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor) -> None:
        fill_ring_slots(slots, starts, lens, table, self.kv_cache_spec.kept, self.kv_cache_spec.ring_tokens)


class CudaBuilder(PackedBuilder):
    """Cuts a batch's work, once for all layers that share the shape of this group."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        impl = layer.impl
        self.shape: Shape = impl.shape(kv_cache_spec.block_size, device)
        self.width = self.reorder_batch_threshold = 1 + drafts(vllm_config)
        self.plan = Plan(self.shape, decode_rows(vllm_config))
        self.read_back = impl.read_back
        self.chunk_tokens = impl.workspace_tokens
        self.dtype = vllm_config.model_config.dtype
        self._warmed: set[tuple[bool, bool]] = set()
        columns = triton.cdiv(vllm_config.model_config.max_model_len, kv_cache_spec.block_size)
        self.warm_up(columns)
        if self.width > 1:
            self.rows = RowTable(self.plan.sequences, max(columns, self.shape.ring_blocks), device)
            self.lens = torch.zeros(self.plan.sequences, dtype=torch.int32, device=device)
            self.warm_up(self.rows.table.shape[1])

    def describe(self, common: Any) -> Metadata:
        """Metadata of one batch; what a captured graph reads is rewritten in place."""
        self.warm_up(common.block_table_tensor.stride(0))
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=self.width)
        if self.width > 1 and int(common.query_start_loc_cpu[decodes]) > self.plan.sequences:
            ends = common.query_start_loc_cpu[1 : decodes + 1]
            decodes = int(torch.searchsorted(ends, self.plan.sequences, right=True))
            prefills, decode_tokens = common.num_reqs - decodes, int(common.query_start_loc_cpu[decodes])
        table, lens = self._rows(common, decodes, decode_tokens)
        # Drafts are stored in the same step in which tokens after them read them.
        self.plan.update(lens, overlap=not prefills and (self.width == 1 or common.max_query_len == 1))
        found = self._prefills(common, decodes, decode_tokens) if prefills else None
        ordinals = torch.cat([lens, found.ordinals]) if found else lens
        return Metadata(self.plan, len(lens), table, lens, common.slot_mapping, ordinals, found)

    def _rows(self, common: Any, decodes: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block tables and lengths of the rows that decode, of the first `decodes` sequences and their `tokens`."""
        table, lens = common.block_table_tensor, common.seq_lens[:decodes]
        if self.width == 1 or not decodes:
            return table, lens
        rows = min(tokens, decodes * self.width, self.plan.sequences)  # no more of these tokens are real
        owner, seen = owners(common.query_start_loc[: decodes + 1], lens, rows)
        lens = self.lens[:rows]
        lens.copy_(seen)
        return self.rows.fill(table, owner), lens

    def warm_up(self, width: int) -> None:
        """Compile every variant of our kernels that serving can reach, for block tables of `width` columns.

        Triton compiles anew for another constant, and for an address or a stride that is no longer a multiple of 16.
        vLLM's own warm-up meets some variants only: none reads a context back, and none decodes beside a prompt.
        """
        variant = width % 16 == 0, width == 1
        if variant in self._warmed:
            return
        self._warmed.add(variant)
        shape, sequences = self.shape, self.plan.sequences
        heads = shape.kv_heads * shape.ratio
        make: dict[str, Any] = {"device": shape.device}
        row = shape.fmt.row_bytes(shape.head_dim)
        cache = torch.zeros(1, shape.kv_heads, shape.block_size, row, dtype=torch.uint8, **make)
        factors = Factors.identity(shape.kv_heads, shape.head_dim, shape.device)
        pages = GpuPages(cache, shape, factors, cache if shape.recent else None)
        # One row more, since prompts follow the rows that decode: their table starts anywhere.
        table = torch.zeros(sequences + 1, width, dtype=torch.int32, **make)
        rings = torch.zeros(sequences, max(width, shape.ring_blocks), dtype=torch.int32, **make)[:, : shape.ring_blocks]
        tokens = max(sequences, tuning.FEW_TOKENS + 1)
        lens = torch.ones(tokens, dtype=torch.int32, **make)
        slots = torch.full((tokens,), -1, **make)
        query = torch.zeros(tokens, heads, shape.head_dim, dtype=self.dtype, **make)
        fresh = torch.zeros(tokens, shape.kv_heads, shape.head_dim, dtype=self.dtype, **make)
        powers = [2**i for i in range(sequences.bit_length()) if 2**i <= sequences]
        for overlap in (False, True):
            for count in {*powers, sequences}:
                self.plan.update(lens[:count], overlap)
                ring_slots, ring_table = (slots[:count], rings[:count]) if shape.recent else (None, None)
                pages.store(
                    query[:count], fresh[:count], fresh[:count], slots[:count], self.plan, count, 1.0, ring_slots,
                    lens[:count],
                )  # fmt: skip
                pages.decode(table[:count], lens[:count], self.plan, query[:count], ring_table)
        pages.store(query, fresh, fresh, slots, self.plan, 0, 1.0, slots if shape.recent else None, lens)
        rows = torch.tensor([0, 1], dtype=torch.int32, **make)
        for first in range(2):
            pages.gather(table[first : first + 1], rows, 0, 1, fresh[:1], fresh[:1])

    def _prefills(self, common: Any, decodes: int, decode_tokens: int) -> Prefills:
        starts = common.query_start_loc_cpu[decodes : common.num_reqs + 1] - decode_tokens
        new = starts[1:] - starts[:-1]
        lens = common.seq_lens_cpu_upper_bound  # exact in a prompt; drafts that were not accepted are still in it
        if lens is None or (self.width > 1 and not self._prompts(common, decodes)):
            lens = common.seq_lens.cpu()
        context = lens[decodes : common.num_reqs] - new
        block_table = common.block_table_tensor[decodes : common.num_reqs]
        ordinals = torch.arange(1, int(starts[-1]) + 1) + torch.repeat_interleave(context - starts[:-1], new)
        prefills = Prefills(
            self._upload(starts.int()), int(new.max()), int(starts[-1]), block_table, self._upload(ordinals.int()), []
        )
        if self.read_back:
            prefills.whole = self._context_chunk(0, context + new)
            return prefills
        step = self.chunk_tokens // len(context) // 16 * 16
        for begin in range(0, int(context.max()), step):
            prefills.context_chunks.append(self._context_chunk(begin, (context - begin).clamp(0, step)))
        return prefills

    @staticmethod
    def _prompts(common: Any, decodes: int) -> bool:
        """Whether the sequences after the first `decodes` are known to be in their prompts."""
        found = getattr(common, "is_prefilling", None)
        return found is not None and bool(found[decodes : common.num_reqs].all())

    def _context_chunk(self, begin: int, lengths: torch.Tensor) -> ContextChunk:
        rows = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=rows[1:])
        return ContextChunk(begin, int(lengths.max()), int(rows[-1]), self._upload(rows))

    def _upload(self, x: torch.Tensor) -> torch.Tensor:
        return x.pin_memory().to(self.device, non_blocking=True)
