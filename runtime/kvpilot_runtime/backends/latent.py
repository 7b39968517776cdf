"""Base classes of our backends for multi-head latent attention (MLA): page sizes, prefill, and unsupported features.

An *entry* is what MLA stores per token: the latent and its RoPE part. vLLM's own prefill backend computes attention for
prompts. This module gives it the context: it reads the entries from the pages, in the chunks that vLLM plans, and
expands them to keys and values of each head. `latent_cpu` and `latent_cuda` store entries. They decode in the absorbed
form: queries are projected into latent space first, and then multiplied by latents directly.
"""

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

from kvpilot_formats.arguments import rules
from kvpilot_formats.latent import ENTRY, RANK, LatentFormat, parse
from kvpilot_runtime.backends.packed import PREFILL_FROM_PAGES, OurBackend, refuse_beside

if TYPE_CHECKING:  # Import it only for type checks: the GPU module needs Triton, which some machines lack.
    from kvpilot_kernels.gpu.mla.pages import GpuLatentPages
    from kvpilot_kernels.latent.cpu import LatentPages


class LatentBackend(OurBackend, MLACommonBackend):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Base of the backends for pages of latents, on CPU and CUDA."""

    fmt: ClassVar[LatentFormat]
    remedies: ClassVar[dict[str, str]] = {
        "sparse not supported": "sparse attention, as in DeepSeek V3.2, is not supported",
        "non-MLA not supported": "it has no multi-head latent attention (choose a dtype with k and v in its name)",
        "head_size not supported": f"a latent other than 512 elements and {ENTRY - RANK} with RoPE is not supported",
    }

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the only supported size: 576 elements, a latent and its RoPE part."""
        return [ENTRY]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with `LatentFormat.row_bytes` as bytes of a token. Layers in 16 bits keep their page size."""
        return spec if spec.dtype != torch.uint8 else replace(spec, state_content_bytes=cls.fmt.row_bytes)


class LatentImpl:
    """Mixin for vLLM's MLA class of a platform, which computes attention of one layer over pages of latents."""

    kv_cache_dtype: str
    kv_lora_rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fmt = parse(self.kv_cache_dtype)
        self.read_back = os.environ.get(PREFILL_FROM_PAGES) == "1"
        refuse_beside(get_current_vllm_config(), (*rules.BESIDE_ANY, *rules.BESIDE_LATENT))

    @abstractmethod
    def pages_of(self, kv_cache: torch.Tensor) -> "LatentPages | GpuLatentPages":
        """Return a layer's cache, uint8 [blocks, block_size, row_bytes], as pages of latents."""

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor,
        *_scales: Any, **_more: Any,
    ) -> None:  # fmt: skip
        """Write a step's entries into their slots. Ignore vLLM's scales, which belong to vLLM's own dtypes."""
        if kv_cache.numel():
            self.pages_of(kv_cache).store(kv_c_normed, k_pe.squeeze(1), slot_mapping.flatten())

    @abstractmethod
    def read(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor,
        longest: int, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Dequantize entries from pages into `out`.

        Args:
            block_table: int32 [sequences, blocks].
            starts: int32 [sequences], position of the first token to read in each sequence.
            rows: int32 [sequences + 1], index of each sequence's first row in `out`.
            longest: largest number of rows of a sequence.
            out: output, [tokens, 576] in the model's dtype.
        """

    def forward_mha(
        self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Prefill as vLLM does: queries attend to the new tokens in 16 bits, and to their context as read from pages.

        If `PREFILL_FROM_PAGES` is on, first store the new tokens and read them back, so that they are quantized,
        too.
        """
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
        """Return attention to the contexts, and its LSE. vLLM merges both with the attention to new tokens.

        This method replaces vLLM's own, whose kernels read only vLLM's dtypes.
        """
        prefill = attn_metadata.prefill
        context = prefill.chunked_context
        merged: Any = None  # The loop always sets it, because vLLM calls this method only with at least one chunk.
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
        """Expand entries [tokens, 576] to keys, [tokens, heads, nope + 64], and values, [tokens, heads, value]."""
        impl: Any = self
        up = impl.kv_b_proj(entries[:, :RANK])[0]
        nope, value = up.view(len(entries), impl.num_heads, -1).split([impl.qk_nope_head_dim, impl.v_head_dim], -1)
        return impl._concat_k_nope_k_pe(nope, entries[:, None, RANK:]), value
