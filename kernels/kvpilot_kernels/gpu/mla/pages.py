"""Latent pages on a GPU: the interface for backends, with the same contract as `kvpilot_kernels.latent.cpu`.

A `LatentPlan` holds what all layers of a step share: the splits of decode, and memory for partial results.
"""

from typing import Any

import torch
import triton

from kvpilot_formats.latent import ENTRY, RANK, ROPE, ROPE_BITS, LatentFormat
from kvpilot_formats.layouts import SHRINK
from kvpilot_kernels import check
from kvpilot_kernels.gpu.decode.schedule import fill_splits, most_splits
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.pages import LOG2_E
from kvpilot_kernels.gpu.layout.page import SideLayout
from kvpilot_kernels.gpu.mla import tuning as latent_tuning
from kvpilot_kernels.gpu.mla.decode import latent_decode_kernel
from kvpilot_kernels.gpu.mla.gather import latent_gather_kernel
from kvpilot_kernels.gpu.mla.merge import latent_reduce_kernel
from kvpilot_kernels.gpu.mla.operands import LatentConfig
from kvpilot_kernels.gpu.mla.store import latent_prepare_kernel, latent_store_kernel
from kvpilot_kernels.latent.factors import LatentFactors

MOST_HEADS = 128
"""Largest number of query heads per rank that was checked against `latent.reference`."""

BEYOND = 1
"""Number of splits per sequence that a plan may have in addition to a wave.

It is small, because the result of a split takes 256 KiB with 128 heads.
"""


def part_layouts(fmt: LatentFormat, block_size: int) -> tuple[SideLayout, SideLayout]:
    """Return the layouts of the latents and of the RoPE parts in a page."""
    page = fmt.page_layout(block_size)
    latent = SideLayout(fmt.bits, RANK, RANK, RANK, block_size, page.codes.row_bytes, page.codes.offset,
                        page.meta.offset, SHRINK[fmt.bits])  # fmt: skip
    rope_meta = page.meta.offset + page.meta.row_bytes
    rope = SideLayout(ROPE_BITS, ROPE, ROPE, ROPE, block_size, page.rope_codes.row_bytes, page.rope_codes.offset,
                      rope_meta, SHRINK[ROPE_BITS])  # fmt: skip
    return latent, rope


