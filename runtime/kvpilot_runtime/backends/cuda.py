"""Attention backend on CUDA: packed pages, our own decode kernels, and FlashAttention for prefill.

In each engine step, one kernel launch stores the new keys and values, and applies the Hadamard rotation to the queries
of decoding sequences. A split-KV kernel then computes their attention, in a full CUDA graph. It reads a sequence's
pages once for all draft tokens of the sequence.

Prefill uses FlashAttention. A kernel dequantizes each sequence's context (its stored tokens) from pages into a
workspace of fixed size, and appends the sequence's new tokens. One call of FlashAttention then reads both. Contexts
that do not fit into the workspace are read in chunks, and the partial results are merged by their log-sum-exp (LSE).
FlashAttention supports heads of at most 256 elements, so wider heads use our own prefill kernel.
"""

import math
from typing import Any, cast

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from kvpilot_formats import formats
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from kvpilot_kernels.gpu.launch.prefill import prefill
from kvpilot_kernels.gpu.layout.page import NARROW
from kvpilot_runtime.backends.cuda_steps import (
    ContextChunk,
    CudaBuilder,
    CudaLimits,
    Metadata,
    Prefills,
    decode_sizes,
)
from kvpilot_runtime.backends.packed import PackedBackend, PackedImpl, classes_of, our_layers
from kvpilot_runtime.backends.prefix_lm import LaterTokens
from kvpilot_runtime.backends.reserved import BLOCK, Reserving
from kvpilot_runtime.config.options import WORKSPACE_SHARE
from kvpilot_runtime.errors import UnsupportedModelError


def workspace_bytes(utilization: float) -> int:
    """Return the size in bytes of the workspace into which prefill dequantizes contexts.

    `utilization` is the fraction of the current GPU's memory that the engine may use.
    """
    return int(torch.cuda.mem_get_info()[1] * utilization) // WORKSPACE_SHARE


