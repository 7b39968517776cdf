"""Our attention backend for vLLM on CPU: packed pages in, plain torch out.

vLLM asks a backend class for its page size (`customize_spec`), makes the cache as bytes
[blocks, kv_heads, block_size, row_bytes], stores each step's keys and values through `do_kv_cache_update`, and then
calls `forward` with the whole batch: sequences with one new token decode together, the others prefill one by one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from kvpilot_kernels import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_runtime.compat import HeadMajorPages
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.factors_of_engine import calibration_of

PREFILL_FROM_PAGES = "KVPILOT_PREFILL_FROM_PAGES"
"""Set to 1, a chunk reads itself back from its pages too: outputs then do not depend on how prompts were chunked,
cached or preempted (slightly less accurate; it is what the equivalence tests compare)."""


@dataclass
class Prefill:
    """One sequence of the batch with several new tokens: rows [start, end) of the batch, after `context` tokens."""

    sequence: int
    start: int
    end: int
    context: int


@dataclass
class Metadata:
    """What `forward` needs to know of a batch.

    Attributes:
        block_table: int32 [sequences, blocks].
        seq_lens: int32 [sequences], tokens stored after this step.
        decode_sequences, decode_rows: int64, sequences with one new token and the batch rows of these tokens.
        prefills: the other sequences.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    decode_sequences: torch.Tensor
    decode_rows: torch.Tensor
    prefills: list[Prefill]
    slot_mapping: torch.Tensor


class PackedBackend(HeadMajorPages, AttentionBackend):  # type: ignore[misc]  # vLLM has no types for us
    """What all of our dtypes share; vLLM knows a page's size by the class, so each dtype is a subclass."""

    fmt: ClassVar[formats.Format]
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(formats.own_names())

    @staticmethod
    def get_name() -> str:
        """The slot that vLLM's list of backends keeps for plugins; any other name is refused."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PackedImpl]:
        """The implementation of one layer."""
        return PackedImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """The builder of a batch's metadata."""
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dimensions with a page layout."""
        return list(formats.HEAD_DIMS)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The page size of this dtype: `Format.row_bytes` per token and KV head.

        vLLM also asks for the page of a layer that stays in 16 bits, to make both one size: that one is left alone.

        Raises:
            UnsupportedModelError: no layout for this head dimension, or keys and values of different sizes.
        """
        if spec.dtype != torch.uint8:
            return spec
        if spec.head_size_v != spec.head_size:
            raise UnsupportedModelError(
                f"keys of {spec.head_size} and values of {spec.head_size_v} elements: kv-cache dtype {cls.fmt.name!r} "
                "needs both alike; use --kv-cache-dtype auto"
            )
        try:
            return replace(spec, state_content_bytes=cls.fmt.row_bytes(spec.head_size))
        except formats.UnsupportedHeadDimError as error:
            raise UnsupportedModelError(str(error)) from error


class INT8Backend(PackedBackend):
    """`int8`."""

    fmt = formats.parse("int8")


class K8V4Backend(PackedBackend):
    """`k8v4`."""

    fmt = formats.parse("k8v4")


class K4V4Backend(PackedBackend):
    """`k4v4`."""

    fmt = formats.parse("k4v4")


class K4V2Backend(PackedBackend):
    """`k4v2`."""

    fmt = formats.parse("k4v2")


class K2V2Backend(PackedBackend):
    """`k2v2`."""

    fmt = formats.parse("k2v2")


def refuse_unsupported_options(vllm_config: Any) -> None:
    """Refuse what no backend of ours does.

    Raises:
        UnsupportedModelError: speculative decoding or KV transfer is on.
    """
    dtype = vllm_config.cache_config.cache_dtype
    for option, flag in (("speculative_config", "--speculative-config"),
                         ("kv_transfer_config", "--kv-transfer-config")):  # fmt: skip
        if getattr(vllm_config, option, None) is not None:
            raise UnsupportedModelError(f"{flag} is not supported with kv-cache dtype {dtype!r}; leave one of the"
                                        " two out")  # fmt: skip


class MetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Splits a batch into decodes and prefills, once for all layers.

    Raises (at start):
        UnsupportedModelError: speculative decoding or KV transfer is on.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_unsupported_options(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Metadata of one batch."""
        common = common_attn_metadata
        sequences = common.num_reqs
        starts = common.query_start_loc[: sequences + 1].long()
        seq_lens = common.seq_lens[:sequences]
        lengths = starts[1:] - starts[:-1]
        decode = (lengths == 1).nonzero().flatten()
        prefills = []
        for i in (lengths > 1).nonzero().flatten().tolist():
            start, end = int(starts[i]), int(starts[i + 1])
            prefills.append(Prefill(i, start, end, int(seq_lens[i]) - (end - start)))
        return Metadata(common.block_table_tensor[:sequences], seq_lens, decode, starts[:-1][decode], prefills,
                        common.slot_mapping)  # fmt: skip


class PackedImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer over packed pages.

    Raises (at start):
        UnsupportedModelError: the layer needs ALiBi, attention sinks, a sliding window, or is not a decoder's.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        def refuse(what: str, remedy: str) -> None:
            raise UnsupportedModelError(f"{what} is not supported with kv-cache dtype {kv_cache_dtype!r}; {remedy}")

        if alibi_slopes is not None:
            refuse("a model with ALiBi", "use --kv-cache-dtype auto")
        if sinks is not None:
            refuse("a model with attention sinks", "use --kv-cache-dtype auto")
        if attn_type != AttentionType.DECODER:
            refuse(f"{attn_type} attention", "use --kv-cache-dtype auto")
        if sliding_window is not None:
            refuse("a sliding-window layer", "keep these in 16 bits: --kv-cache-dtype-skip-layers sliding_window")
        asked = sorted(name for name, given in unknown.items() if given not in (None, False, -1))
        if asked:
            refuse(f"an attention layer with {', '.join(asked)}", "use --kv-cache-dtype auto")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.softcap = logits_soft_cap or 0.0
        self.fmt = formats.parse(kv_cache_dtype)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.read_back = os.environ.get(PREFILL_FROM_PAGES) == "1"
        self._calibration = calibration_of(get_current_vllm_config())
        self._pages: tuple[int, PackedPages] | None = None

    def factors_of(self, layer: Any) -> Factors | None:
        """What calibration says of this layer, this rank's KV heads; None without a calibration."""
        return self._calibration.for_layer(layer.layer_name) if self._calibration else None

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Quantize and store a step's keys and values, [tokens, kv_heads, head_dim], into their slots."""
        self._packed(layer, kv_cache).store(key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a batch: query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim].

        Writes `output`, [tokens, heads, head_dim], and returns it.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedModelError("quantized attention outputs are not supported; turn this fusion off")
        if attn_metadata is None:  # vLLM's warm-up
            return output
        pages, meta = self._packed(layer, kv_cache), attn_metadata
        out = output.view(-1, self.num_heads, self.head_size)
        if meta.decode_rows.numel():
            chosen, rows = meta.decode_sequences, meta.decode_rows
            table, lens = meta.block_table[chosen].long(), meta.seq_lens[chosen]
            out[rows] = pages.decode(query[rows], table, lens, self.scale, self.softcap).to(out.dtype)
        for p in meta.prefills:
            new = slice(p.start, p.end)
            table = meta.block_table[p.sequence]
            fresh_key, fresh_value = key[new], value[new]
            if self.read_back:
                length = p.context + p.end - p.start
                stored = pages.read(table, length)
                fresh_key, fresh_value = (x[p.context :].to(query.dtype) for x in stored)
            out[new] = pages.prefill(query[new], fresh_key, fresh_value, table, p.context, self.scale, self.softcap)
        return output

    def _packed(self, layer: Any, kv_cache: torch.Tensor) -> PackedPages:
        """Views of this layer's cache, made once."""
        if self._pages is None or self._pages[0] != kv_cache.data_ptr():
            pages = PackedPages(kv_cache, self.fmt, self.head_size, self.factors_of(layer))
            self._pages = kv_cache.data_ptr(), pages
        return self._pages[1]
