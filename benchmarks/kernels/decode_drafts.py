"""Time decode with draft tokens on a GPU, in one layer: `python -m benchmarks.kernels.decode_drafts`.

A sequence with k drafts has 1 + k rows in a step, as in the runtime's `cuda_steps`. Its pages are read once for all
rows. Times are measured as in `decode.py`, in one run, with 1 token per sequence as the baseline: `store`, `decode`
(the split kernel), `merged` (with the merge of its results), `layer` (all of these), and `plan`, which runs once per
step for all layers. `off` is the difference from steps of one token per sequence, relative to a head's norm. A
difference above 2e-3 ends the run. The program writes OUT/decode-drafts.json.

`--choices` times launch parameters other than those of `tuning`: tile, stages and programs per multiprocessor, for
example 32x3x8.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.kernels.decode import SHAPES, Case, bytes_read, random_layers
from benchmarks.kernels.timing import copy_rate, microseconds
from kvpilot_formats import formats
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.pages import Cut, GpuPages, Plan, Several, Shape

BLOCK, LIMIT = 64, 2e-3


def launch_as(shape: Shape, choice: str, tokens: int) -> None:
    """Let a shape decode with the parameters in `choice` (tile x stages x programs) in steps of several tokens."""
    tile, stages, programs = map(int, choice.split("x"))
    found, own = shape.cut(tokens), tuning.Choice(tile, stages, programs, shape.cut(tokens).choice.registers)
    wave = max(1, tuning.multiprocessors(shape.device) * programs // (shape.kv_heads * found.parts))
    one, several = shape.cut(1), Cut(found.take, found.parts, own, wave)
    shape.cut = lambda tokens=1: one if tokens == 1 else several  # type: ignore[method-assign]


def drafted(name: str, case: Case, tokens: int, device: torch.device, recent: int, choice: str) -> dict[str, Any]:
    """Measure one format in steps with `tokens` tokens per sequence, and compare with steps of one token."""
    fmt, per, rows = formats.parse(name), -(-case.context // BLOCK), case.batch * tokens
    table = (1 + torch.randperm(per * case.batch, device=device)).view(case.batch, per).int()
    shape, pages = random_layers(fmt, case, BLOCK, recent, table)
    if choice and tokens > 1:
        launch_as(shape, choice, tokens)
    make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    owner = torch.arange(case.batch, device=device).repeat_interleave(tokens)
    ago = torch.arange(tokens - 1, -1, -1, device=device).repeat(case.batch)
    seen, lens = (case.context - ago).int(), torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    starts = torch.arange(0, rows + 1, tokens, dtype=torch.int32, device=device)
    several = Several(starts, owner.int(), tokens) if tokens > 1 else None
    query = torch.randn(rows, case.heads, case.dim, **make)
    key, value = torch.randn(2, rows, case.kv_heads, case.dim, **make)
    at = seen.long() - 1
    slots = table.long()[owner, at // BLOCK] * BLOCK + at % BLOCK
    plan, out, turn = Plan(shape, case.batch, tokens), torch.empty_like(query), iter(range(10**9))
    plan.update(lens, tokens == 1, several)

    def store() -> GpuPages:
        found = pages[next(turn) % len(pages)]
        found.store(query, key, value, slots, plan, rows, case.dim**-0.5, seen)
        return found

    found = {
        "store": microseconds(store),
        "decode": microseconds(lambda: pages[next(turn) % len(pages)].attend(table, lens, plan)),
        "merged": microseconds(lambda: pages[next(turn) % len(pages)].decode(table, lens, plan, out)),
        "layer": microseconds(lambda: store().decode(table, lens, plan, out)),
        "plan": microseconds(lambda: plan.update(lens, tokens == 1, several)),
    }
    plan.update(lens, several=several)
    first = pages[0]
    first.store(query, key, value, slots, plan, rows, case.dim**-0.5, seen)
    exact = out.float()
    first.decode(table, lens, plan, exact)
    off, one = 0.0, Plan(shape, case.batch)
    for i in range(tokens):
        mine = slice(i, None, tokens)
        again = torch.empty_like(exact[mine])
        # Pass only padding slots, so that this launch stores nothing and only rotates the queries.
        nothing = torch.full((case.batch,), -1, dtype=torch.int64, device=device)
        one.update(seen[mine].contiguous())
        first.store(
            query[mine].contiguous(), key[mine].contiguous(), value[mine].contiguous(), nothing, one, case.batch,
            case.dim**-0.5,
        )  # fmt: skip
        first.decode(table, seen[mine].contiguous(), one, again)
        off = max(off, float(((exact[mine] - again).norm(dim=-1) / again.norm(dim=-1)).max()))
    return {**found, "off": off, "bytes": bytes_read(fmt, case)}


def main() -> int:
    """Run the measurements that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--formats", nargs="+", default=["k4v4"])
    parser.add_argument("--recent", type=int, nargs="+", default=[0, 64], help="windows of our formats")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of tokens of a sequence in a step"
    )
    parser.add_argument(
        "--choices", nargs="+", default=[""], help="launch parameters (tile x stages x programs) for several tokens"
    )
    parser.add_argument("--sizes", nargs="+", default=["32x16384", "32x2048"], help="sequences x context")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    facts: dict[str, Any] = {
        "command": f"python -m benchmarks.kernels.decode_drafts {' '.join(sys.argv[1:])}".strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "gpu": torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "copy_bytes_per_s": copy_rate(device), "rows": [],
    }  # fmt: skip
    for size in options.sizes:
        batch, context = map(int, size.split("x"))
        case = Case("Llama-3-8B", *SHAPES["Llama-3-8B"], batch, context)
        for name in options.formats:
            for recent in options.recent if formats.parse(name).has_residuals else [0]:
                base = 0.0
                for tokens, choice in product(options.tokens, options.choices):
                    if tokens == 1 and base:
                        continue
                    row = drafted(name, case, tokens, device, recent, choice)
                    base = base or row["layer"]
                    what = {"case": case.__dict__, "name": name, "recent": recent, "tokens": tokens, "choice": choice}
                    facts["rows"].append(what | row)
                    print(f"{size} {name}, last {recent} finer, {tokens} tokens {choice}: {row}", flush=True)
                    print(f"    a layer takes {row['layer'] / base:.2f}x of one with a single token", flush=True)
                    options.out.mkdir(parents=True, exist_ok=True)
                    (options.out / "decode-drafts.json").write_text(json.dumps(facts, indent=1) + "\n")
                    torch.cuda.empty_cache()
    return int(any(row["off"] > LIMIT for row in facts["rows"]))


if __name__ == "__main__":
    sys.exit(main())