class CudaImpl(Reserving, PackedImpl):
    """Attention of one layer over packed pages on a GPU.

    Attributes:
        workspaces: workspace by device. All layers share the dictionary of the engine's first layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # FlashAttention 2 and 3 take heads of at most 256 elements.
        self.own_prefill = self.head_size > NARROW.value
        self.fa_version = None if self.own_prefill else get_flash_attn_version(head_size=self.head_size)
        utilization = self._config.cache_config.gpu_memory_utilization
        self.workspace_tokens = workspace_bytes(utilization) // (4 * self.num_kv_heads * self.head_size)
        self.workspaces: dict[torch.device, torch.Tensor] = {}
        self._first: CudaImpl | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Reserve a decode `Plan`, so that vLLM counts its memory."""
        super().process_weights_after_loading(act_dtype)
        sequences, rows = decode_sizes(self._config)
        self.reserve(self._config, lambda device: Plan(self.shape(BLOCK, device), sequences, 1 + self.drafts, rows))

    def shape(self, block_size: int, device: torch.device) -> Shape:
        """Return this layer's `Shape`, which the kernels take."""
        return Shape(
            self.fmt, self.head_size, self.num_kv_heads, self.num_heads // self.num_kv_heads, block_size, device,
            softcap=self.softcap, residuals=self.fmt.residual_pages(self.head_size, block_size) if self.recent else 0,
        )  # fmt: skip

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
        """Store a batch's keys and values, and compute attention. Write the result to `output`, and return `output`.

        A layer that reads another layer's cache ignores `key` and `value`, because that layer has stored them already.

        Args:
            query, output: [tokens, heads, D].
            key, value: [tokens, kv_heads, D].
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedModelError("quantized attention outputs are not supported; turn this fusion off")
        if attn_metadata is None:  # vLLM's warm-up, in which vLLM measures how much memory the model needs
            self.workspace(query.device, query.dtype)
            return output.zero_()
        meta, prefills = attn_metadata, attn_metadata.prefills
        pages = self.pages_of(layer, kv_cache, meta.plan.shape)
        slots = meta.slot_mapping
        shared = self.kv_sharing_target_layer_name is not None
        if shared or key is None or value is None:
            # This layer reads another layer's cache. With only padding slots, the launch stores nothing, and just
            # rotates the queries.
            slots = meta.nowhere
            key = value = query[:, : self.num_kv_heads]
        pages.store(query, key, value, slots, meta.plan, meta.decodes, self.scale, meta.ordinals)
        if meta.decodes:
            pages.decode(meta.block_table, meta.seq_lens, meta.plan, output)
        if prefills is not None:
            # Leave padding rows out: FlashAttention multiplies the rows after the last token by zero, and 0 * NaN is
            # NaN.
            new = slice(meta.decodes, meta.decodes + prefills.tokens)
            stored = prefills.stored if shared else None
            if prefills.joined is not None:
                key, value = self._read(pages, stored or prefills.joined, query, key, value)
            elif stored is not None:
                key, value = self._read(pages, stored, query, apart=True)
            else:
                key, value = key[new], value[new]
            lse = self._prefill(query[new], key, value, prefills, pages, out := output[new], meta.mm_prefix_range)
            if self.sinks is not None:
                out *= torch.sigmoid(lse.T - self.sinks.float())[..., None].to(out.dtype)
        return output

    def _read(self, pages: GpuPages, part: ContextChunk, like: torch.Tensor, *fresh: torch.Tensor,
              apart: bool = False) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Dequantize a chunk of the contexts, and return its keys and values, [total, kv_heads, D] each.

        The result is in the workspace if it fits there.

        Args:
            part: the chunk.
            like: tensor with the dtype and device of the result.
            fresh: keys and values of the step's new tokens, if the chunk includes new tokens.
            apart: put the result into newly allocated memory instead of the workspace.
        """
        room = part.room
        if room is None:
            workspace = self.workspace(like.device, like.dtype)
            fits = part.total <= workspace.shape[1] and not apart
            if not fits:
                workspace = like.new_empty(2, part.total, self.num_kv_heads, self.head_size)
            room = workspace[0, : part.total], workspace[1, : part.total]
            part.room = room if fits else None
        pages.gather(part.slots, part.ordinals, *room, *fresh)
        return room

    def _prefill(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefills: Prefills,
                 pages: GpuPages, out: torch.Tensor, later: LaterTokens | None) -> torch.Tensor:  # fmt: skip
        """Write attention without sink logits to `out`. Return the LSE of the scores, float32 [heads, tokens].

        `key` and `value` contain contexts and new tokens if `prefills.joined` is set, otherwise only the new tokens.
        For a model with sink logits, `forward` afterwards multiplies `out` by the softmax weight that the sinks leave.
        """
        rows, longest = prefills.starts, prefills.longest
        if (joined := prefills.joined) is not None:
            rows, longest = joined.rows, joined.longest
        chunks = prefills.context_chunks
        merged, lse = self._attend(
            query, key, value, prefills.starts, prefills.longest, rows, longest, True, None if chunks else out
        )
        if later is not None:
            self._add_later(query, key, value, later, merged, lse)
        for i, chunk in enumerate(chunks):
            old_key, old_value = self._read(pages, chunk, query)
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
        """Compute attention of image tokens to later tokens of their image. Merge it into the causal `out`, `lse`."""
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
        """Return attention over 16-bit keys and values, and the LSE of its scores. Write to `out` if it is given.

        Args:
            starts: int32 [sequences + 1], index of each sequence's first query.
            most: largest number of queries of a sequence.
            rows: int32 [sequences + 1], index of each sequence's first key.
            longest: largest number of keys of a sequence.
        """
        if self.own_prefill:
            return prefill(query, key, value, starts, most, rows, self.scale, causal, self.softcap, out)
        found: tuple[torch.Tensor, torch.Tensor] = flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=starts, max_seqlen_q=most, cu_seqlens_k=rows, max_seqlen_k=longest,
            softmax_scale=self.scale, causal=causal, softcap=self.softcap, out=out, fa_version=self.fa_version,
            return_softmax_lse=True,
        )  # fmt: skip
        return found

    def workspace(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the workspace, [2, tokens, kv_heads, D], a view of memory that all layers share.

        The first call allocates the memory. This call happens in vLLM's profiling run, so vLLM counts the memory.
        """
        if self._first is None:
            self._first = next((layer.impl for layer in our_layers(self._config).values()), self)
        shape = (2, self.workspace_tokens, self.num_kv_heads, self.head_size)
        size, kept = math.prod(shape) * dtype.itemsize, self._first.workspaces
        if device not in kept or kept[device].numel() < size:
            kept[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[device][:size].view(dtype).view(shape)

    def pages_of(self, layer: Any, kv_cache: torch.Tensor, shape: Shape) -> GpuPages:
        """Return this layer's cache as packed pages. Create and check the views only in the first call."""
        if self.views is None or self.views[0] != kv_cache.data_ptr():
            factors, residuals = self.factors(layer, kv_cache.device), self.residuals(kv_cache)
            self.views = kv_cache.data_ptr(), GpuPages(kv_cache, shape, factors, residuals, self.sinks)
        return cast(GpuPages, self.views[1])


class CudaBackend(CudaLimits, PackedBackend):
    """Backend of our dtypes on CUDA. Each dtype has its own subclass. `forward` stores tokens and attends."""

    impl, builder = CudaImpl, CudaBuilder
    forward_includes_kv_cache_update = True


__getattr__ = classes_of(CudaBackend, formats.own_names, formats.parse)
