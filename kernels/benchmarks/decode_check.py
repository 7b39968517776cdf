"""Whether the GPU's kernels are right on this GPU: `python kernels/benchmarks/decode_check.py`.

Ragged sequences are stored and decoded by the kernels in a captured CUDA graph of four layers that share their plan,
each started while the one before may still run, over pages, rings and outputs that were poisoned before: every byte
0xFF, every output NaN, every ring full of another sequence's rows at the same positions, and part of each prompt from
pages that the ring knows nothing of. Held against the CPU's code over the same bytes (which the tests hold against
float64). Writes OUT/decode-check.json; exits 1 where a row is off.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kvpilot_kernels import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.pages import GpuPages, Plan, Shape
from kvpilot_kernels.ring import ring_slots

LIMIT, READ_LIMIT = 2e-3, 6e-3
"""Of a head's norm: queries and probabilities are float16 on their way into the tensor cores, and what `gather` reads
back is rounded to bfloat16."""
LENGTHS, HIT, BLOCK, KV_HEADS = [1, 63, 64, 65, 300, 1000, 2500], 40, 64, 2
CASES = [
    *((name, dim, 4, recent) for name in formats.own_names() for dim in formats.HEAD_DIMS
      for recent in dict.fromkeys((0, 64 if formats.parse(name).has_ring else 0, formats.parse(name).window))),
    ("k4v4", 128, 16, 64), ("k4v2", 256, 7, 64), ("k8v4", 96, 12, 300), ("k2v2", 128, 5, 512), ("k4v4", 128, 1, 64),
]  # fmt: skip
LAYERS = 4


def check(case: tuple[str, int, int, int]) -> dict[str, Any]:
    """Errors of one format, head_dim, ratio of heads and window."""
    name, dim, ratio, recent = case
    torch.manual_seed(dim + ratio + recent)
    torch.set_num_threads(2)
    device, fmt, count, scale = torch.device("cuda"), formats.parse(name), len(LENGTHS), dim**-0.5
    rings = fmt.ring_blocks(recent, dim, BLOCK)
    tokens = fmt.ring_layout(dim, BLOCK).tokens if recent else 1
    per = [-(-n // BLOCK) for n in LENGTHS]
    total = 1 + sum(per) + count * rings
    cache = torch.full((total, KV_HEADS, BLOCK, fmt.row_bytes(dim)), 255, dtype=torch.uint8, device=device)
    blocks = (1 + torch.randperm(total - 1)).int()
    table = torch.full((count, max(per)), -(2**30), dtype=torch.int32)
    for i, part in enumerate(blocks[: sum(per)].split(per)):
        table[i, : per[i]] = part
    ring_table = blocks[sum(per) :].view(count, rings) if rings else None
    factors = Factors(*(torch.rand(KV_HEADS, dim) + 0.5 for _ in range(4)), 2 * torch.randn(KV_HEADS, dim))
    shape = Shape(fmt, dim, KV_HEADS, ratio, BLOCK, device, recent=recent)
    ring = cache if recent else None
    pages, plan = GpuPages(cache, shape, factors.to(device), ring=ring), Plan(shape, count)
    keys, values = ([torch.randn(n, KV_HEADS, dim).bfloat16() for n in LENGTHS] for _ in "kv")

    def where(i: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        at = torch.arange(begin, end)
        slots = table[i].long()[at // BLOCK] * BLOCK + at % BLOCK
        if ring_table is None:
            return slots.to(device), None
        rows = ring_table[i].expand(len(at), -1)
        return slots.to(device), ring_slots(at, torch.full_like(at, end), rows, recent, tokens).to(device)

    def store(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, at: torch.Tensor | None,
              begin: int = 1) -> None:  # fmt: skip
        query = torch.zeros(len(key), KV_HEADS * ratio, dim, dtype=key.dtype)
        ordinals = torch.arange(begin + 1, begin + 1 + len(key), dtype=torch.int32)
        pages.store(query.to(device), key.to(device), value.to(device), slots, plan, 0, scale, at, ordinals.to(device))

    for i, n in enumerate(LENGTHS):
        if ring_table is not None:  # another sequence's rows in all of the ring, their pages in block 0
            every, (key, value) = torch.arange(rings * tokens), torch.randn(2, rings * tokens, KV_HEADS, dim).bfloat16()
            at = ring_slots(every, torch.full_like(every, len(every)), ring_table[i].expand(len(every), -1),
                            len(every), tokens).to(device)  # fmt: skip
            for begin in range(0, len(every), BLOCK):
                new = slice(begin, begin + BLOCK)
                store(key[new], value[new], torch.arange(len(key[new]), device=device), at[new])
        hit = max(0, n - 1 - HIT)
        if hit:
            slots, at = where(i, 0, hit)
            store(keys[i][:hit], values[i][:hit], slots, None if at is None else torch.full_like(at, -1), 0)
        if hit < n - 1:
            store(keys[i][hit : n - 1], values[i][hit : n - 1], *where(i, hit, n - 1), hit)
    query = torch.randn(LAYERS, count, KV_HEADS * ratio, dim).bfloat16().to(device)
    key, value = (torch.stack([x[-1] for x in side]).to(device) for side in (keys, values))
    steps = [where(i, n - 1, n) for i, n in enumerate(LENGTHS)]
    slots = torch.cat([s for s, _ in steps])
    at = torch.cat([a for _, a in steps if a is not None]) if ring_table is not None else None
    lens, seen = torch.tensor(LENGTHS, dtype=torch.int32, device=device), table.to(device)
    rows = None if ring_table is None else ring_table.to(device)
    out = torch.empty(LAYERS, count, KV_HEADS * ratio, dim, device=device)

    def step() -> None:
        plan.update(lens, overlap=True)
        for layer in range(LAYERS):
            pages.store(query[layer], key, value, slots, plan, count, scale, at, lens)
            pages.decode(seen, lens, plan, out[layer], rows)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    worst = 0.0
    for _ in range(2):
        for scratch in (out, plan.partial, plan.lse, plan.rotated, plan.apart):
            scratch.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        stored = cache.cpu()
        cpu = PackedPages(stored, fmt, dim, factors, ring=stored if recent else None, recent=recent)
        wanted = torch.stack([cpu.decode(q, table, lens.cpu(), scale, ring_table=ring_table) for q in query.cpu()])
        off = (out.cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        worst = max(worst, float(off.max())) if off.isfinite().all() else float("inf")
    plain = PackedPages(stored, fmt, dim, factors).decode(query[-1].cpu(), table, lens.cpu(), scale)
    theirs = torch.full_like(stored, 255)
    cpu = PackedPages(theirs, fmt, dim, factors)
    for i, n in enumerate(LENGTHS):
        cpu.store(keys[i], values[i], where(i, 0, n)[0].cpu(), ordinals=torch.arange(1, n + 1))
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    read = torch.full((2, int(starts[-1]), KV_HEADS, dim), torch.nan, dtype=torch.bfloat16, device=device)
    pages.gather(seen, starts.to(device), 0, max(LENGTHS), read[0], read[1])
    back = PackedPages(stored, fmt, dim, factors)
    off_read = 0.0
    for i, n in enumerate(LENGTHS):
        for mine, his in zip(read[:, starts[i] : starts[i] + n].cpu(), back.read(table[i], n), strict=True):
            off_read = max(off_read, float(((mine - his).norm(dim=-1) / his.norm(dim=-1)).nan_to_num(9.0).max()))
    used = blocks[: sum(per)].long()
    return {
        "format": name, "head_dim": dim, "ratio": ratio, "recent": recent, "error": worst,
        "gather_error": off_read,
        "bytes_unlike_the_cpus": float((stored[used] != theirs[used]).float().mean()),
        "moved_by_the_ring": float(((plain - wanted[-1]).norm(dim=-1) / wanted[-1].norm(dim=-1)).max()),
    }  # fmt: skip


def main() -> int:
    """Check every case, a few processes at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    # A process each: after a fault in a kernel nothing else runs in it.
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [(case, pool.submit(check, case)) for case in CASES]
        rows = []
        for case, future in futures:
            try:
                rows.append(future.result())
            except Exception as error:
                rows.append({"case": case, "error": float("inf"), "message": f"{type(error).__name__}: {error}"[:500]})
            print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decode-check.json").write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [
        row for row in rows
        if not (row["error"] <= LIMIT and row["gather_error"] <= READ_LIMIT)
        or row["bytes_unlike_the_cpus"] > 2e-3
        or (row["moved_by_the_ring"] > 0) != (row["recent"] > 0)
    ]  # fmt: skip
    print(f"{len(rows) - len(wrong)} of {len(rows)} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
