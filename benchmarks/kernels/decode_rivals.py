"""Measure other projects' decode kernels for `decode.py`, as vLLM uses them: FlashAttention 3, XQA, and vLLM's Triton.

The Triton kernel is measured only for heads of more than 256 elements, which the other two do not support.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import triton

from benchmarks.kernels.timing import layers_for, microseconds

Run = Callable[[Any, torch.device], dict[str, Any]]
FP8 = torch.float8_e4m3fn


def installed(dim: int) -> dict[str, Run]:
    """Return the installed kernels of other projects that support this head_dim, as functions that measure a case."""
    found: dict[str, Run] = {}
    if dim > 256:
        if importlib.util.find_spec("vllm"):
            found["vLLM Triton bf16"] = triton_attention
        return found
    if importlib.util.find_spec("vllm"):
        found["FlashAttention 3 bf16"] = lambda case, device: flash_attention(case, device, torch.bfloat16)
        found["FlashAttention 3 fp8"] = lambda case, device: flash_attention(case, device, FP8)
    if importlib.util.find_spec("flashinfer"):
        found["FlashInfer XQA bf16"] = lambda case, device: xqa(case, device, torch.bfloat16)
        found["FlashInfer XQA fp8"] = lambda case, device: xqa(case, device, FP8)
    return found


def _caches(case: Any, device: torch.device, dtype: torch.dtype, block: int) -> tuple[list[Any], int, torch.Tensor]:
    """Return random caches, [blocks, 2, block, kv_heads, D] each, the bytes that decode reads, and a block table."""
    per = -(-case.context // block)
    size = 2 * case.batch * case.context * case.kv_heads * case.dim * torch.finfo(dtype).bits // 8
    shape = (per * case.batch + 1, 2, block, case.kv_heads, case.dim)
    caches = []
    for _ in range(layers_for(size)):
        cache = torch.empty(shape, dtype=dtype, device=device)
        for part in cache.split(max(1, 2**28 // cache[0].numel())):
            part.copy_(torch.randn(part.shape, device=device))
        caches.append(cache)
    return caches, size, (1 + torch.randperm(per * case.batch, device=device)).view(case.batch, per).int()


def flash_attention(case: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure FlashAttention 3 over a paged cache. As vLLM does, compute its schedule outside the measured time."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    caches, size, table = _caches(case, device, dtype, 16)
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    query = torch.randn(case.batch, case.heads, case.dim, device=device).to(dtype)
    out = torch.empty(case.batch, case.heads, case.dim, dtype=torch.bfloat16, device=device)
    schedule = get_scheduler_metadata(
        batch_size=case.batch, max_seqlen_q=1, max_seqlen_k=case.context, num_heads_q=case.heads,
        num_heads_kv=case.kv_heads, headdim=case.dim, cache_seqlens=lens, qkv_dtype=dtype, cu_seqlens_q=starts,
        page_size=16, causal=True, num_splits=32,
    )  # fmt: skip
    scales = {}
    if dtype == FP8:
        one = torch.ones(case.batch, case.kv_heads, device=device)
        scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    turn = iter(range(10**9))

    def launch() -> None:
        cache = caches[next(turn) % len(caches)]
        flash_attn_varlen_func(
            query, cache[:, 0], cache[:, 1], max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=case.context,
            seqused_k=lens, softmax_scale=case.dim**-0.5, causal=True, block_table=table, out=out, fa_version=3,
            scheduler_metadata=schedule, num_splits=32, **scales,
        )  # fmt: skip

    return {"merged": microseconds(launch), "bytes": size}


def triton_attention(case: Any, device: torch.device) -> dict[str, Any]:
    """Measure vLLM's Triton kernel over a paged cache in bf16, with the number of segments that its backend uses."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    segments, most = 16, 128 // case.kv_heads
    caches, size, table = _caches(case, device, torch.bfloat16, 16)
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    query = torch.randn(case.batch, case.heads, case.dim, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    parts = torch.empty(most, case.heads, segments, triton.next_power_of_2(case.dim), device=device)
    highest, total = torch.empty(2, most, case.heads, segments, device=device)
    turn = iter(range(10**9))

    def launch() -> None:
        cache = caches[next(turn) % len(caches)]
        unified_attention(
            q=query, k=cache[:, 0], v=cache[:, 1], out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lens,
            max_seqlen_k=case.context, softmax_scale=case.dim**-0.5, causal=True, window_size=(-1, -1),
            block_table=table, softcap=0.0, q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=most,
            num_par_softmax_segments=segments, softmax_segm_output=parts, softmax_segm_max=highest,
            softmax_segm_expsum=total,
        )  # fmt: skip

    return {"merged": microseconds(launch), "bytes": size}


def xqa(case: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure XQA, the kernel with which vLLM's FlashInfer backend decodes on Hopper (vllm#43232)."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    caches, size, table = _caches(case, device, dtype, 16)
    workspace = torch.zeros(512 * 2**20, dtype=torch.uint8, device=device)
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    query = torch.randn(case.batch, case.heads, case.dim, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    turn = iter(range(10**9))

    def launch() -> None:
        xqa_batch_decode_with_kv_cache(
            query, caches[next(turn) % len(caches)], workspace, table, lens, case.context,
            bmm1_scale=case.dim**-0.5, bmm2_scale=1.0, out=out,
        )  # fmt: skip

    return {"merged": microseconds(launch), "bytes": size}
