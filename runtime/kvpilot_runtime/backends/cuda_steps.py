"""Metadata of an engine step for the CUDA backend: which tokens are decoded, and which contexts prefill must read.

The builders make the metadata once for all layers of a KV-cache group.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from kvpilot_formats.hardware import BLOCK_STEPS
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.ahead import compile_ahead
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Several, Shape
from kvpilot_kernels.gpu.launch.prefill import prefill
from kvpilot_kernels.places import joined_slots, owners, stored_slots
from kvpilot_kernels.residuals import Residuals
from kvpilot_runtime.backends import prefix_lm
from kvpilot_runtime.backends.packed import PackedBuilder
from kvpilot_runtime.backends.reserved import release
from kvpilot_runtime.speculation import drafts


def powers(most: int) -> set[int]:
    """Return the token counts to launch in a warm-up: powers of two up to `most`, and `most`."""
    return {most, *(2**i for i in range(most.bit_length()))}


def warm_up(launch: Callable[[], None], vllm_config: Any, device: torch.device) -> None:
    """Call `launch`, which launches all kernel variants of serving. On a GPU, first compile them in parallel."""
    if device.type == "cuda":
        compile_ahead(launch, vllm_config.parallel_config.world_size)
    else:
        launch()


def decode_sizes(vllm_config: Any) -> tuple[int, int]:
    """Return the largest numbers of sequences, and of query tokens, that one step may decode.

    Both numbers include the padding of CUDA graphs.
    """
    scheduler = vllm_config.scheduler_config
    batch, graphs = scheduler.max_num_batched_tokens, vllm_config.compilation_config.max_cudagraph_capture_size or 0
    sequences = max(scheduler.max_num_seqs, min(graphs, batch))
    return int(sequences), int(max(sequences, min(scheduler.max_num_seqs * (1 + drafts(vllm_config)), batch)))


class CudaLimits:
    """Mixin that tells vLLM the limits of our CUDA kernels.

    Attributes:
        block_step: number of tokens in a decode tile. Block sizes must be a multiple of it.
    """

    block_step: ClassVar[int] = BLOCK_STEPS["cuda"]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return True for Ampere and later: our kernels need asynchronous copies and bfloat16 tensor cores."""
        return bool(capability.major >= 8)


@dataclass
class ContextChunk:
    """Part of the contexts that is read into the workspace at once: tokens [begin, begin + length) of each sequence.

    Attributes:
        longest: largest length, in tokens.
        total: sum of all lengths, in tokens.
        rows: int32 [sequences + 1], index of each sequence's first row in the workspace.
        slots: int64 [total], from `places.stored_slots` or `places.joined_slots`.
        ordinals: int32 [total], from the same function.
        room: views of the workspace for keys and values, [total, kv_heads, D] each; None until a layer has used them.
    """

    longest: int
    total: int
    rows: torch.Tensor
    slots: torch.Tensor
    ordinals: torch.Tensor
    room: tuple[torch.Tensor, torch.Tensor] | None = None