class LatentShape:
    """Fixed properties of a layer: format, heads, block size, and the launch parameters that follow from them.

    Args:
        fmt: the format.
        heads: query heads of this rank, at most 128.
        block_size: tokens in a page.

    Raises:
        BadInputError: no head, or more than 128.
        FormatError: the block size is not a multiple of 16.
    """

    def __init__(self, fmt: LatentFormat, heads: int, block_size: int, device: torch.device) -> None:
        if not 1 <= heads <= MOST_HEADS:
            raise check.BadInputError("heads", f"is {heads}", f"the kernels take 1 to {MOST_HEADS}; use 'auto'")
        self.fmt, self.heads, self.block_size, self.device = fmt, heads, block_size, device
        self.latent, self.rope = part_layouts(fmt, block_size)
        self.take = latent_tuning.program_heads(heads)
        self.choice = latent_tuning.choose(fmt, heads, block_size, tuning.capability(device))
        self.wave = max(1, tuning.multiprocessors(device) * self.choice.programs // triton.cdiv(heads, self.take))
        self.overlap = tuning.overlaps(device)

    @property
    def chained(self) -> dict[str, Any]:
        """Launch options that let a kernel start before the preceding kernel ends."""
        return {"launch_pdl": True} if self.overlap else {}


class LatentPlan:
    """Division of a decode step's work, for up to `sequences` rows. Buffers keep their addresses for CUDA graphs.

    Attributes:
        splits: int32 [count, 4], see `schedule`.
        spans: int32 [sequences, 2], see `schedule`.
        partial: float32 [count, heads, 512], outputs of the splits, normalised, in the rotated space.
        lse: float32 [count, heads], log2 of the softmax sums of the splits.
        rotated: float16 [sequences, heads, 576], prepared queries.
        sums: float32 [sequences, 3, heads], see `latent_prepare_kernel`.
    """

    def __init__(self, shape: LatentShape, sequences: int) -> None:
        self.shape, self.sequences = shape, sequences
        count, heads, device = most_splits(sequences, shape.wave, BEYOND), shape.heads, shape.device
        self.splits = torch.full((count, 4), -1, dtype=torch.int32, device=device)
        self.spans = torch.zeros(sequences, 2, dtype=torch.int32, device=device)
        self.partial = torch.empty(count, heads, RANK, dtype=torch.float32, device=device)
        self.lse = torch.empty(count, heads, dtype=torch.float32, device=device)
        self.rotated = torch.empty(sequences, heads, ENTRY, dtype=torch.float16, device=device)
        self.sums = torch.empty(sequences, 3, heads, dtype=torch.float32, device=device)

    def update(self, seq_lens: torch.Tensor) -> None:
        """Split the work of a step. `seq_lens` is int32 [sequences or fewer], stored lengths; 0 means padding."""
        check.sequences(seq_lens, self.sequences)
        fill_splits(seq_lens, self.splits, self.spans, self.shape.wave, self.shape.choice.tile, more=BEYOND)


class GpuLatentPages:
    """Cache of latent pages of one layer, uint8 [blocks, block_size, row_bytes]. Each block is a page."""

    def __init__(self, cache: torch.Tensor, shape: LatentShape, factors: LatentFactors | None = None) -> None:
        check.latent_cache(cache, shape.fmt)
        if cache.shape[1] != shape.block_size:
            raise check.BadInputError(
                "cache", f"is {tuple(cache.shape)}", f"this layer has blocks of {shape.block_size} tokens"
            )
        self.cache, self.shape = cache, shape
        self.factors = factors or LatentFactors.identity(shape.device)

    def store(self, latent: torch.Tensor, rope: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Quantize entries and write them into their slots.

        Args:
            latent: [tokens, 512], after its norm, any float dtype.
            rope: [tokens, 64], after RoPE, any float dtype.
            slot_mapping: int64 [tokens or fewer], block * block_size + offset; negative is padding.
        """
        s, f = self.shape, self.factors
        check.latent_tokens(latent, rope, slot_mapping)
        if tokens := slot_mapping.shape[0]:
            latent_store_kernel[(triton.cdiv(tokens, latent_tuning.STORE_TOKENS), 2)](
                latent, rope, slot_mapping, self.cache, f.mean, f.scale, tokens, latent.stride(0),
                rope.stride(0), self.cache.stride(0), LATENT=s.latent, POSITION=s.rope,
                TOKENS=latent_tuning.STORE_TOKENS, num_warps=latent_tuning.STORE_WARPS,
                OVERLAP=s.overlap, **tuning.FUSED, **s.chained,
            )  # fmt: skip

    def prepare(self, query: torch.Tensor, query_rope: torch.Tensor, plan: LatentPlan, scale: float) -> None:
        """Rotate and scale the queries of sequences that decode, and write them to the plan.

        Args:
            query: [sequences, heads, 512], absorbed into latent space, with contiguous elements.
            query_rope: [sequences, heads, 64], with contiguous elements.
            scale: factor on the scores.
        """
        s = self.shape
        check.latent_queries(query, query_rope, s.heads)
        for name, x in (("query", query), ("query_rope", query_rope)):
            if x.stride(2) != 1:
                raise check.BadInputError(name, f"has strides {x.stride()}", "make elements contiguous")
        if query.shape[0] > plan.sequences:
            raise check.BadInputError("query", f"has {query.shape[0]} rows", f"the plan has {plan.sequences}")
        if rows := query.shape[0] * s.heads:
            latent_prepare_kernel[(triton.cdiv(rows, latent_tuning.STORE_TOKENS),)](
                query, query_rope, plan.rotated, plan.sums, self.factors.scale, rows, query.stride(0),
                query.stride(1), query_rope.stride(0), query_rope.stride(1), scale * LOG2_E, HEADS=s.heads,
                ROWS=latent_tuning.STORE_TOKENS, num_warps=latent_tuning.STORE_WARPS,
                OVERLAP=s.overlap, **tuning.FUSED, **s.chained,
            )  # fmt: skip

    def decode(self, block_table: torch.Tensor, seq_lens: torch.Tensor, plan: LatentPlan,
               out: torch.Tensor) -> None:  # fmt: skip
        """Compute attention of one query token per sequence, which `prepare` has prepared, to all its stored tokens.

        Args:
            block_table: int32 [sequences, blocks]; entries past a sequence's length are not read.
            seq_lens: int32 [sequences] stored tokens, as given to the plan's `update`; 0 gives zeros.
            out: output, [sequences, heads, 512] in latent space, 16 bits or float32; heads and elements contiguous.
        """
        check.int32(block_table=block_table, seq_lens=seq_lens)
        heads = self.shape.heads
        apart = out.dim() == 3 and (out.stride(2) != 1 or (heads > 1 and out.stride(1) != RANK))
        if tuple(out.shape[1:]) != (heads, RANK) or apart:
            raise check.BadInputError(
                "out", f"is {tuple(out.shape)} with strides {out.stride()}",
                f"give [sequences, {heads}, {RANK}] with heads and elements contiguous",
            )  # fmt: skip
        if seq_lens.shape[0] > min(plan.sequences, block_table.shape[0], out.shape[0]):
            raise check.BadInputError(
                "seq_lens", f"has {seq_lens.shape[0]} rows",
                f"the plan has {plan.sequences}, block_table {block_table.shape[0]} and out {out.shape[0]}",
            )  # fmt: skip
        if seq_lens.shape[0]:
            self.attend(block_table, seq_lens.shape[0], plan)
            self.merge(seq_lens.shape[0], plan, out)

    def attend(self, block_table: torch.Tensor, sequences: int, plan: LatentPlan) -> None:
        """Run the first half of `decode`: write the partial result of every split to the plan."""
        s, choice = self.shape, self.shape.choice
        latent_decode_kernel[(triton.cdiv(s.heads, s.take), most_splits(sequences, s.wave, BEYOND))](
            plan.rotated, plan.sums, self.cache, block_table, plan.splits, plan.partial, plan.lse,
            self.cache.stride(0), block_table.stride(0),
            C=LatentConfig(s.latent, s.rope, s.heads, s.take, choice.heads, choice.tile, choice.stages, choice.warps,
                           s.overlap),
            num_warps=choice.warps, maxnreg=choice.registers, **tuning.FUSED, **s.chained,
        )  # fmt: skip

    def merge(self, sequences: int, plan: LatentPlan, out: torch.Tensor) -> None:
        """Run the second half of `decode`: merge partial results, undo the quantizer's rotation, and write `out`."""
        s, f = self.shape, self.factors
        choice = latent_tuning.merging(s.wave // sequences)
        latent_reduce_kernel[(sequences, triton.cdiv(s.heads, choice.heads))](
            plan.partial, plan.lse, plan.spans, f.mean, f.scale, out, out.stride(0), HEADS=s.heads,
            TAKE=choice.heads, STEP=choice.splits, num_warps=choice.warps, OVERLAP=s.overlap, **tuning.FUSED,
            **s.chained,
        )  # fmt: skip

    def gather(self, block_table: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, longest: int,
               out: torch.Tensor) -> None:  # fmt: skip
        """Read entries of tokens [start, start + length) of each sequence from pages, in the dtype of `out`.

        Args:
            block_table: int32 [sequences, blocks].
            starts: int32 [sequences].
            rows: int32 [sequences + 1], the first output row of each sequence. Their differences are the lengths, at
                most `longest`.
            out: [rows, 576], 16 bits or float32, contiguous: latents, then RoPE parts.
        """
        s, f = self.shape, self.factors
        check.int32(block_table=block_table, starts=starts, rows=rows)
        if out.dim() != 2 or out.shape[1] != ENTRY or not out.is_contiguous():
            raise check.BadInputError(
                "out", f"is {tuple(out.shape)} with strides {out.stride()}", f"give a contiguous [rows, {ENTRY}]"
            )
        sequences = rows.shape[0] - 1
        if sequences > min(block_table.shape[0], starts.shape[0]):
            raise check.BadInputError(
                "rows", f"are of {sequences} sequences",
                f"block_table has {block_table.shape[0]} and starts {starts.shape[0]}",
            )  # fmt: skip
        if sequences < 1 or longest < 1:
            return
        latent_gather_kernel[(triton.cdiv(longest, latent_tuning.GATHER_TOKENS), 2, sequences)](
            self.cache, block_table, starts, rows, out, f.mean, f.scale, self.cache.stride(0),
            block_table.stride(0), LATENT=s.latent, POSITION=s.rope,
            TOKENS=latent_tuning.GATHER_TOKENS, num_warps=latent_tuning.GATHER_WARPS,
            **tuning.FUSED,
        )  # fmt: skip
