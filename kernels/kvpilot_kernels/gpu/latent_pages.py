"""Latent pages on a GPU: what a backend calls, with the same contract as `kvpilot_kernels.latent.cpu`.

A `LatentPlan` holds what all layers of a step share: how decode's work is cut, and the scratch of its partial results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from kvpilot_kernels import check as common
from kvpilot_kernels.formats import SHRINK
from kvpilot_kernels.gpu import latent_tuning, tuning
from kvpilot_kernels.gpu.codec import SideLayout
from kvpilot_kernels.gpu.latent_decode import latent_decode_kernel
from kvpilot_kernels.gpu.latent_gather import latent_gather_kernel
from kvpilot_kernels.gpu.latent_reduce import latent_reduce_kernel
from kvpilot_kernels.gpu.latent_store import latent_store_kernel
from kvpilot_kernels.gpu.pages import LOG2_E
from kvpilot_kernels.gpu.plan import most_splits, plan_kernel
from kvpilot_kernels.gpu.rotation import plain_rotation
from kvpilot_kernels.latent import check
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_kernels.latent.formats import ENTRY, RANK, ROPE, ROPE_BITS, LatentFormat

MOST_HEADS = 128
"""Query heads of a model (of a rank) that were checked against the reference."""


def part_layouts(fmt: LatentFormat, block_size: int) -> tuple[SideLayout, SideLayout]:
    """Constants of a page's latents and RoPE parts.

    Raises:
        FormatError: as `LatentFormat.page_layout`.
    """
    page = fmt.page_layout(block_size)
    latent = SideLayout(fmt.bits, page.codes.row_bytes, page.codes.offset, page.meta.offset, SHRINK[fmt.bits], 0, 0, 0)
    rope_meta = page.meta.offset + page.meta.row_bytes
    rope = SideLayout(
        ROPE_BITS, page.rope_codes.row_bytes, page.rope_codes.offset, rope_meta, SHRINK[ROPE_BITS], 0, 0, 0
    )
    return latent, rope


class LatentShape:
    """What is fixed for a layer: format, heads, block size, and the launch choices that follow.

    Args:
        fmt: the format. heads: query heads here (of this rank), at most 128. block_size: tokens in a page.

    Raises:
        BadInputError: another number of heads. FormatError: a block size without a layout.
    """

    def __init__(self, fmt: LatentFormat, heads: int, block_size: int, device: torch.device) -> None:
        if not 1 <= heads <= MOST_HEADS:
            raise common.BadInputError("heads", f"is {heads}", f"the kernels take 1 to {MOST_HEADS}; use 'auto'")
        self.fmt, self.heads, self.block_size, self.device = fmt, heads, block_size, device
        self.latent, self.rope = part_layouts(fmt, block_size)
        self.take = latent_tuning.program_heads(heads)
        self.choice = latent_tuning.choose(fmt, heads, block_size, tuning.capability(device))
        self.wave = max(1, tuning.multiprocessors(device) * self.choice.programs // triton.cdiv(heads, self.take))
        self.codec: dict[str, Any] = {
            "LATENT": self.latent, "POSITION": self.rope, "HEADS": heads, "PAGE": block_size,
        }  # fmt: skip
        self.rotation = plain_rotation(ROPE, device)


class LatentPlan:
    """How one step's decode is cut; made once for `sequences` rows, its buffers keep their addresses.

    Attributes:
        splits: int32 [count, 4]; spans: int32 [sequences, 2] (`plan`).
        partial: float32 [count, heads, 512]; lse: float32 [count, heads].
        rotated: float16 [sequences, heads, 576], prepared queries; sums: float32 [sequences, 3, heads].
    """

    def __init__(self, shape: LatentShape, sequences: int) -> None:
        self.shape, self.sequences = shape, sequences
        count, heads, device = most_splits(sequences, shape.wave), shape.heads, shape.device
        self.splits = torch.full((count, 4), -1, dtype=torch.int32, device=device)
        self.spans = torch.zeros(sequences, 2, dtype=torch.int32, device=device)
        self.partial = torch.empty(count, heads, RANK, device=device)
        self.lse = torch.empty(count, heads, device=device)
        self.rotated = torch.empty(sequences, heads, ENTRY, dtype=torch.float16, device=device)
        self.sums = torch.empty(sequences, 3, heads, device=device)

    def update(self, seq_lens: torch.Tensor) -> None:
        """Cut the work for int32 [sequences or fewer] stored lengths; 0 is a row of padding."""
        sequences = seq_lens.shape[0]
        count = most_splits(sequences, self.shape.wave)
        plan_kernel[(triton.cdiv(count, 128),)](
            seq_lens, self.splits, self.spans, sequences, count, self.shape.wave, TILE=self.shape.choice.tile,
            WINDOW=0, SEQUENCES=triton.next_power_of_2(max(sequences, 16)), SPLITS=128, num_warps=8,
        )  # fmt: skip


class GpuLatentPages:
    """One layer's cache of latent pages, uint8 [blocks, block_size, row_bytes], flat per block.

    Raises:
        BadInputError: the cache is not laid out as the shape says, naming what it should be.
    """

    def __init__(self, cache: torch.Tensor, shape: LatentShape, factors: LatentFactors | None = None) -> None:
        check.page_cache(cache, shape.fmt)
        if cache.shape[1] != shape.block_size:
            raise common.BadInputError(
                "cache", f"is {tuple(cache.shape)}", f"this layer has blocks of {shape.block_size} tokens"
            )
        self.cache, self.shape = cache, shape
        self.factors = factors or LatentFactors.identity(shape.device)

    def store(self, query: torch.Tensor, query_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor,
              slot_mapping: torch.Tensor, plan: LatentPlan, decodes: int, scale: float) -> None:  # fmt: skip
        """Write tokens into their slots, and prepare the queries of the first `decodes` of them in the plan.

        Args:
            query: [tokens, heads, 512], absorbed into latent space, and query_rope: [tokens, heads, 64], heads and
                elements contiguous. latent: [tokens, 512], after its norm; rope: [tokens, 64], after RoPE.
            slot_mapping: int64 [tokens], block * block_size + place; negative is padding. scale: factor on the scores.

        Raises:
            BadInputError: another shape, type or stride, or more queries than there are or the plan has rows for;
                nothing was launched.
        """
        s, f = self.shape, self.factors
        check.tokens(latent, rope, slot_mapping)
        check.queries(query, query_rope, s.heads)
        for name, x, width in (("query", query, RANK), ("query_rope", query_rope, ROPE)):
            if x.stride(2) != 1 or (s.heads > 1 and x.stride(1) != width):
                raise common.BadInputError(name, f"has strides {x.stride()}", "make heads and elements contiguous")
        tokens = slot_mapping.shape[0]
        if decodes > min(tokens, query.shape[0], plan.sequences):
            raise common.BadInputError(
                "decodes", f"is {decodes}",
                f"there are {tokens} tokens, {query.shape[0]} queries, and {plan.sequences} rows of the plan",
            )  # fmt: skip
        if tokens == 0:
            return
        parts = 2 + (s.heads if decodes else 0)
        latent_store_kernel[(triton.cdiv(tokens, latent_tuning.STORE_TOKENS), parts)](
            query, query_rope, latent, rope, slot_mapping, self.cache, plan.rotated, plan.sums, s.rotation,
            f.mean, f.scale, tokens, decodes, query.stride(0), query_rope.stride(0), latent.stride(0),
            rope.stride(0), self.cache.stride(0), scale * LOG2_E, TOKENS=latent_tuning.STORE_TOKENS, **s.codec,
            num_warps=latent_tuning.STORE_WARPS,
        )  # fmt: skip

    def decode(self, block_table: torch.Tensor, seq_lens: torch.Tensor, plan: LatentPlan,
               out: torch.Tensor) -> None:  # fmt: skip
        """Attention of one query token per sequence, prepared by `store`, over all of its stored tokens.

        Args:
            block_table: int32 [sequences, blocks]; entries past a sequence's length are not read.
            seq_lens: int32 [sequences] tokens stored, as the plan was updated with; 0 gives zeros.
            out: [sequences, heads, 512], 16 bits or float32, in latent space, written; heads and elements contiguous.

        Raises:
            BadInputError: another type or shape, or more sequences than the plan, the table or `out` have rows for.
        """
        common.int32(block_table=block_table, seq_lens=seq_lens)
        heads = self.shape.heads
        apart = out.dim() == 3 and (out.stride(2) != 1 or (heads > 1 and out.stride(1) != RANK))
        if tuple(out.shape[1:]) != (heads, RANK) or apart:
            raise common.BadInputError(
                "out", f"is {tuple(out.shape)} with strides {out.stride()}",
                f"give [sequences, {heads}, {RANK}] with heads and elements contiguous",
            )  # fmt: skip
        if seq_lens.shape[0] > min(plan.sequences, block_table.shape[0], out.shape[0]):
            raise common.BadInputError(
                "seq_lens", f"has {seq_lens.shape[0]} rows",
                f"the plan has {plan.sequences}, block_table {block_table.shape[0]} and out {out.shape[0]}",
            )  # fmt: skip
        if seq_lens.shape[0]:
            self.attend(block_table, seq_lens.shape[0], plan)
            self.merge(seq_lens.shape[0], plan, out)

    def attend(self, block_table: torch.Tensor, sequences: int, plan: LatentPlan) -> None:
        """The first half of `decode`: partial results of every split, into the plan."""
        s, choice = self.shape, self.shape.choice
        latent_decode_kernel[(triton.cdiv(s.heads, s.take), most_splits(sequences, s.wave))](
            plan.rotated, plan.sums, self.cache, block_table, plan.splits, plan.partial, plan.lse,
            self.cache.stride(0), block_table.stride(0), TAKE=s.take, Q=choice.heads, TILE=choice.tile,
            STAGES=choice.stages, WARPS=choice.warps, **s.codec, num_warps=choice.warps, maxnreg=choice.registers,
        )  # fmt: skip

    def merge(self, sequences: int, plan: LatentPlan, out: torch.Tensor) -> None:
        """The second half of `decode`: merge what the plan holds, rotate it back and write it to `out`."""
        s, f, take = self.shape, self.factors, latent_tuning.MERGE_HEADS
        latent_reduce_kernel[(sequences, triton.cdiv(s.heads, take))](
            plan.partial, plan.lse, plan.spans, s.rotation, f.mean, f.scale, out, out.stride(0), HEADS=s.heads,
            TAKE=take, STEP=latent_tuning.MERGE_SPLITS, num_warps=latent_tuning.MERGE_WARPS,
        )  # fmt: skip

    def gather(self, block_table: torch.Tensor, rows: torch.Tensor, begin: int, longest: int,
               out: torch.Tensor) -> None:  # fmt: skip
        """Read tokens [begin, begin + length) of each sequence back, in the model's own elements.

        Args:
            block_table: int32 [sequences, blocks]. rows: int32 [sequences + 1], where each sequence's tokens start in
                the output; their differences are the lengths, at most `longest`.
            out: [rows, 576], 16 bits or float32, contiguous: latents, then RoPE parts.

        Raises:
            BadInputError: another type or shape, or a table without a row for each sequence.
        """
        s, f = self.shape, self.factors
        common.int32(block_table=block_table, rows=rows)
        if out.dim() != 2 or out.shape[1] != ENTRY or not out.is_contiguous():
            raise common.BadInputError(
                "out", f"is {tuple(out.shape)} with strides {out.stride()}", f"give a contiguous [rows, {ENTRY}]"
            )
        sequences = rows.shape[0] - 1
        if sequences > block_table.shape[0]:
            raise common.BadInputError(
                "rows", f"are of {sequences} sequences", f"block_table has {block_table.shape[0]}"
            )
        if sequences < 1 or longest < 1:
            return
        latent_gather_kernel[(triton.cdiv(longest, latent_tuning.GATHER_TOKENS), 2, sequences)](
            self.cache, block_table, rows, out, s.rotation, f.mean, f.scale, begin, self.cache.stride(0),
            block_table.stride(0), LATENT=s.latent, POSITION=s.rope, PAGE=s.block_size,
            TOKENS=latent_tuning.GATHER_TOKENS, num_warps=latent_tuning.GATHER_WARPS,
        )  # fmt: skip
