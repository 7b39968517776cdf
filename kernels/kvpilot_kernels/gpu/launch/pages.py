"""Packed pages on a GPU: what attention backends call, with the same contract as `kvpilot_kernels.cpu`.

A `Plan` holds what all layers of a step share: the splits of decode, and memory for partial results.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from kvpilot_formats.formats import Format
from kvpilot_kernels import check
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.decode.kernel import DecodeConfig, decode_kernel
from kvpilot_kernels.gpu.decode.merge import MergeConfig, reduce_kernel
from kvpilot_kernels.gpu.decode.schedule import beyond, fill_splits, most_results, most_splits
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.launches import First, Launches, Own
from kvpilot_kernels.gpu.layout.hadamard import packing_signs, plain_signs
from kvpilot_kernels.gpu.layout.page import NARROW, side_layouts
from kvpilot_kernels.gpu.prefill.gather import GatherConfig, gather_kernel
from kvpilot_kernels.gpu.store.kernel import StoreConfig, store_kernel
from kvpilot_kernels.residuals import Residuals

LOG2_E = 1.4426950408889634


class Cut(NamedTuple):
    """Launch parameters of decode.

    Attributes:
        take: number of queries that a program handles.
        parts: number of programs that share a split and a KV head, if `take` is less than the KV head's queries.
        choice: tile, stages and registers.
        wave: number of splits that run at once.
    """

    take: int
    parts: int
    choice: tuning.Choice
    wave: int


@dataclass(frozen=True)
class Several:
    """Rows (query tokens) of a step with several rows per sequence.

    A sequence's rows are consecutive. Its last row attends to all stored tokens of the sequence, and each earlier row
    to one token less.

    Attributes:
        starts: int32 [sequences + 1], index of each sequence's first row.
        owners: int32 [rows], the sequence of each row, negative for padding.
        most: largest number of rows of a sequence.
    """

    starts: torch.Tensor
    owners: torch.Tensor
    most: int


class Shape:
    """Fixed properties of a layer: format, heads, block size, and the launch parameters that follow from them.

    Attributes:
        row_dim: number of elements of a stored row and of a rotated query.
        wide: True if `row_dim` is more than `page.NARROW`. Some kernels treat such rows differently.

    Args:
        fmt: one of kvpilot's own formats.
        head_dim: elements of a key and of a value.
        kv_heads: KV heads of this rank.
        ratio: query heads per KV head.
        block_size: tokens in a page.
        softcap: 0 for none.
        residuals: `Format.residual_pages`, or 0 without a recent window.

    Raises:
        BadInputError: no query head per KV head, or another number of residual pages.
        UnsupportedHeadDimError: the format cannot store heads of this dimension.
    """

    def __init__(self, fmt: Format, head_dim: int, kv_heads: int, ratio: int, block_size: int, device: torch.device,
                 softcap: float = 0.0, residuals: int = 0) -> None:  # fmt: skip
        if ratio < 1:
            raise check.BadInputError("ratio", f"is {ratio} query heads per KV head", "give 1 or more")
        self.fmt, self.head_dim, self.kv_heads, self.ratio = fmt, head_dim, kv_heads, ratio
        self.block_size, self.device, self.softcap = block_size, device, softcap
        self.row_dim = dim = fmt.row_dim(head_dim)
        self.wide = dim > NARROW.value
        if residuals not in (0, fmt.residual_pages(head_dim, block_size)):
            remedy = f"{fmt.name} has {fmt.residual_pages(head_dim, block_size)} for a block of {block_size} tokens"
            raise check.BadInputError("residuals", f"is {residuals}", remedy)
        self.residuals = residuals
        self.key, self.value = side_layouts(fmt, head_dim, block_size, residuals)
        self.gather_block = tuning.gather_block(dim)
        self.can_overlap = tuning.overlaps(device)
        self.chained: dict[str, Any] = {"launch_pdl": True} if self.can_overlap else {}
        self.key_signs, self.value_signs = (packing_signs(dim, b, device) for b in (fmt.key.bits, fmt.value.bits))
        self.signs = plain_signs(dim, device)
        self._cuts: dict[int, Cut] = {}
        self.launches = Launches()

    def cut(self, tokens: int = 1) -> Cut:
        """Return the launch parameters of decode for a step with at most this many query tokens per sequence."""
        if tokens not in self._cuts:
            take, bits = (
                tuning.program_queries(self.row_dim, self.ratio, tokens),
                self.fmt.key.bits + self.fmt.value.bits,
            )
            parts, capability = triton.cdiv(self.ratio * tokens, take), tuning.capability(self.device)
            choice = tuning.choose(self.row_dim, take, bits, self.block_size, self.residuals, capability)
            self._cuts[tokens] = Cut(take, parts, choice, self._wave(parts, choice.programs))
        return self._cuts[tokens]

    def settle(self, tokens: int, taken: tuning.Taken | None) -> None:
        """Lower the number of concurrent programs of decode to what fits with the compiled kernel's resources.

        The tables in `tuning` hold for one compiler version and compute capability 9.0. Elsewhere fewer programs may
        fit on a multiprocessor, and some programs of a wave would wait for others. Call this before CUDA graphs are
        captured, because a graph has a fixed grid.

        Args:
            tokens: largest number of query tokens per sequence, as for `cut`.
            taken: resources of a program, from `attend`; None if unknown.
        """
        cut = self.cut(tokens)
        if taken is not None:
            fit = self._wave(cut.parts, tuning.fitting(taken, tuning.shared_memory(self.device)))
            self._cuts[tokens] = cut._replace(wave=min(cut.wave, fit))
            self.launches.last.clear()

    def _wave(self, parts: int, programs: int) -> int:
        return max(1, tuning.multiprocessors(self.device) * programs // (self.kv_heads * parts))


class Plan:
    """Division of a decode step's work, and memory for its results. Buffers keep their addresses for CUDA graphs.

    A row is a query token.

    Args:
        sequences: largest number of sequences.
        tokens: largest number of rows of a sequence.
        rows: largest number of rows of all sequences; None for sequences * tokens.

    Attributes:
        splits: int32 [count, 4], see `schedule`.
        spans: int32 [sequences, 2], see `schedule`.
        bases: int32 [sequences], see `schedule`.
        partial: float32 [results, kv_heads, ratio, row_dim], outputs of the splits.
        lse: float32 [results, kv_heads, ratio], log2 of the softmax sums of the splits.
        rotated: int8 [rows, kv_heads * ratio, 2, row_dim], rotated queries as integers: upper bytes, then lower bytes.
        sums: int32 [rows, kv_heads * ratio, groups, 3], sums of these integers (`store.store_integers`).
        units: float32 [rows, kv_heads * ratio], factor that turns these integers into the query's numbers.
        apart: float32 [rows, kv_heads * ratio], amount to add to the score of a sequence's first token, whose key has
            its own mean.
        level: float32 [rows, kv_heads * ratio], part of every score from the keys' mean; used only with a soft cap or
            a sink.
        several: rows of the step; None if each sequence has one row.
    """

    def __init__(self, shape: Shape, sequences: int, tokens: int = 1, rows: int | None = None) -> None:
        self.shape, self.sequences, self.tokens = shape, sequences, tokens
        self.rows = sequences * tokens if rows is None else rows
        self.overlap = False
        self.several: Several | None = None
        waves = [(most, shape.cut(most).wave) for most in range(1, tokens + 1)]
        count = max(most_splits(sequences, wave, beyond(most)) for most, wave in waves)
        results = max(most_results(min(sequences * most, self.rows), most, wave, sequences) for most, wave in waves)
        heads, dim = (shape.kv_heads, shape.ratio), shape.row_dim
        make = {"device": shape.device}
        self.splits = torch.full((count, 4), -1, dtype=torch.int32, **make)  # type: ignore[call-overload]
        self.spans = torch.zeros(sequences, 2, dtype=torch.int32, **make)  # type: ignore[call-overload]
        self.bases = torch.zeros(sequences, dtype=torch.int32, **make)  # type: ignore[call-overload]
        self.partial = torch.empty(results, *heads, dim, dtype=torch.float32, **make)  # type: ignore[call-overload]
        self.lse = torch.empty(results, *heads, dtype=torch.float32, **make)  # type: ignore[call-overload]
        self.apart = torch.empty(self.rows, heads[0] * heads[1], dtype=torch.float32, **make)  # type: ignore[call-overload]
        self.level = torch.empty_like(self.apart)
        self.units = torch.empty_like(self.apart)
        queries = (self.rows, heads[0] * heads[1])
        self.sums = torch.empty(*queries, shape.fmt.groups(dim), 3, dtype=torch.int32, **make)  # type: ignore[call-overload]
        self.rotated = torch.empty(*queries, 2, dim, dtype=torch.int8, **make)  # type: ignore[call-overload]

    def cut(self) -> Cut:
        """Return the launch parameters of decode in this step."""
        return self.shape.cut(1 if self.several is None else self.several.most)

    def update(self, seq_lens: torch.Tensor, overlap: bool = False, several: Several | None = None) -> None:
        """Split the work of a step.

        Args:
            seq_lens: int32 [sequences or fewer], stored tokens; 0 means padding.
            overlap: True to let decode start reading before the step's tokens are stored. This is correct only if the
                step stores one token of each sequence. A chunk of a prompt may be a prefix that another sequence reads.
            several: rows of the step; None if each sequence has one row.
        """
        check.sequences(seq_lens, self.sequences if several else min(self.sequences, self.rows))
        if several is not None:
            check.several(several.starts, several.owners, several.most, seq_lens, self.tokens, self.rows)
        self.overlap, self.several = overlap and self.shape.can_overlap, several
        cut, rows = self.cut(), () if several is None else (self.bases, several.starts, several.most)
        fill_splits(seq_lens, self.splits, self.spans, cut.wave, cut.choice.grain or cut.choice.tile, *rows)


class GpuPages:
    """Packed pages of one layer, uint8 [blocks, kv_heads, block_size, row_bytes]. Each (block, head) is a page.

    Args:
        cache: the pages; their start is a multiple of 16 bytes.
        shape: the layer's `Shape`.
        factors: the layer's calibration factors, float32 [kv_heads, head_dim] each.
        residuals: the engine's residual pages, which are blocks of `cache`; None without a recent window.
        sinks: floats [kv_heads * ratio], logits of attention sinks, which take part of the softmax weight but have no
            value; None without sinks.
    """

    def __init__(self, cache: torch.Tensor, shape: Shape, factors: Factors, residuals: Residuals | None = None,
                 sinks: torch.Tensor | None = None) -> None:  # fmt: skip
        check.page_cache(cache, shape.fmt, shape.head_dim)
        if tuple(cache.shape[1:3]) != (shape.kv_heads, shape.block_size):
            raise check.BadInputError(
                "cache", f"is {tuple(cache.shape)}", f"this layer has {shape.kv_heads} KV heads and blocks of "
                f"{shape.block_size} tokens"
            )  # fmt: skip
        check.residuals(residuals, cache, shape.residuals)
        check.sinks(sinks, shape.kv_heads * shape.ratio)
        self.cache, self.shape, self.sinks, f = cache, shape, sinks, factors
        self.own = Own(
            (cache, *(residuals or (cache, cache)), f.key_first, f.key_mean, f.key_scale, f.value_mean, f.value_scale,
             f.value_scale if sinks is None else sinks), (cache.stride()[:2], sinks is None),
        )  # fmt: skip

    def store(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor,
              plan: Plan, decodes: int, scale: float, ordinals: torch.Tensor | None = None) -> None:  # fmt: skip
        """Write tokens into their slots, and the rotated queries of the first `decodes` tokens into the plan.

        Also write the residuals of tokens whose block has residual pages.

        Args:
            query: [tokens, heads, D], any float dtype, heads and elements contiguous.
            key, value: [tokens, kv_heads, D], likewise.
            slot_mapping: int64 [tokens], block * block_size + offset; negative is padding.
            plan: the step's `Plan`, as given to `decode`.
            decodes: number of query tokens that `decode` computes. They come first in `query`.
            scale: factor on the scores.
            ordinals: int [tokens], each token's position in its sequence, counted from 1. Padding at the end may be
                left out. None if no token is the first of its sequence.
        """
        if slot_mapping.shape[0] == 0:
            return

        def first() -> First:
            s, tokens = self.shape, slot_mapping.shape[0]
            check.tokens(key, value, slot_mapping, s.kv_heads, s.head_dim)
            check.queries(query, s.kv_heads, s.head_dim)
            check.inner_strides(s.head_dim, query=query, key=key, value=value)
            check.ordinals(ordinals, slot_mapping)
            heads = s.kv_heads * (2 + (s.ratio if decodes else 0))
            block, level = tuning.store_block(s.row_dim, tokens), s.softcap > 0 or self.sinks is not None
            step = (
                slot_mapping, slot_mapping if ordinals is None else ordinals, plan.rotated, plan.sums, plan.units,
                plan.apart, plan.level, s.key_signs, s.value_signs,
            )  # fmt: skip
            return First(
                store_kernel, (triton.cdiv(tokens, block.tokens), heads, 1), step,
                lambda new, own, step: (*new, *step[:2], *own[:2], *step[2:], *own[3:8]),
                (tokens, 0 if ordinals is None else ordinals.shape[0], decodes, query.stride(0), key.stride(0),
                 value.stride(0), *self.cache.stride()[:2], scale * LOG2_E),
                {"C": StoreConfig(s.key, s.value, s.kv_heads, s.ratio, s.head_dim, block.tokens, level, s.can_overlap),
                 "num_warps": block.warps, **tuning.FUSED, **s.chained},
            )  # fmt: skip

        self.shape.launches(
            "store", (plan, slot_mapping, ordinals), (decodes, scale), (query, key, value), self.own, first
        )

    def decode(self, block_table: torch.Tensor, seq_lens: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        """Compute causal attention of each query token to the stored tokens. `store` has rotated the queries.

        Args:
            block_table: int32 [sequences, blocks]; entries past a sequence's length are not read.
            seq_lens: int32 [sequences], stored tokens, as given to the plan's `update`; 0 gives zeros.
            out: output, [rows, heads, D], 16 bits or float32; heads and elements contiguous. A row is a query token.
        """
        rows = seq_lens.shape[0] if plan.several is None else plan.several.owners.shape[0]
        if rows > out.shape[0]:
            raise check.BadInputError("out", f"has {out.shape[0]} rows", f"the step has {rows}")
        if seq_lens.shape[0]:
            self.attend(block_table, seq_lens, plan)
            self.merge(rows, plan, out)

    def attend(self, block_table: torch.Tensor, seq_lens: torch.Tensor, plan: Plan) -> tuning.Taken | None:
        """Run the first half of `decode`: write the partial results of every split to the plan.

        Return the resources that the compiler gives a program, or None in Triton's interpreter.
        """

        def first() -> First:
            s, several, cut, sequences = self.shape, plan.several, plan.cut(), seq_lens.shape[0]
            check.int32(block_table=block_table, seq_lens=seq_lens)
            if sequences > min(plan.sequences, block_table.shape[0]):
                raise check.BadInputError(
                    "seq_lens", f"has {sequences} rows", f"the plan has {plan.sequences}, and block_table "
                    f"{block_table.shape[0]}",
                )  # fmt: skip
            choice = cut.choice
            splits = most_splits(sequences, cut.wave, beyond(1 if several is None else several.most))
            config = DecodeConfig.of(
                s.key, cut.take, value_side=s.value, ratio=s.ratio, tile=choice.tile, stages=choice.stages,
                softcap=s.softcap > 0, residuals=s.residuals, several=several is not None, overlap=s.can_overlap,
            )  # fmt: skip
            step = (
                plan.rotated, plan.sums, plan.units, plan.apart, plan.level, block_table, plan.splits,
                plan.spans if several is None else several.starts, plan.spans, plan.bases, plan.partial, plan.lse,
            )  # fmt: skip
            return First(
                decode_kernel, (cut.parts, s.kv_heads, splits), step,
                lambda _, own, step: (*step[:5], *own[:3], *step[5:]),
                (*self.cache.stride()[:2], block_table.stride(0), s.softcap),
                {"C": config, "num_warps": 1, "maxnreg": choice.registers, **tuning.FUSED,
                 **(s.chained if plan.overlap else {})},
            )  # fmt: skip

        given = plan, plan.several, plan.overlap, block_table, seq_lens
        kernel = self.shape.launches("decode", given, (), (), self.own, first)
        return None if kernel is None else tuning.Taken(kernel.n_regs, kernel.metadata.shared)

    def merge(self, rows: int, plan: Plan, out: torch.Tensor) -> None:
        """Run the second half of `decode`: merge the partial results, rotate them back and write them to `out`."""

        def first() -> First:
            s, several, sinks = self.shape, plan.several, self.sinks is not None
            take, wave, warps = tuning.merging(s.row_dim, rows * s.kv_heads, s.ratio, s.device)
            starts, owners = (plan.spans, plan.spans) if several is None else (several.starts, several.owners)
            config = MergeConfig(
                s.kv_heads, s.ratio, s.head_dim, s.row_dim, s.key.slots, take, triton.next_power_of_2(take), wave,
                several is not None, sinks, s.softcap == 0, s.can_overlap,
            )  # fmt: skip
            return First(
                reduce_kernel, (rows, s.kv_heads, s.ratio // take),
                (plan.partial, plan.lse, plan.spans, starts, owners, plan.bases, s.signs, plan.level),
                lambda new, own, step: (*step[:7], *own[6:], step[7], *new), (out.stride(0),),
                {"C": config, "num_warps": warps, **tuning.FUSED, **s.chained},
            )  # fmt: skip

        self.shape.launches("reduce", (plan, plan.several), (rows,), (out,), self.own, first)

    def gather(self, slots: torch.Tensor, ordinals: torch.Tensor, key_out: torch.Tensor, value_out: torch.Tensor,
               key: torch.Tensor | None = None, value: torch.Tensor | None = None) -> None:  # fmt: skip
        """Copy keys and values, from pages or from new tokens, into contiguous outputs in the model's dtype.

        Args:
            slots: int64 [tokens], from `places.stored_slots` or `places.joined_slots`.
            ordinals: int32 [tokens], from the same function.
            key_out, value_out: output, [tokens or more, kv_heads, D], 16 bits, contiguous. Further rows stay unchanged.
            key, value: new tokens, [rows, kv_heads, D], heads and elements contiguous. The slot -1 - i selects row i.
                None if no slot is negative.
        """
        fresh = key_out if key is None else key, value_out if value is None else value

        def first() -> First:
            s, tokens = self.shape, slots.shape[0]
            check.ordinals(ordinals, slots)
            if tokens != ordinals.shape[0] or tokens > min(key_out.shape[0], value_out.shape[0]):
                raise check.BadInputError(
                    "slots", f"has {tokens} tokens", f"ordinals has {ordinals.shape[0]}, key_out {key_out.shape[0]} "
                    f"and value_out {value_out.shape[0]}",
                )  # fmt: skip
            check.inner_strides(s.head_dim, key=fresh[0], value=fresh[1])
            block = s.gather_block
            return First(
                gather_kernel, (triton.cdiv(tokens, block.tokens), s.kv_heads, 1),
                (slots, ordinals, key_out, value_out, s.key_signs, s.value_signs),
                lambda new, own, step: (own[0], *step, *own[3:8], *new),
                (tokens, *self.cache.stride()[:2], *(x.stride(0) for x in fresh)),
                {"C": GatherConfig(s.key, s.value, s.kv_heads, s.head_dim, block.tokens), "num_warps": block.warps,
                 **tuning.FUSED},
            )  # fmt: skip

        self.shape.launches("gather", (slots, ordinals, key_out, value_out), (), fresh, self.own, first)