def packed(context: torch.Tensor, room: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Join the contexts of all sequences, and cut the result into pieces of `room` tokens. The last may be shorter.

    `context` has the contexts' lengths in tokens, int64 [sequences]. For each piece, yield the `begin` and `length` of
    each sequence's part.
    """
    ends = context.cumsum(0)
    starts = ends - context
    for at in range(0, int(ends[-1]), room):
        begins = (at - starts).clamp(min=0).minimum(context)
        yield begins, (at + room - starts).clamp(min=0).minimum(context) - begins


@dataclass
class Prefills:
    """Sequences of a batch that are prefilled. They come after the decoding sequences in the batch.

    Attributes:
        starts: int32 [sequences + 1], index of each sequence's first row, counted from the first row of `Prefills`.
        longest: largest number of new tokens of a sequence.
        tokens: number of new tokens of all sequences. The batch's rows after them are padding.
        ordinals: int32 [tokens], each token's position in its sequence, counted from 1.
        context_chunks: the contexts, cut into chunks that fit into the workspace; empty if `joined` is set.
        stored: slots of the new tokens, or of contexts and new tokens if `joined` is set, for layers that read another
            layer's cache; None without such layers.
        joined: one chunk with contexts and new tokens; None without contexts, or if the workspace is too small for it.
    """

    starts: torch.Tensor
    longest: int
    tokens: int
    ordinals: torch.Tensor
    context_chunks: list[ContextChunk]
    stored: ContextChunk | None = None
    joined: ContextChunk | None = None


@dataclass
class Metadata:
    """Metadata of a batch. Its first `decodes` rows (query tokens) are decoded. The other rows belong to `prefills`.

    Attributes:
        plan: the decode kernel's division of its work, and buffers for partial results.
        block_table: int32 [sequences or more, blocks].
        seq_lens: int32 [decoding sequences], stored tokens.
        ordinals: int32 [tokens without padding], each token's position in its sequence, counted from 1.
        nowhere: slot mapping with only padding slots, for layers that read another layer's cache and store nothing.
        mm_prefix_range: tokens of `prefills` that attend to later tokens, or None. Keep this name: for layers without
            such attention, vLLM's Gemma 4 deletes the attribute.
    """

    plan: Plan
    decodes: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    ordinals: torch.Tensor
    prefills: Prefills | None
    nowhere: torch.Tensor
    mm_prefix_range: prefix_lm.LaterTokens | None = None


class CudaBuilder(PackedBuilder):
    """Builder that makes a batch's `Metadata` once for all layers of a KV-cache group."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        every = vllm_config.compilation_config.static_forward_context
        impl = every[layer_names[0]].impl
        self.shape: Shape = impl.shape(kv_cache_spec.block_size, device)
        self.sinks = impl.sinks
        self.width = self.reorder_batch_threshold = 1 + drafts(vllm_config)
        sequences, rows = decode_sizes(vllm_config)
        release(vllm_config)
        self.plan = Plan(self.shape, sequences, self.width, rows)
        self.read_back = impl.read_back
        self.shared = any(every[name].impl.kv_sharing_target_layer_name is not None for name in layer_names)
        self.chunk_tokens = impl.workspace_tokens
        self.dtype = vllm_config.model_config.dtype
        warm_up(self.warm_up, vllm_config, device)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        most = max(vllm_config.scheduler_config.max_num_batched_tokens, graphs)
        self.nowhere = torch.full((most,), -1, device=device)
        self.owners, self.seen = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))

    def describe(self, common: Any) -> Metadata:
        """Return the metadata of one batch. Overwrite the buffers that captured CUDA graphs read."""
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=self.width)
        if decodes > self.plan.sequences or decode_tokens > self.plan.rows:
            # With chunked attention, vLLM cuts each sequence at its chunks. If the plan has no room for all of these
            # pieces, prefill the rest.
            starts = common.query_start_loc_cpu[: self.plan.sequences + 1]
            decodes = int((starts <= self.plan.rows).sum()) - 1
            decode_tokens, prefills = int(starts[decodes]), common.num_reqs - decodes
        if (first := self._first_image(common, decodes)) < decodes:
            decodes, decode_tokens = first, int(common.query_start_loc_cpu[first])
            prefills = common.num_reqs - decodes
        lens = common.seq_lens[:decodes]
        several, ordinals = self._several(common, decodes, decode_tokens)
        # Draft tokens attend to tokens that the same step stores. So let decode overlap with the stores only in steps
        # without prefills, in which each sequence has one new token.
        self.plan.update(lens, overlap=not prefills and several is None, several=several)
        found, later = self._prefills(common, decodes, decode_tokens) if prefills else (None, None)
        rows = len(ordinals)
        if found:
            ordinals = torch.cat([ordinals, found.ordinals])
        table = common.block_table_tensor
        nowhere = self.nowhere[: common.slot_mapping.shape[0]]
        return Metadata(self.plan, rows, table, lens, common.slot_mapping, ordinals, found, nowhere, later)

    def _several(self, common: Any, decodes: int, tokens: int) -> tuple[Several | None, torch.Tensor]:
        """Return which query tokens (rows) each decoding sequence has, for steps with draft tokens.

        Args:
            decodes: number of decoding sequences, which come first in the batch.
            tokens: number of their rows.

        Returns:
            The rows of each sequence, or None if each sequence has one row.
            Each row's position in its sequence, int32 [rows], counted from 1.
        """
        starts, lens = common.query_start_loc[: decodes + 1], common.seq_lens[:decodes]
        most = int(common.query_start_loc_cpu[: decodes + 1].diff().max()) if self.width > 1 and decodes else 1
        if most <= 1:
            return None, lens
        rows = min(tokens, decodes * most)  # leave padding out
        owner, seen = owners(starts, lens, rows)
        self.owners[:rows] = torch.where(seen > 0, owner, -1)
        self.seen[:rows] = seen
        return Several(starts, self.owners[:rows], most), self.seen[:rows]

    def warm_up(self) -> None:
        """Launch every variant of our kernels that serving needs.

        Triton compiles a new variant if a constant changes, or if an address or a stride is not a multiple of 16.
        vLLM's own warm-up misses some variants: its prefills have no stored context, and it never mixes decode and
        prefill.
        """
        shape, sequences, rows = self.shape, self.plan.sequences, self.plan.rows
        heads = shape.kv_heads * shape.ratio
        make: dict[str, Any] = {"device": shape.device}
        row = shape.fmt.row_bytes(shape.head_dim)
        cache = torch.zeros(1, shape.kv_heads, shape.block_size, row, dtype=torch.uint8, **make)
        factors = Factors.identity(shape.kv_heads, shape.head_dim, shape.device)
        none = Residuals(*(torch.zeros(count, dtype=torch.int32, **make) for count in ((1, shape.residuals), (1,))))
        pages = GpuPages(cache, shape, factors, none if shape.residuals else None, self.sinks)
        table = torch.zeros(sequences, 1, dtype=torch.int32, **make)
        tokens = max(rows, tuning.FEW_TOKENS + 1)
        lens = torch.ones(tokens, dtype=torch.int32, **make)
        slots = torch.full((tokens,), -1, **make)
        query = torch.zeros(tokens, heads, shape.head_dim, dtype=self.dtype, **make)
        fresh = torch.zeros(tokens, shape.kv_heads, shape.head_dim, dtype=self.dtype, **make)
        for overlap in (False, True):
            for count in powers(sequences):
                self.plan.update(lens[:count], overlap)
                pages.store(
                    query[:count], fresh[:count], fresh[:count], slots[:count], self.plan, count, 1.0, lens[:count]
                )
                pages.decode(table[:count], lens[:count], self.plan, query[:count])
        starts, owner = (torch.zeros(tokens, dtype=torch.int32, **make) for _ in range(2))
        for most in {shape.cut(most).take: most for most in range(2, self.width + 1)}.values():
            for count in powers(rows):
                self.plan.update(lens[:1], several=Several(starts[:2], owner[:count], most))
                pages.decode(table[:1], lens[:1], self.plan, query[:count])
        for most in range(1, self.width + 1):  # `settle` must run before the capture: a CUDA graph fixes the grid
            self.plan.update(lens[:1], several=None if most == 1 else Several(starts[:2], owner[:most], most))
            shape.settle(most, pages.attend(table[:1], lens[:1], self.plan))
        prompt = tuning.FEW_TOKENS + 1
        pages.store(query[:prompt], fresh[:prompt], fresh[:prompt], slots[:prompt], self.plan, 0, 1.0, lens[:prompt])
        ends = torch.tensor([0, 1], dtype=torch.int32, **make)
        pages.gather(*stored_slots(table[:1], ends, lens[:1] - 1, 1, shape.block_size), fresh[:1], fresh[:1])
        if shape.wide:
            for causal in (True, False):
                prefill(query[:1], fresh[:1], fresh[:1], ends, 1, ends, 1.0, causal, shape.softcap)

    def _first_image(self, common: Any, decodes: int) -> int:
        """Return the index of the first decoding sequence with new image tokens, or `decodes` if there is none.

        This sequence and those after it must be prefilled, because image tokens may attend to later tokens.
        """
        if self.width == 1 or not prefix_lm.ranges(common):
            return decodes
        new = common.query_start_loc_cpu.diff().tolist()
        lens = common.seq_lens_cpu_upper_bound  # The lengths are exact for prompts, and only prompts have images.
        seen = (common.seq_lens.cpu() if lens is None else lens).tolist()
        return min(prefix_lm.spans(common, [(i, seen[i] - new[i], new[i]) for i in range(decodes)]), default=decodes)

    def _prefills(self, common: Any, decodes: int, decode_tokens: int) -> tuple[Prefills, prefix_lm.LaterTokens | None]:
        starts = common.query_start_loc_cpu[decodes : common.num_reqs + 1] - decode_tokens
        new = starts[1:] - starts[:-1]
        # The host's lengths are exact only for prompts. For other requests they include rejected drafts, so ask the
        # device.
        lens = common.seq_lens_cpu_upper_bound
        if lens is None or (self.width > 1 and not self._prompts(common, decodes)):
            lens = common.seq_lens.cpu()
        context = lens[decodes : common.num_reqs] - new
        block_table = common.block_table_tensor[decodes : common.num_reqs]
        ordinals = torch.arange(1, int(starts[-1]) + 1) + torch.repeat_interleave(context - starts[:-1], new)
        seen, old, none = context + new, int(context.sum()), torch.zeros_like(context)
        rows = torch.cat([none[:1], seen.cumsum(0)])
        first, uploaded, batch_starts, ends = self._upload(starts, ordinals, starts + decode_tokens, rows)
        prefills = Prefills(first, int(new.max()), int(starts[-1]), uploaded, [])
        total, whole = int(rows[-1]), 0 < old <= self.chunk_tokens - prefills.tokens
        if self.read_back:
            prefills.joined = self._stored(block_table, none, seen)
        elif whole:
            places = joined_slots(block_table, ends, batch_starts, total, self.shape.block_size)
            prefills.joined = ContextChunk(int(seen.max()), total, ends, *places)
        if self.shared and not self.read_back:
            prefills.stored = self._stored(block_table, *((none, seen) if whole else (context, new)))
        if prefills.joined is not None:
            return prefills, self._later(common, decodes, context, new, rows[1:] - new)
        for begins, lengths in packed(context, self.chunk_tokens):
            prefills.context_chunks.append(self._stored(block_table, begins, lengths))
        return prefills, self._later(common, decodes, context, new, starts[:-1])

    def _later(self, common: Any, decodes: int, context: torch.Tensor, new: torch.Tensor,
               keys: torch.Tensor) -> prefix_lm.LaterTokens | None:  # fmt: skip
        """Return which image tokens attend to which later tokens, or None if no token of the step does.

        Args:
            decodes: number of decoding sequences, which come first in the batch.
            context: int [prefilling sequences], stored tokens before the new ones.
            new: int [prefilling sequences], new tokens.
            keys: int [prefilling sequences], index of each sequence's first new key.
        """
        if not prefix_lm.ranges(common):
            return None
        counts = new.tolist()
        sequences = zip(range(decodes, common.num_reqs), context.tolist(), counts, strict=True)
        found = prefix_lm.spans(common, list(sequences))
        if not found:
            return None
        queries = (new.cumsum(0) - new).tolist()
        rows = [(queries[i - decodes] + begin, int(keys[i - decodes]) + begin, end - begin)
                for i, own in found.items() for begin, end in own]  # fmt: skip
        later = prefix_lm.later_tokens(rows)
        of_queries, of_keys, starts = self._upload(later.queries, later.keys, later.starts)
        return prefix_lm.LaterTokens(of_queries, of_keys, starts, later.longest)

    @staticmethod
    def _prompts(common: Any, decodes: int) -> bool:
        """Return True if all sequences after the first `decodes` are known to be prompts."""
        found = getattr(common, "is_prefilling", None)
        return found is not None and bool(found[decodes : common.num_reqs].all())

    def _stored(self, block_table: torch.Tensor, begins: torch.Tensor, lengths: torch.Tensor) -> ContextChunk:
        rows, begins = self._upload(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), begins)
        total = int(lengths.sum())
        places = stored_slots(block_table, rows, begins, total, self.shape.block_size)
        return ContextChunk(int(lengths.max()), total, rows, *places)

    def _upload(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Copy the tensors as int32 to the device in one transfer. Align each to 16 bytes."""
        sizes = [-(-len(part) // 4) * 4 for part in parts]
        whole = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for place, part in zip(whole.split_with_sizes(sizes), parts, strict=True):
            place[: len(part)] = part
        there = whole.to(self.device, non_blocking=True).split_with_sizes(sizes)
        return [place[: len(part)] for place, part in zip(there, parts, strict=True)]
