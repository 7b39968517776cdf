"""Check and time latent decode (MLA) on a GPU: `python -m benchmarks.kernels.mla_decode`.

First it checks correctness. The kernels store and decode sequences of different lengths in a captured CUDA graph, over
poisoned pages and outputs (every byte 0xFF, every number NaN). The results are compared with the CPU code over the same
bytes, which the tests compare with float64.

Then it times one layer, in graphs of 32 launches that rotate over several layers' caches. `decode` is the split kernel
alone, `merged` adds the merge of its parts, and `layer` adds the store of the step's token. Baselines are the same
attention over bfloat16 and float8 entries (`mla_baseline`), each with its best launch parameters, and a
device-to-device copy. `--sweep` also times other launch parameters of our split kernel, or of the merge and the number
of splits.

The program needs only torch and Triton. It writes OUT/mla-decode.json after every row, and exits with 1 if a result is
wrong.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.kernels.mla_baseline import Baseline, choices
from benchmarks.kernels.timing import always, copy_rate, layers_for, microseconds
from kvpilot_formats.latent import ENTRY, RANK, LatentFormat, names, parse
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.mla import tuning as latent_tuning
from kvpilot_kernels.gpu.mla.pages import GpuLatentPages, LatentPlan, LatentShape
from kvpilot_kernels.gpu.mla.tuning import LatentChoice, Merge
from kvpilot_kernels.latent.cpu import LatentPages
from kvpilot_kernels.latent.factors import LatentFactors

BLOCK, LIMIT, READ_LIMIT = 64, 3e-3, 6e-3
"""Tokens of a block, and the largest allowed errors of decode and of `gather`.

