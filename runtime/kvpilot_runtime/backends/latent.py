"""What our backends of multi-head latent attention (MLA) have in common: pages, refusals, and how prefill reads them.

vLLM makes keys and values of each head out of a prompt's latents itself, by its own prefill backend, and asks for the
context as entries in the model's own elements. Those are read from the pages here, a chunk at a time as vLLM plans it;
what is stored, and decode in the absorbed form, are the platform's (`latent_cpu`, `latent_cuda`).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)

from kvpilot_formats.latent import ENTRY, RANK, LatentFormat, parse
from kvpilot_runtime.backends.packed import PREFILL_FROM_PAGES, refuse_beside_any
from kvpilot_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:  # Triton is not there on every CPU
    from kvpilot_kernels.gpu.latent_pages import GpuLatentPages
    from kvpilot_kernels.latent.cpu import LatentPages

_REMEDIES = {
    "sparse not supported": "sparse attention, as in DeepSeek V3.2, is not supported",
    "non-MLA not supported": "it has no multi-head latent attention (choose one of the dtypes that say k and v)",
    "batch invariance not supported": "batch invariance is not supported (unset VLLM_BATCH_INVARIANT)",
    "head_size not supported": f"a latent other than 512 elements and {ENTRY - RANK} with RoPE is not supported",
}


class LatentBackend(MLACommonBackend):  # type: ignore[misc]  # vLLM has no types for us
    """What both dtypes share on every platform."""

    fmt: ClassVar[LatentFormat]

    @staticmethod
    def get_name() -> str:
        """The slot that vLLM's list of backends keeps for plugins; any other name is refused."""
        return "CUSTOM"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Elements of an entry with a page layout."""
        return [ENTRY]

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's reasons against this backend for a layer, with the remedy where there is one of its own."""
        return [_REMEDIES.get(reason, reason) for reason in super().validate_configuration(*args, **kwargs)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The page size of this dtype: `LatentFormat.row_bytes` per token; a layer that stays in 16 bits keeps its."""
        return spec if spec.dtype != torch.uint8 else replace(spec, state_content_bytes=cls.fmt.row_bytes)


class LatentImpl:
    """Attention of one layer over latent pages; stands before vLLM's own class of the platform.

    Raises (at start):
        UnsupportedModelError: there is speculation, KV transfer, context parallelism or dual batch overlap, or some
            layers stay in 16 bits.
    """

    kv_cache_dtype: str
    kv_lora_rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fmt = parse(self.kv_cache_dtype)
        self.read_back = os.environ.get(PREFILL_FROM_PAGES) == "1"
        config = get_current_vllm_config()
        refuse_beside_any(config)
        for given, what in (
            (config.speculative_config is not None, "speculative decoding (--speculative-config)"),
            (config.kv_transfer_config is not None, "KV transfer or offloading (--kv-transfer-config, "
                                                    "--kv-offloading-size)"),
            (bool(config.cache_config.kv_cache_dtype_skip_layers), "--kv-cache-dtype-skip-layers"),
        ):  # fmt: skip
            if given:
                raise UnsupportedModelError(
                    f"{what} is not supported with kv-cache dtype {self.fmt.name!r}; leave one of the two out"
                )

    @abstractmethod
    def pages_of(self, kv_cache: torch.Tensor) -> LatentPages | GpuLatentPages:
        """A layer's cache, uint8 [blocks, block_size, row_bytes], as latent pages."""

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor,
        *_scales: Any, **_more: Any,
    ) -> None:  # fmt: skip
        """Write a step's entries into their slots; vLLM's further arguments are of its own dtypes' scales."""
        if kv_cache.numel():
            self.pages_of(kv_cache).store(kv_c_normed, k_pe.squeeze(1), slot_mapping.flatten())

    @abstractmethod
    def read(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor,
        longest: int, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Read entries back from pages.

        Args:
            block_table: int32 [sequences, blocks]. starts: int32 [sequences], each one's first token.
            rows: int32 [sequences + 1], where each one's tokens start in `out`; their differences are the counts, at
                most `longest`.
            out: [tokens, 576] of the model's dtype, written.
        """

    def forward_mha(
        self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Prefill of the new tokens as they are, or as they are read back from pages (`PREFILL_FROM_PAGES`)."""
        if self.read_back:
            prefill = attn_metadata.prefill
            context, rows = prefill.chunked_context, prefill.query_start_loc
            starts = torch.zeros_like(rows[:-1]) if context is None else context.context_lens
            own = torch.empty(len(kv_c_normed), ENTRY, dtype=kv_c_normed.dtype, device=kv_c_normed.device)
            self.read(kv_cache, prefill.block_table, starts, rows, prefill.max_query_len, own)
            kv_c_normed, k_pe = own[:, :RANK], own[:, None, RANK:]
        super().forward_mha(q, kv_c_normed, k_pe, kv_cache, attn_metadata, *args, **kwargs)  # type: ignore[misc]

    def _compute_prefill_context(
        self, q: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any, k_scale: torch.Tensor
    ) -> Any:
        """Attention of a step's prefills to their contexts, and its log-sums; vLLM merges it with that to new tokens.

        In place of vLLM's own, whose kernels read its own dtypes alone.
        """
        prefill = attn_metadata.prefill
        context = prefill.chunked_context
        merged: Any = None  # there is a chunk, or vLLM would not ask
        for chunk in context.chunks:
            entries = context.workspace[: chunk.num_context_tokens]
            table = prefill.block_table[chunk.request_slice]
            self.read(kv_cache, table, chunk.starts, chunk.cu_seq_lens, chunk.max_seq_len, entries)
            key, value = self._keys_and_values(entries)
            part = prefill.prefill_backend.run_prefill_context_chunk(
                chunk=chunk, q=q[chunk.token_slice], k=key, v=value
            )
            if merged is None:
                if len(context.chunks) == 1 and not context.empty_token_slices:
                    return part
                merged = init_mla_context_partial(context, *part, num_tokens=q.shape[0])
            accumulate_mla_context_chunk(chunk, *part, *merged)
        return merged

    def _keys_and_values(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each head, [tokens, heads, nope + 64] and [tokens, heads, value], from entries [tokens, 576]."""
        impl: Any = self
        up = impl.kv_b_proj(entries[:, :RANK])[0]
        nope, value = up.view(len(entries), impl.num_heads, -1).split([impl.qk_nope_head_dim, impl.v_head_dim], -1)
        return impl._concat_k_nope_k_pe(nope, entries[:, None, RANK:]), value
