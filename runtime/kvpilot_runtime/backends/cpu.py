"""Attention backend on a CPU: packed pages, computed in plain torch.

The cache is uint8 [blocks, kv_heads, block_size, row_bytes]. In each engine step vLLM calls `do_kv_cache_update` to
store the new keys and values, and then `forward` to compute attention for the whole batch. One call computes all
decoding sequences (one new token each, plus draft tokens), with one query row per token. The other sequences are
prefilled one by one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from vllm.forward_context import get_forward_context

from kvpilot_formats import formats
from kvpilot_formats.hardware import BLOCK_STEPS
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.places import owners
from kvpilot_runtime.backends import prefix_lm
from kvpilot_runtime.backends.packed import PackedBackend, PackedBuilder, PackedImpl, classes_of
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.speculation import drafts


@dataclass
class Prefill:
    """Sequence that is prefilled in this engine step.

    Attributes:
        sequence: index of the sequence in the batch.
        start, end: the sequence's new tokens are rows [start, end) of the batch.
        context: number of tokens that were stored before the new ones.
    """

    sequence: int
    start: int
    end: int
    context: int


@dataclass
class Metadata:
    """Metadata of a batch for all layers: the sequence of each token, and the tokens' slots.

    Attributes:
        block_table: int32 [sequences, blocks].
        decode_rows: int64 [decoding tokens], rows of the batch.
        decode_sequences: int64 [decoding tokens], the sequence of each row in `decode_rows`.
        decode_ends: int32 [decoding tokens], stored tokens of the sequence of each row in `decode_rows`.
        prefills: sequences that do not decode.
        ordinals: int32 [tokens], each token's position in its sequence, counted from 1.
        mm_prefix_range: ranges of image tokens that attend in both directions, by sequence. Keep this name: for layers
            without such attention, vLLM's Gemma 4 deletes the attribute.
    """

    block_table: torch.Tensor
    decode_sequences: torch.Tensor
    decode_ends: torch.Tensor
    decode_rows: torch.Tensor
    prefills: list[Prefill]
    slot_mapping: torch.Tensor
    ordinals: torch.Tensor
    mm_prefix_range: dict[int, prefix_lm.Spans] | None = None


class CpuBuilder(PackedBuilder):
    """Builder that makes a batch's `Metadata` once for all layers."""

    def describe(self, common: Any) -> Metadata:
        """Return the metadata of one batch, from vLLM's `CommonAttentionMetadata`."""
        sequences = common.num_reqs
        starts = common.query_start_loc[: sequences + 1].long()
        owner, ordinals = owners(starts, common.seq_lens[:sequences], int(starts[-1]))
        lengths = starts[1:] - starts[:-1]
        # Exclude prompts, too: the last chunk of a prompt may be as short as a decoding sequence with drafts.
        short = lengths <= 1 + drafts(self.vllm_config)
        if (prompts := getattr(common, "is_prefilling", None)) is not None:
            short &= ~prompts[:sequences]
        decode = short | (lengths == 1)
        prefills = []
        for i in (~decode & (lengths > 0)).nonzero().flatten().tolist():
            start, end = int(starts[i]), int(starts[i + 1])
            prefills.append(Prefill(i, start, end, int(common.seq_lens[i]) - (end - start)))
        rows = decode[owner].nonzero().flatten()
        both_ways = prefix_lm.spans(common, [(p.sequence, p.context, p.end - p.start) for p in prefills])
        owner = owner[rows]
        return Metadata(common.block_table_tensor[:sequences], owner, common.seq_lens[owner], rows, prefills,
                        common.slot_mapping, ordinals, both_ways)  # fmt: skip


class CpuImpl(PackedImpl):
    """Attention of one layer over packed pages on a CPU."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Quantize a step's keys and values, [tokens, kv_heads, head_dim], and store them in their slots."""
        # vLLM's warm-up has no metadata. All its slots are padding, so no ordinals are needed.
        step = get_forward_context().attn_metadata
        ordinals = step[layer.layer_name].ordinals if step else None
        self.pages_of(layer, kv_cache).store(key, value, slot_mapping, ordinals)

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
        """Compute attention for a whole batch. Write the result to `output`, and return `output`.

        Args:
            query, output: [tokens, heads, head_dim].
            key, value: [tokens, kv_heads, head_dim]; may be None in a layer that reads another layer's cache.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedModelError("quantized attention outputs are not supported; turn this fusion off")
        if attn_metadata is None:  # vLLM's warm-up
            return output
        pages, meta = self.pages_of(layer, kv_cache), attn_metadata
        out = output.view(-1, self.num_heads, self.head_size)
        if meta.decode_rows.numel():
            rows = meta.decode_rows
            table, lens = meta.block_table[meta.decode_sequences].long(), meta.ordinals[rows]
            found = pages.decode(query[rows], table, lens, self.scale, self.softcap, self.sinks, meta.decode_ends)
            out[rows] = found.to(out.dtype)
        for p in meta.prefills:
            new = slice(p.start, p.end)
            table = meta.block_table[p.sequence]
            shared = self.kv_sharing_target_layer_name is not None
            if self.read_back or shared or key is None or value is None:
                stored = pages.read(table, p.context + p.end - p.start)
                fresh_key, fresh_value = (x[p.context :].to(query.dtype) for x in stored)
            else:
                fresh_key, fresh_value = key[new], value[new]
            out[new] = pages.prefill(
                query[new], fresh_key, fresh_value, table, p.context, self.scale, self.softcap, self.sinks,
                (meta.mm_prefix_range or {}).get(p.sequence, ()),
            )  # fmt: skip
        return output

    def pages_of(self, layer: Any, kv_cache: torch.Tensor) -> PackedPages:
        """Return this layer's cache as packed pages. Create the views only in the first call."""
        if self.views is None or self.views[0] != kv_cache.data_ptr():
            pages = PackedPages(kv_cache, self.fmt, self.head_size, self.factors(layer), self.residuals(kv_cache))
            self.views = kv_cache.data_ptr(), pages
        return cast(PackedPages, self.views[1])


class CpuBackend(PackedBackend):
    """Backend of our dtypes on a CPU. Each dtype has its own subclass."""

    block_step = BLOCK_STEPS["cpu"]
    impl, builder = CpuImpl, CpuBuilder
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]


__getattr__ = classes_of(CpuBackend, formats.own_names, formats.parse)