Errors are relative to the norm of the output. Decode multiplies float16 numbers, and `gather` writes bfloat16.
"""
LENGTHS = [1, 63, 64, 65, 300, 1000, 2500]
CHECKED = [(name, heads) for name in names() for heads in (1, 8, 16, 20, 64, 128)]
BASELINES = [("baseline bf16", heads) for heads in (16, 20, 128)]


@dataclass(frozen=True)
class Case:
    """Shape of one measurement: `batch` sequences of `context` tokens, and heads per rank."""

    model: str
    heads: int
    batch: int
    context: int


CASES = [
    Case("DeepSeek-V2-Lite", 16, 32, 16384),
    Case("GLM-4.7-Flash", 20, 32, 16384),
    Case("DeepSeek-V3", 128, 32, 16384),
    Case("DeepSeek-V2-Lite", 16, 8, 1024),
    Case("DeepSeek-V2-Lite", 16, 1, 65536),
]


def some_entries(count: int) -> torch.Tensor:
    """Return random latents with their RoPE parts, as a cache holds them, float32 [count, 576] on the CPU.

    They look like the output of an RMSNorm with a learned weight, in which some channels are 8 times the others.
    """
    weight = torch.rand(ENTRY) + 0.5
    weight[torch.randperm(ENTRY)[:12]] *= 8
    return (torch.randn(count, ENTRY) + 0.3) * weight


def check(name: str, heads: int) -> dict[str, Any]:
    """Compare the kernels with the CPU code for one format and number of heads, and return the errors."""
    torch.manual_seed(heads)
    torch.set_num_threads(2)
    device = torch.device("cuda")
    fmt, count, scale = parse(name), len(LENGTHS), 192**-0.5
    per = [-(-n // BLOCK) for n in LENGTHS]
    cache = torch.full((1 + sum(per), BLOCK, fmt.row_bytes), 255, dtype=torch.uint8, device=device)
    table = torch.full((count, max(per)), -(2**30), dtype=torch.int32)
    for i, part in enumerate((1 + torch.randperm(sum(per))).int().split(per)):
        table[i, : per[i]] = part
    factors = LatentFactors(torch.randn(ENTRY), torch.rand(ENTRY) + 0.5)
    shape = LatentShape(fmt, heads, BLOCK, device)
    pages, plan = GpuLatentPages(cache, shape, factors.to(device)), LatentPlan(shape, count)
    entries = [some_entries(n).bfloat16() for n in LENGTHS]
    slots = [table[i].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for i, n in enumerate(LENGTHS)]
    query = torch.randn(count, heads, ENTRY).bfloat16().to(device)
    absorbed, rope = query[..., :RANK].contiguous(), query[..., RANK:]

    def store(x: torch.Tensor, at: torch.Tensor) -> None:
        pages.store(x[:, :RANK], x[:, RANK:], at)

    for x, at in zip(entries, slots, strict=True):
        if len(x) > 1:
            store(x[:-1].to(device), at[:-1].to(device))
    last, at = torch.stack([x[-1] for x in entries]).to(device), torch.stack([x[-1] for x in slots]).to(device)
    lens, seen = torch.tensor(LENGTHS, dtype=torch.int32, device=device), table.to(device)
    out = torch.empty(count, heads, RANK, device=device)

    def step() -> None:
        plan.update(lens)
        store(last, at)
        pages.prepare(absorbed, rope, plan, scale)
        pages.decode(seen, lens, plan, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    worst = 0.0
    for _ in range(3):
        for scratch in (out, plan.partial, plan.lse, plan.rotated, plan.sums):
            scratch.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        cpu = LatentPages(cache.cpu(), fmt, factors)
        wanted = cpu.decode(absorbed.cpu(), rope.cpu(), table, lens.cpu(), scale)
        off = (out.cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        worst = max(worst, float(off.max())) if off.isfinite().all() else float("inf")
    theirs = torch.full_like(cache.cpu(), 255)
    other = LatentPages(theirs, fmt, factors)
    for x, to in zip(entries, slots, strict=True):
        other.store(x[:, :RANK], x[:, RANK:], to)
    unlike = float((cache.cpu() != theirs).float().mean())
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    read = torch.full((int(starts[-1]), ENTRY), torch.nan, dtype=torch.bfloat16, device=device)
    pages.gather(seen, torch.zeros_like(lens), starts.to(device), max(LENGTHS), read)
    his = torch.cat([cpu.read(table[i], n) for i, n in enumerate(LENGTHS)])
    off_read = float(((read.cpu() - his).norm(dim=-1) / his.norm(dim=-1)).nan_to_num(9.0).max())
    right = worst <= LIMIT and unlike < 2e-3 and off_read <= READ_LIMIT
    return {"format": name, "heads": heads, "error": worst, "bytes_unlike_the_cpus": unlike,
            "gather_error": off_read, "right": right}  # fmt: skip


def check_baseline(name: str, heads: int) -> dict[str, Any]:
    """Return the errors of the baseline kernel against attention in float32. Small errors show that it is correct."""
    torch.manual_seed(heads)
    device = torch.device("cuda")
    lens = torch.tensor([1, 64, 1000], dtype=torch.int32, device=device)
    cache = torch.randn(64, BLOCK, ENTRY, device=device).bfloat16()
    table = torch.randperm(48, device=device).view(3, 16).int()
    query = torch.randn(3, heads, ENTRY, device=device).bfloat16()
    base = Baseline(table, lens, heads, next(choices(heads)))
    base.attend(query, cache, 0.07)
    worst = 0.0
    for i, n in enumerate(lens.tolist()):
        rows = cache[table[i].long()].flatten(0, 1)[:n].float()
        p = (query[i].float() @ rows.T * 0.07).softmax(-1)
        wanted = p @ rows[:, :RANK]
        off = (base.merged()[i] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        worst = max(worst, float(off.max().nan_to_num(9.0)))
    return {"format": name, "heads": heads, "error": worst, "right": worst <= 1e-2}


def tables(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random block table, int32 [batch, blocks], and the lengths, int32 [batch]."""
    per = -(-case.context // BLOCK)
    table = (1 + torch.randperm(per * case.batch, device=device)).view(case.batch, per).int()
    return table, torch.full((case.batch,), case.context, dtype=torch.int32, device=device)


def random_pages(fmt: LatentFormat, blocks: int, device: torch.device) -> torch.Tensor:
    """Return pages of random quantized values. Scales are between 0.01 and 0.03, and zero points near the middle."""
    cache = torch.randint(0, 256, (blocks, BLOCK, fmt.row_bytes), dtype=torch.uint8, device=device)
    layout = fmt.page_layout(BLOCK)
    scale = (torch.rand(blocks, 2 * BLOCK, device=device) * 0.02 + 0.01).half().view(torch.int16).int()
    meta = (((scale >> 4) << 5) | torch.randint(10, 20, scale.shape, device=device)).to(torch.int16)
    cache.flatten(1)[:, layout.meta.offset :] = meta.view(torch.uint8)
    return cache


def ours(
    fmt: LatentFormat,
    case: Case,
    device: torch.device,
    others: Callable[[LatentChoice], Iterator[tuple[LatentChoice, Merge | None]]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure our kernels, and yield a row for each launch choice.

    Without `others`, use the launch parameters of `tuning`. Otherwise measure decode and merge with the parameters in
    `others`.
    """
    size = case.batch * case.context * fmt.row_bytes
    blocks = case.batch * -(-case.context // BLOCK) + 1
    caches = [random_pages(fmt, blocks, device) for _ in range(layers_for(size))]
    table, lens = tables(case, device)
    query = torch.randn(case.batch, case.heads, ENTRY, device=device, dtype=torch.bfloat16)
    absorbed, rope = query[..., :RANK].contiguous(), query[..., RANK:].contiguous()
    entry = torch.randn(case.batch, ENTRY, device=device, dtype=torch.bfloat16)
    slots = table[:, -1].long() * BLOCK + (case.context - 1) % BLOCK
    out = torch.empty(case.batch, case.heads, RANK, device=device, dtype=torch.bfloat16)
    first = LatentShape(fmt, case.heads, BLOCK, device)
    own = latent_tuning.merging
    for choice, other in [(first.choice, None)] if others is None else others(first.choice):
        shape = LatentShape(fmt, case.heads, BLOCK, device)
        parts = triton.cdiv(case.heads, shape.take)
        shape.choice, shape.wave = choice, max(1, tuning.multiprocessors(device) * choice.programs // parts)
        merge = other or own(shape.wave // case.batch)
        latent_tuning.merging = partial(always, merge)
        pages, plan, turn = [GpuLatentPages(cache, shape) for cache in caches], LatentPlan(shape, case.batch), [0]
        plan.update(lens)

        def next_pages(pages: list[GpuLatentPages] = pages, turn: list[int] = turn) -> GpuLatentPages:
            turn[0] += 1
            return pages[turn[0] % len(pages)]

        def store(plan: LatentPlan = plan, next_pages: Callable[[], GpuLatentPages] = next_pages) -> GpuLatentPages:
            at = next_pages()
            at.store(entry[:, :RANK], entry[:, RANK:], slots)
            at.prepare(absorbed, rope, plan, 192**-0.5)
            return at

        row: dict[str, Any] = {"bytes": size, "choice": asdict(choice), "merge": asdict(merge)}
        try:
            store()
            row["decode"] = microseconds(lambda: next_pages().attend(table, case.batch, plan))  # noqa: B023
            row["merged"] = microseconds(lambda: next_pages().decode(table, lens, plan, out))  # noqa: B023
            if others is None:
                row["store"] = microseconds(store)
                row["layer"] = microseconds(lambda: store().decode(table, lens, plan, out))  # noqa: B023
        except Exception as error:  # a launch choice may not fit the GPU; then its error is the result
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        yield row
    latent_tuning.merging = own


def beside(dtype: torch.dtype, case: Case, device: torch.device) -> dict[str, Any]:
    """Return the time of the baseline kernel at the fastest of its launch choices."""
    size = case.batch * case.context * ENTRY * torch.finfo(dtype).bits // 8
    shape = (case.batch * -(-case.context // BLOCK) + 1, BLOCK, ENTRY)
    caches = []
    for _ in range(layers_for(size)):
        cache = torch.empty(shape, dtype=dtype, device=device)
        for part in cache.split(1024):
            part.copy_(torch.randn(part.shape, device=device))
        caches.append(cache)
    table, lens = tables(case, device)
    query = torch.randn(case.batch, case.heads, ENTRY, device=device, dtype=torch.bfloat16)
    best: dict[str, Any] = {"bytes": size}
    for choice in choices(case.heads):
        turn = iter(range(10**9))
        try:
            base = Baseline(table, lens, case.heads, choice)
            took = microseconds(lambda: base.attend(query, caches[next(turn) % len(caches)], 192**-0.5))  # noqa: B023
        except Exception as error:  # a launch choice may need more shared memory than the GPU has
            best.setdefault("failed", []).append([asdict(choice), type(error).__name__])
            continue
        if took < best.get("decode", float("inf")):
            best |= {"decode": took, "choice": asdict(choice)}
    return best


def decodes(choice: LatentChoice) -> Iterator[tuple[LatentChoice, None]]:
    """Yield variants of `choice` to measure: other tiles, stages, warps, programs and limits of registers."""
    ways = [(4, 1, None), (4, 2, None), (4, 3, 168), (4, 4, 128), (8, 1, None), (8, 2, 128)]
    for tile, stages, (warps, programs, registers) in product((64, 32), (2, 3), ways):
        yield replace(choice, tile=tile, stages=stages, warps=warps, programs=programs, registers=registers), None


def merges(choice: LatentChoice) -> Iterator[tuple[LatentChoice, Merge]]:
    """Yield ways to merge, which differ in the splits that a program merges at once.

    Yield each for the usual number of programs per multiprocessor, and for one, which gives fewer splits.
    """
    ways = [(2, 16, 16), (2, 8, 16), (2, 8, 8), (2, 4, 8), (4, 8, 16), (4, 4, 8), (4, 2, 8)]
    for programs, way in product((choice.programs, 1), ways):
        yield replace(choice, programs=programs), Merge(*way)


SWEEPS = {"decode": (decodes, CASES[:2]), "merge": (merges, [case for case in CASES if case.heads == 16])}


def main() -> int:
    """Check the kernels, then measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--check", action="store_true", help="check correctness only, and time nothing")
    parser.add_argument("--sweep", choices=SWEEPS, help="also time other launch choices of this kernel")
    parser.add_argument("--processes", type=int, default=8, help="number of processes that check at the same time")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    options.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.kernels.mla_decode", *sys.argv[1:]]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "gpu": torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "checks": [], "rows": [], "sweep": [],
    }  # fmt: skip

    def tell(part: str, row: dict[str, Any]) -> None:
        facts[part].append(row)
        print(part, row, flush=True)
        (options.out / "mla-decode.json").write_text(json.dumps(facts, indent=1) + "\n")

    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        asked = [(case, pool.submit(check, *case)) for case in CHECKED]
        asked += [(case, pool.submit(check_baseline, *case)) for case in BASELINES]
        for (name, heads), future in asked:
            try:
                tell("checks", future.result())
            except Exception as error:
                told = f"{type(error).__name__}: {error}"[:500]
                tell("checks", {"format": name, "heads": heads, "right": False, "message": told})
    if not options.check:
        facts["copy_bytes_per_s"] = copy_rate(device)
        for case in CASES:
            for name in reversed(names()):
                for row in ours(parse(name), case, device):
                    tell("rows", {"case": asdict(case), "name": name, **row})
                torch.cuda.empty_cache()
            for name, dtype in (("baseline bf16", torch.bfloat16), ("baseline fp8", torch.float8_e4m3fn)):
                tell("rows", {"case": asdict(case), "name": name, **beside(dtype, case, device)})
                torch.cuda.empty_cache()
        if options.sweep:
            others, cases = SWEEPS[options.sweep]
            for case, name in product(cases, reversed(names())):
                for row in ours(parse(name), case, device, others):
                    tell("sweep", {"case": asdict(case), "name": name, **row})
                torch.cuda.empty_cache()
    wrong = [row for row in facts["checks"] if not row["right"]]
    print(f"{len(facts['checks']) - len(wrong)} of {len(facts['checks'])} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
