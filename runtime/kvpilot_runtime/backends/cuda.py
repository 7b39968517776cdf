"""Our attention backend for vLLM on CUDA: packed pages, our decode kernels, FlashAttention for prefill.

A step's keys and values are stored by one launch, which also rotates the queries of sequences that decode. These then
go through split decode over the pages, in a full CUDA graph; a sequence's pages are read once for all of its draft
tokens. Sequences with more new tokens attend by FlashAttention: their contexts are read from the pages into a workspace
of fixed size, their new tokens are copied behind them, and one call runs over both. Contexts that do not fit come chunk
by chunk, and the partial results are merged by their log-sums. Where heads have more elements than FlashAttention
takes, a kernel of ours does the same.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from kvpilot_formats import formats
from kvpilot_formats.hardware import BLOCK_STEPS
from kvpilot_kernels.gpu.codec import NARROW
from kvpilot_kernels.gpu.pages import GpuPages, Plan, Shape
from kvpilot_kernels.gpu.prefill import prefill
from kvpilot_runtime.backends.cuda_steps import (
    ContextChunk,
    CudaBuilder,
    CudaRingBuilder,
    Metadata,
    Prefills,
    decode_sizes,
)
from kvpilot_runtime.backends.packed import PackedBackend, PackedImpl, RingBackend, classes_of, our_layers
from kvpilot_runtime.backends.prefix_lm import LaterTokens
from kvpilot_runtime.backends.reserved import BLOCK, Reserving
from kvpilot_runtime.config.options import WORKSPACE_SHARE
from kvpilot_runtime.errors import UnsupportedModelError


def workspace_bytes(utilization: float) -> int:
    """Return the size of the workspace of an engine that may use this part of the current GPU's memory."""
    return int(torch.cuda.mem_get_info()[1] * utilization) // WORKSPACE_SHARE


