"""Backend of multi-head latent attention (MLA) on CUDA: pages of latents, our decode kernels, vLLM's own prefill.

In each engine step, vLLM calls us to store the new entries, and then computes the absorbed queries. Our split-KV decode
kernel computes attention with these queries, in a full CUDA graph. Prompts use vLLM's fastest prefill backend, with
contexts that the module `latent` reads from the pages.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport

from kvpilot_formats.latent import ENTRY, RANK, LatentFormat, names, parse
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.gpu.mla.pages import GpuLatentPages, LatentPlan, LatentShape
from kvpilot_kernels.latent.factors import LatentFactors
from kvpilot_runtime.backends.cuda_steps import CudaLimits, decode_sizes, warm_up
from kvpilot_runtime.backends.latent import LatentBackend, LatentImpl
from kvpilot_runtime.backends.packed import classes_of
from kvpilot_runtime.backends.reserved import BLOCK, Reserving, release
from kvpilot_runtime.errors import UnsupportedModelError


@cache
def shape_of(fmt: LatentFormat, heads: int, block_size: int, device: torch.device) -> LatentShape:
    """Return the layers' `LatentShape`, which the kernels take. Layers with equal arguments get the same object."""
    try:
        return LatentShape(fmt, heads, block_size, device)
    except BadInputError as error:
        raise UnsupportedModelError(f"kv-cache dtype {fmt.name!r}: {error}") from error


@cache
def no_factors(device: torch.device) -> LatentFactors:
    """Return factors that change nothing. Always return the same tensors, because captured CUDA graphs read them."""
    return LatentFactors.identity(device)


@dataclass
class Decode(MLACommonDecodeMetadata):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """vLLM's metadata of decoding sequences, extended by the plan of the split-KV decode kernel."""

    plan: LatentPlan


class CudaLatentBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """Builder of vLLM's metadata and of the decode plan. It overwrites one plan, which captured graphs read."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        self.shape = shape_of(impl.fmt, self.num_heads, kv_cache_spec.block_size, device)
        release(vllm_config)
        self.plan = LatentPlan(self.shape, decode_sizes(vllm_config)[0])
        warm_up(self.warm_up, vllm_config, device)

    def _build_decode(
        self, block_table_tensor: torch.Tensor, seq_lens_device: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Decode:
        self.plan.update(seq_lens_device)
        return Decode(block_table_tensor, seq_lens_device, None, self.plan)

    def warm_up(self) -> None:
        """Launch every kernel variant that serving needs, so that Triton compiles all variants now."""
        shape, sequences, dims = self.shape, self.plan.sequences, self.mla_dims
        make: dict[str, Any] = {"device": shape.device}
        floats = make | {"dtype": self.model_config.dtype}
        cache = torch.zeros(1, shape.block_size, shape.fmt.row_bytes, dtype=torch.uint8, **make)
        pages = GpuLatentPages(cache, shape, no_factors(shape.device))
        entry = torch.zeros(1, ENTRY, **floats)
        pages.store(entry[:, :RANK].contiguous(), entry[:, RANK:], torch.full((1,), -1, **make))
        table = torch.zeros(sequences, 1, dtype=torch.int32, **make)
        lens = torch.ones(sequences, dtype=torch.int32, **make)
        absorbed = torch.zeros(sequences, shape.heads, RANK, **floats)
        query = torch.zeros(sequences, shape.heads, dims.qk_nope_head_dim + dims.qk_rope_head_dim, **floats)
        pages.prepare(absorbed, query[..., dims.qk_nope_head_dim :], self.plan, 1.0)
        for count in sorted({sequences, *(2**i for i in range(sequences.bit_length()) if 2**i <= sequences)}):
            self.plan.update(lens[:count])
            pages.decode(table, lens[:count], self.plan, torch.empty_like(absorbed))
        pages.gather(table[:1], lens[:1] - 1, torch.tensor([0, 1], dtype=torch.int32, **make), 1, entry)


class CudaLatentImpl(Reserving, LatentImpl, MLACommonImpl):  # type: ignore[misc]
    """Attention of one layer over latent pages on a GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = get_current_vllm_config()
        # Turn this compiler pass off: it stores entries with vLLM's kernel, and would bypass `do_kv_cache_update`.
        self._config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False
        self._gpu_pages: tuple[int, GpuLatentPages] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Process weights as vLLM does. Also reserve a decode plan, so that vLLM counts the plan's memory."""
        super().process_weights_after_loading(act_dtype)
        sequences = decode_sizes(self._config)[0]
        self.reserve(
            self._config, lambda device: LatentPlan(shape_of(self.fmt, self.num_heads, BLOCK, device), sequences)
        )

    def forward_mqa(
        self, q: tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Return attention of one absorbed query token per sequence to the sequence's pages, in latent space."""
        absorbed, rope = q
        decode: Decode = attn_metadata.decode
        pages = self.pages_of(kv_c_and_k_pe_cache)
        pages.prepare(absorbed, rope, decode.plan, self.scale)
        out = torch.empty(absorbed.shape, dtype=absorbed.dtype, device=absorbed.device)
        pages.decode(decode.block_table, decode.seq_lens, decode.plan, out)
        return out, None

    def read(
        self, kv_cache: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor,
        longest: int, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Dequantize entries from pages into `out`; see `LatentImpl.read`."""
        self.pages_of(kv_cache).gather(block_table, starts, rows, longest, out)

    def pages_of(self, kv_cache: torch.Tensor) -> GpuLatentPages:
        """Return a layer's cache as pages of latents, as `LatentImpl.pages_of` does. Create them only once."""
        if self._gpu_pages is None or self._gpu_pages[0] != kv_cache.data_ptr():
            shape = shape_of(self.fmt, self.num_heads, kv_cache.shape[1], kv_cache.device)
            self._gpu_pages = kv_cache.data_ptr(), GpuLatentPages(kv_cache, shape, no_factors(kv_cache.device))
        return self._gpu_pages[1]


class CudaLatentBackend(CudaLimits, LatentBackend):
    """Backend of latent dtypes on CUDA. Each dtype has its own subclass."""

    impl, builder = CudaLatentImpl, CudaLatentBuilder


__getattr__ = classes_of(CudaLatentBackend, names, parse)
