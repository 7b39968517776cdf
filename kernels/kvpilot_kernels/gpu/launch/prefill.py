"""Attention of heads of 512 elements to 16-bit keys and values, which launches the kernel in `prefill.head512`."""

import torch
import triton

from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.prefill.head512 import prefill_kernel


def prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int,
            rows: torch.Tensor, scale: float, causal: bool, softcap: float = 0.0,
            out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return attention of the queries of several sequences to keys and values in 16 bits.

    Args:
        query: [tokens, heads, D], heads and elements contiguous.
        key, value: [keys, kv_heads, D], heads and elements contiguous.
        starts, rows: int32 [sequences + 1], the first query and the first key of each sequence.
        longest: largest number of queries of a sequence.
        scale: factor on the scores.
        softcap: 0 for none.
        causal: True if the last query of a sequence attends to all its keys, and each earlier query to one key less.
            False if each query attends to all keys of its sequence.
        out: output, [tokens, heads, D]; allocated if None.

    Returns:
        The output, and the logarithms of the softmax sums, float32 [heads, tokens]. They are -inf for a query without
        keys.
    """
    tokens, heads, dim = query.shape
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    block = tuning.prefill_block(tuning.capability(query.device))
    prefill_kernel[(triton.cdiv(longest, block.queries), heads, len(starts) - 1)](
        query, key, value, out, lse, starts, rows, scale, softcap, tokens, query.stride(0), key.stride(0),
        value.stride(0), out.stride(0), RATIO=heads // key.shape[1], D=dim, WIDE=triton.next_power_of_2(dim),
        M=block.queries, N=block.keys, CAUSAL=causal, SOFTCAP=softcap > 0, num_warps=block.warps,
        num_stages=block.stages, **tuning.FUSED,
    )  # fmt: skip
    return out, lse