class CudaImpl(Reserving, PackedImpl):
    """Attention of one layer over packed pages on a GPU.

    Attributes:
        workspaces: by device the workspace of all layers of the engine, which the first one has: it goes with them.

    Raises (at start):
        UnsupportedModelError: as `PackedImpl`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gpu_pages: tuple[int, GpuPages] | None = None
        # FlashAttention 2 and 3 take heads of up to 256 elements.
        self.own_prefill = self.head_size > NARROW.value
        self.fa_version = None if self.own_prefill else get_flash_attn_version(head_size=self.head_size)
        utilization = self._config.cache_config.gpu_memory_utilization
        self.workspace_tokens = workspace_bytes(utilization) // (4 * self.num_kv_heads * self.head_size)
        self.workspaces: dict[torch.device, torch.Tensor] = {}
        self._first: CudaImpl | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Do as `PackedImpl` does, and hold the plan of a step, so that vLLM counts it."""
        super().process_weights_after_loading(act_dtype)
        sequences, rows = decode_sizes(self._config)
        self.reserve(
            self._config, lambda device: Plan(self.shape(BLOCK, device), sequences, 1 + self.drafts, rows)
        )  # fmt: skip

    def shape(self, block_size: int, device: torch.device) -> Shape:
        """What the kernels need to know of this layer."""
        shape = Shape(
            self.fmt, self.head_size, self.num_kv_heads, self.num_heads // self.num_kv_heads, block_size, device,
            softcap=self.softcap, recent=self.recent or 0,
        )  # fmt: skip
        if shape.recent:
            shape.ring_blocks = self.fmt.ring_blocks(shape.recent + self.drafts, self.head_size, block_size)
        return shape

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a batch and attend: query [tokens, heads, D], key and value [tokens, kv_heads, D].

        A layer that uses another layer's cache has neither, or ignores them: that layer has stored the step's tokens.
        Writes `output`, [tokens, heads, D], and returns it.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedModelError("quantized attention outputs are not supported; turn this fusion off")
        workspace = self.workspace(query.device, query.dtype)
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        meta = attn_metadata
        out = output.view(-1, self.num_heads, self.head_size)
        pages = self.pages_of(layer, kv_cache, meta.plan.shape)
        rings, slots = self.rings(), meta.slot_mapping
        ring_slots = None if rings is None else rings.slots[: slots.shape[0]]
        shared = self.kv_sharing_target_layer_name is not None
        if shared or key is None or value is None:
            # Every slot is padding: queries are rotated and nothing is stored, whatever stands for keys and values.
            slots, ring_slots = meta.nowhere, None if ring_slots is None else meta.nowhere
            key = value = query[:, : self.num_kv_heads]
        pages.store(query, key, value, slots, meta.plan, meta.decodes, self.scale, ring_slots, meta.ordinals)
        if meta.decodes:
            pages.decode(meta.block_table, meta.seq_lens, meta.plan, out, None if rings is None else rings.table)
        if meta.prefills is not None:
            # Without the rows of padding: FlashAttention multiplies what follows its tokens by zero, and NaN stays NaN.
            new = slice(meta.decodes, meta.decodes + meta.prefills.tokens)
            if shared:
                assert meta.prefills.stored is not None  # noqa: S101  # for mypy: there is such a layer
                key, value = self._read(pages, meta.prefills.stored, query, None)
            else:
                key, value = key[new], value[new]
            lse = self._prefill(query[new], key, value, meta.prefills, pages, workspace, out[new], meta.mm_prefix_range)
            if self.sinks is not None:
                out[new] *= torch.sigmoid(lse.T - self.sinks.float())[..., None].to(out.dtype)
        return output

    def _read(self, pages: GpuPages, part: ContextChunk, like: torch.Tensor, workspace: torch.Tensor | None,
              *fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Lay out keys and values of a part, [total, kv_heads, D], in the workspace if there is one that has room.

        `fresh`: key and value of the new tokens, where the part has some that are not read from pages.
        """
        if workspace is None or part.total > workspace.shape[1]:
            workspace = like.new_empty(2, part.total, self.num_kv_heads, self.head_size)
        key, value = workspace[0, : part.total], workspace[1, : part.total]
        pages.gather(part.slots, part.ordinals, key, value, *fresh)
        return key, value

    def _prefill(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefills: Prefills,
                 pages: GpuPages, workspace: torch.Tensor, out: torch.Tensor,
                 later: LaterTokens | None) -> torch.Tensor:  # fmt: skip
        """Attention without sinks, written to `out`; returns the log-sums of the scores, float32 [heads, tokens]."""
        rows, longest = prefills.starts, prefills.longest
        if (joined := prefills.joined) is not None:
            key, value = self._read(pages, joined, query, workspace, key, value)
            rows, longest = joined.rows, joined.longest
        chunks = prefills.context_chunks
        merged, lse = self._attend(
            query, key, value, prefills.starts, prefills.longest, rows, longest, True, None if chunks else out
        )
        if later is not None:
            self._add_later(query, key, value, later, merged, lse)
        for i, chunk in enumerate(chunks):
            old_key, old_value = self._read(pages, chunk, query, workspace)
            part, part_lse = self._attend(
                query, old_key, old_value, prefills.starts, prefills.longest, chunk.rows, chunk.longest, False
            )
            target = out if i == len(chunks) - 1 else torch.empty_like(merged)
            both = torch.empty_like(lse)
            merge_attn_states(target, part, part_lse, merged, lse, both)
            merged, lse = target, both
        return lse

    def _add_later(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, later: LaterTokens,
                   out: torch.Tensor, lse: torch.Tensor) -> None:  # fmt: skip
        """Merge what tokens see of later ones into their causal attention, `out` and `lse`."""
        rows = later.queries
        part, part_lse = self._attend(
            query[rows], key[later.keys], value[later.keys], later.starts, later.longest, later.starts, later.longest,
            True,
        )  # fmt: skip
        both, both_lse = torch.empty_like(part), torch.empty_like(part_lse)
        merge_attn_states(both, part, part_lse, out[rows], lse[:, rows].contiguous(), both_lse)
        out[rows], lse[:, rows] = both, both_lse

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, most: int,
                rows: torch.Tensor, longest: int, causal: bool,
                out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Attention over keys and values in 16 bits: queries of each sequence from `starts` on, `most` at most, its
        keys from `rows` on, `longest` at most; returns outputs, in `out` if given, and log-sums."""
        if self.own_prefill:
            return prefill(query, key, value, starts, most, rows, self.scale, causal, self.softcap, out)
        found: tuple[torch.Tensor, torch.Tensor] = flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=starts, max_seqlen_q=most, cu_seqlens_k=rows, max_seqlen_k=longest,
            softmax_scale=self.scale, causal=causal, softcap=self.softcap, out=out, fa_version=self.fa_version,
            return_softmax_lse=True,
        )  # fmt: skip
        return found

    def workspace(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[2, tokens, kv_heads, D], in bytes that all layers share; made while vLLM measures what memory is left."""
        if self._first is None:
            self._first = next((layer.impl for layer in our_layers(self._config).values()), self)
        shape = (2, self.workspace_tokens, self.num_kv_heads, self.head_size)
        size, kept = math.prod(shape) * dtype.itemsize, self._first.workspaces
        if device not in kept or kept[device].numel() < size:
            kept[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[device][:size].view(dtype).view(shape)

    def pages_of(self, layer: Any, kv_cache: torch.Tensor, shape: Shape) -> GpuPages:
        """Views of this layer's cache, made once."""
        if self._gpu_pages is None or self._gpu_pages[0] != kv_cache.data_ptr():
            factors = self.factors(layer, kv_cache.device)
            ring = self.ring.kv_cache if self.ring is not None else None
            self._gpu_pages = kv_cache.data_ptr(), GpuPages(kv_cache, shape, factors, ring, self.sinks)
        return self._gpu_pages[1]


class CudaBlocks:
    """The blocks that the kernels take."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of any multiple of 64 tokens: a tile of the decode kernel lies in one page."""
        return [MultipleOf(BLOCK_STEPS["cuda"])]


class CudaRingBackend(CudaBlocks, RingBackend):
    """The ring layers' on CUDA."""

    @staticmethod
    def get_builder_cls() -> type[CudaRingBuilder]:
        """The builder of a batch's rings."""
        return CudaRingBuilder


class CudaBackend(CudaBlocks, PackedBackend):
    """What all of our dtypes share on CUDA: one call stores and attends, in blocks that fit the kernels' tiles."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @classmethod
    def recent_backend(cls) -> type[CudaRingBackend]:
        """The backend of the layers that have the rings."""
        return CudaRingBackend

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        """The implementation of one layer."""
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaBuilder]:
        """The builder of a batch's metadata."""
        return CudaBuilder

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From Ampere on: the kernels use asynchronous copies and 16-bit tensor cores with float32 sums."""
        return bool(capability.major >= 8)


__getattr__ = classes_of(CudaBackend, formats.own_names, formats.parse)
