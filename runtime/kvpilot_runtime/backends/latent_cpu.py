"""Backend of multi-head latent attention (MLA) on a CPU: latent pages, computed in plain torch."""

from typing import Any

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kvpilot_formats.hardware import BLOCK_STEPS
from kvpilot_formats.latent import names, parse
from kvpilot_kernels.latent.cpu import LatentPages
from kvpilot_runtime.backends.latent import LatentBackend, LatentImpl
from kvpilot_runtime.backends.packed import classes_of


class CpuLatentImpl(LatentImpl, CPUMLAImpl):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Attention of one layer over latent pages on a CPU."""

    def pages_of(self, kv_cache: torch.Tensor) -> LatentPages:
        """Return a layer's cache as pages of latents; see `LatentImpl.pages_of`."""
        return LatentPages(kv_cache, self.fmt)

    def forward_mqa(
        self, q: tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Return attention of one absorbed query token per sequence to the sequence's pages, in latent space."""
        absorbed, rope = q
        decode = attn_metadata.decode
        pages = self.pages_of(kv_c_and_k_pe_cache)
        out = pages.decode(absorbed, rope, decode.block_table, decode.seq_lens, self.scale)
        return out.to(absorbed.dtype), None

    def read(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor,
        longest: int, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Dequantize entries from pages into `out`; see `LatentImpl.read`."""
        pages, first = self.pages_of(kv_cache), rows.tolist()
        for i, start in enumerate(starts.tolist()):
            count = first[i + 1] - first[i]
            if count:
                out[first[i] : first[i + 1]] = pages.read(block_table[i], start + count)[start:]


class CpuLatentBackend(LatentBackend):
    """Backend of latent dtypes on a CPU. Each dtype has its own subclass.

    vLLM uses blocks of 16 tokens. On a CPU with AMX, it uses the block size that the user chose.
    """

    block_step = BLOCK_STEPS["cpu"]
    impl, builder = CpuLatentImpl, CPUMLABackend.get_builder_cls()
    supported_dtypes = CPUMLABackend.supported_dtypes


__getattr__ = classes_of(CpuLatentBackend, names, parse)
