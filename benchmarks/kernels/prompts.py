"""Time store and gather of a prompt's tokens on a GPU: `python -m benchmarks.kernels.prompts`.

The program times one layer of a prefill step. `store` quantizes new tokens into random blocks, and `gather` reads as
many back into 16 bits. If vLLM is installed, its store in bfloat16 and fp8 is timed, too. vLLM needs no gather, because
it attends to its pages directly. A CUDA graph of 32 launches rotates over several layers' caches. Times are medians of
ten replays. `of copy` is the rate of bytes read and written, relative to the rate of a copy in the same run. `--blocks`
and `--gathers` time other program sizes (tokens and warps). The program writes OUT/prompts.json.
"""

import argparse
import contextlib
import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.kernels import decode
from benchmarks.kernels.decode import Case
from benchmarks.kernels.timing import copy_rate, layers_for, microseconds
from kvpilot_formats import formats
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.pages import Plan

SHAPES = {
    **{
        name: decode.SHAPES[name]
        for name in ("Llama-3-8B", "StableLM 3B", "head_dim 192", "head_dim 256", "Gemma 4 26B")
    },
    "Phi-3-mini": (32, 32, 96),
    "head_dim 64": (32, 32, 64),
    "head_dim 160": (32, 8, 160),
}
BLOCK = 64


def tokens_of(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of a prompt, which are views of one tensor as in a model, and a block table."""
    heads = case.heads + 2 * case.kv_heads
    every = torch.randn(case.context, heads, case.dim, device=device, dtype=torch.bfloat16)
    query, key, value = every.split((case.heads, case.kv_heads, case.kv_heads), 1)
    table = 1 + torch.randperm(case.context // BLOCK, device=device).int()[None]
    return query, key, value, table


def slots_of(table: torch.Tensor) -> torch.Tensor:
    """Return each token's slot in the cache, int64 [tokens]."""
    return (table.long()[0][:, None] * BLOCK + torch.arange(BLOCK, device=table.device)).flatten()


def ours(name: str, case: Case, device: torch.device, recent: int) -> dict[str, Any]:
    """Measure `store` and `gather` of our kernels in one format."""
    fmt = formats.parse(name)
    query, key, value, table = tokens_of(case, device)
    shape, pages = decode.random_layers(fmt, case, BLOCK, recent, table)
    plan, turn = Plan(shape, 1), iter(range(10**9))
    slots, ordinals = slots_of(table), torch.arange(1, case.context + 1, device=device).int()
    out = torch.empty(2, case.context, case.kv_heads, case.dim, device=device, dtype=torch.bfloat16)

    def store() -> None:
        at = pages[next(turn) % len(pages)]
        at.store(query, key, value, slots, plan, 0, case.dim**-0.5, ordinals)

    def gather() -> None:
        pages[next(turn) % len(pages)].gather(slots, ordinals, out[0], out[1])

    return {
        "store": microseconds(store),
        "gather": microseconds(gather),
        "bytes": decode.bytes_read(fmt, case) + out.nbytes,
        "recent": recent if shape.residuals else 0,
    }


def vllms(dtype: str, case: Case, device: torch.device) -> dict[str, Any]:
    """Measure how long vLLM takes to store a prompt's keys and values."""
    from vllm import _custom_ops as ops

    _, key, value, table = tokens_of(case, device)
    kind = torch.bfloat16 if dtype == "auto" else torch.uint8
    size = 2 * key.numel() * kind.itemsize
    shape = (2, 1 + case.context // BLOCK, BLOCK, case.kv_heads, case.dim)
    caches = [torch.zeros(shape, dtype=kind, device=device) for _ in range(layers_for(size))]
    slots, one, turn = slots_of(table), torch.ones(1, device=device), iter(range(10**9))

    def store() -> None:
        cache = caches[next(turn) % len(caches)]
        ops.reshape_and_cache_flash(key, value, cache[0], cache[1], slots, dtype, one, one)

    return {"store": microseconds(store), "bytes": size + 2 * key.numel() * 2}


def block_of(text: str) -> tuning.Block | None:
    """Parse the size of a GPU program (tokens, warps). Return None for an empty text: the size that engines use."""
    return tuning.Block(*map(int, text.split(","))) if text else None


def runs_of(options: argparse.Namespace, case: Case, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Yield the name of each measurement of a case, and the function that takes the measurement."""
    for dtype in ("auto", "fp8"):
        yield f"vLLM {dtype}", lambda dtype=dtype: vllms(dtype, case, device)
    blocks = list(itertools.zip_longest(options.blocks, options.gathers, fillvalue=""))
    for name, (store, gather) in itertools.product(options.formats, blocks):
        own = {what: block_of(text) for what, text in (("store_block", store), ("gather_block", gather)) if text}

        def run(name: str = name, own: dict[str, Any] = own) -> dict[str, Any]:
            with contextlib.ExitStack() as stack:
                for what, block in own.items():
                    stack.enter_context(mock.patch.object(tuning, what, lambda *_, block=block, **__: block))
                return ours(name, case, device, options.recent)

        yield (
            " ".join([name, *(f"{what} {text}" for what, text in (("store", store), ("gather", gather)) if text)]),
            run,
        )


def main() -> None:
    """Measure all cases, print the times and write them to OUT/prompts.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--formats", nargs="+", default=["k8v4", "k4v4", "k4v2", "k2v2"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument(
        "--recent", type=int, default=64, help="recent window of our formats in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--blocks",
        nargs="+",
        default=[""],
        help="blocks of `store` (tokens of a program and its warps), such as 8,2; empty for those that engines use",
    )
    parser.add_argument("--gathers", nargs="+", default=[""], help="the same for `gather`")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    facts: dict[str, Any] = {
        "command": f"python -m benchmarks.kernels.prompts {shlex.join(sys.argv[1:])}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "gpu": torch.cuda.get_device_name(device),
        "versions": {name: version(name) for name in ("torch", "triton")}, "copy_bytes_per_s": copy_rate(device),
        "rows": [],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    for case in (Case(name, *SHAPES[name], 1, tokens) for name in options.shapes for tokens in options.tokens):
        for name, run in runs_of(options, case, device):
            try:
                row = run()
                for what in {"store", "gather"} & set(row):
                    row[f"{what} of copy"] = row["bytes"] / row[what] * 1e6 / facts["copy_bytes_per_s"]
            except Exception as error:  # vLLM may be missing, or may not support a dtype or head_dim.
                row = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            facts["rows"].append({"case": asdict(case), "name": name, **row})
            told = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
            print(f"{case.shape} {case.context} {name}: {told}", flush=True)
            torch.cuda.empty_cache()
            (options.out / "prompts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
