"""Our backend of multi-head latent attention (MLA) on a CPU: latent pages in, plain torch out."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kvpilot_formats.hardware import BLOCK_STEPS
from kvpilot_formats.latent import names, parse
from kvpilot_kernels.latent.cpu import LatentPages
from kvpilot_runtime.backends.latent import LatentBackend, LatentImpl
from kvpilot_runtime.backends.packed import classes_of


class CpuLatentBackend(LatentBackend):
    """What both dtypes share on a CPU."""

    supported_dtypes = CPUMLABackend.supported_dtypes

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of any multiple of 16 tokens; vLLM has 16, or what the user says where a CPU has AMX."""
        return [MultipleOf(BLOCK_STEPS["cpu"])]

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The attention of a layer."""
        return CpuLatentImpl


class CpuLatentImpl(LatentImpl, CPUMLAImpl):  # type: ignore[misc]  # vLLM has no types for us
    """Attention of one layer over latent pages on a CPU."""

    def pages_of(self, kv_cache: torch.Tensor) -> LatentPages:
        """As `LatentImpl.pages_of`."""
        return LatentPages(kv_cache, self.fmt)

    def forward_mqa(
        self, q: tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Decode: one query token of each sequence, absorbed, over its pages; in latent space."""
        absorbed, rope = q
        decode = attn_metadata.decode
        pages = self.pages_of(kv_c_and_k_pe_cache)
        out = pages.decode(absorbed, rope, decode.block_table, decode.seq_lens, self.scale)
        return out.to(absorbed.dtype), None

    def read(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor,
        longest: int, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `LatentImpl.read`."""
        pages, first = self.pages_of(kv_cache), rows.tolist()
        for i, start in enumerate(starts.tolist()):
            count = first[i + 1] - first[i]
            if count:
                out[first[i] : first[i + 1]] = pages.read(block_table[i], start + count)[start:]


__getattr__ = classes_of(CpuLatentBackend, names, parse)
