"""Check prefill of heads of 512 elements on a GPU against float64, and time it beside vLLM's Triton kernel.

    python -m benchmarks.kernels.prefill

First the program checks sequences of different lengths, causal and not, with and without a soft cap, in bfloat16 and
float16. Their rows are parts of wider rows, with NaN after the last token. Then it times a chunk of 8,192 tokens that
attends to itself, and a chunk that also attends to a context of the same length. It prints times and the share of the
GPU's peak in bfloat16. `--sweep` times other block sizes. It writes OUT/prefill.json, and exits with 1 if a result is
wrong.
"""

import argparse
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.kernels.timing import always
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.prefill import prefill
from kvpilot_kernels.gpu.launch.tuning import PrefillBlock

LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Allowed error relative to a head's norm. Probabilities and outputs are rounded to 16 bits."""
HEADS, KV_HEADS, DIM = 16, 2, 512
BLOCKS = [PrefillBlock(*block) for block in (
    (32, 32, 8, 2), (32, 64, 8, 1), (64, 32, 8, 2), (64, 32, 8, 1), (64, 64, 8, 1), (64, 16, 8, 2), (64, 16, 8, 3),
    (64, 32, 16, 2), (128, 32, 8, 1), (128, 32, 16, 1), (32, 32, 4, 2), (16, 32, 4, 2), (32, 16, 4, 3),
)]  # fmt: skip


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool,
          softcap: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute attention of one sequence in float64. Return outputs [tokens, heads, D], and LSEs [heads, tokens]."""
    key, value = (x.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = torch.einsum("ihd,thd->hit", query.double(), key) * DIM**-0.5
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1 + len(key) - len(query)).bool(), -torch.inf)
    return torch.einsum("hit,thd->ihd", scores.softmax(-1).nan_to_num(), value), scores.logsumexp(-1)


def check(dtype: torch.dtype, causal: bool, softcap: float, device: torch.device) -> dict[str, Any]:
    """Return the largest error of an output relative to its norm, and the largest error of a log-sum-exp (LSE)."""
    torch.manual_seed(5)
    news = [1, 65, 300, 17, 64]
    lens = [n + extra for n, extra in zip(news, (0, 7, 0, 500, 0), strict=True)] if causal else [70, 1, 0, 513, 31]
    starts, rows = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device) for x in (news, lens))
    query = torch.randn(sum(news) + 3, HEADS + 2 * KV_HEADS, DIM, device=device).to(dtype)[:, :HEADS]
    key, value = (torch.randn(sum(lens) + 40, 3, DIM, device=device).to(dtype)[:, :KV_HEADS] for _ in "kv")
    key[sum(lens) :] = value[sum(lens) :] = torch.nan
    real = query[: sum(news)]
    out, lse = prefill(real, key, value, starts, max(news), rows, DIM**-0.5, causal, softcap)
    off, off_lse = 0.0, 0.0
    for i in range(len(news)):
        q, k = slice(int(starts[i]), int(starts[i + 1])), slice(int(rows[i]), int(rows[i + 1]))
        wanted, wanted_lse = exact(query[q], key[k], value[k], causal, softcap)
        if not lens[i]:
            off = off if not out[q].any() and bool((lse[:, q] == -torch.inf).all()) else 9.0
            continue
        off = max(off, float(((out[q] - wanted).norm(dim=-1) / wanted.norm(dim=-1)).nan_to_num(9.0).max()))
        off_lse = max(off_lse, float((lse[:, q] - wanted_lse).abs().nan_to_num(9.0).max()))
    return {"dtype": str(dtype), "causal": causal, "softcap": softcap, "error": off, "lse_error": off_lse}


def milliseconds(launch: Any) -> float:
    """Return the median time of a kernel launch in milliseconds."""
    return float(triton.testing.do_bench(launch, warmup=20, rep=100, return_mode="median"))


def rival(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, new: int, old: int) -> Any:
    """Return a function that launches vLLM's Triton kernel over 16-bit pages with the same tokens."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    device, block = query.device, 16
    pages = torch.randn(2, (new + old) // block, block, KV_HEADS, DIM, device=device, dtype=query.dtype)
    table = torch.randperm((new + old) // block, device=device).int()[None]
    starts = torch.tensor([0, new], dtype=torch.int32, device=device)
    lens = torch.tensor([new + old], dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    return lambda: unified_attention(
        q=query, k=pages[0], v=pages[1], out=out, cu_seqlens_q=starts, max_seqlen_q=new, seqused_k=lens,
        max_seqlen_k=new + old, softmax_scale=DIM**-0.5, causal=True, window_size=(-1, -1), block_table=table,
        softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
    )  # fmt: skip


def times(new: int, old: int, blocks: list[PrefillBlock], device: torch.device) -> list[dict[str, Any]]:
    """Measure a prefill of `new` tokens that also attend to a context of `old` tokens, with each of `blocks`.

    Also measure vLLM's Triton kernel.
    """
    query = torch.randn(new, HEADS, DIM, device=device).bfloat16()
    key, value = torch.randn(2, new + old, KV_HEADS, DIM, device=device).bfloat16()
    starts, rows = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (new, new + old))
    flops = 4 * HEADS * DIM * new * (old + new / 2)
    chosen, found = tuning.prefill_block, []

    def tell(name: str, launch: Any) -> None:
        try:
            took = milliseconds(launch)
            row = {"name": name, "ms": took, "tflops": flops / took / 1e9}
        except Exception as error:
            row = {"name": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        found.append({"new": new, "old": old, **row})
        print(found[-1], flush=True)

    for block in blocks:
        tuning.prefill_block = partial(always, block)
        tell(str(block), lambda: prefill(query, key, value, starts, new, rows, DIM**-0.5, True))
    tuning.prefill_block = chosen
    tell("vLLM Triton", rival(query, key, value, new, old))
    return found


def main() -> int:
    """Check the kernel, then time it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--sweep", action="store_true", help="also time blocks that engines do not use")
    options = parser.parse_args()
    device = torch.device("cuda")
    checks = []
    for dtype, causal, softcap in itertools.product((torch.bfloat16, torch.float16), (True, False), (0.0, 5.0)):
        checks.append(check(dtype, causal, softcap, device))
        print(checks[-1], flush=True)
    chosen = tuning.prefill_block(tuning.capability(device))
    blocks = list(dict.fromkeys([chosen, *(BLOCKS if options.sweep else [])]))
    timed = times(8192, 0, blocks, device) + times(4096, 16384, [chosen], device)
    facts = {"gpu": torch.cuda.get_device_name(device), "checks": checks, "times": timed}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "prefill.json").write_text(json.dumps(facts, indent=1) + "\n")
    limits = {str(dtype): limit for dtype, limit in LIMIT.items()}
    wrong = [row for row in checks if not (row["error"] <= limits[row["dtype"]] and row["lse_error"] <= 1e-3)]
    print(f"{len(checks) - len(wrong)} of {len(checks)} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
