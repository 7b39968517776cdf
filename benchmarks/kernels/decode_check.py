"""Check our GPU kernels on this machine's GPU: `python -m benchmarks.kernels.decode_check`.

The kernels store and decode sequences of different lengths in a captured CUDA graph. Its four layers share a plan, and
each layer may start while the previous one still runs. Pages and outputs are poisoned first: every byte is 0xFF, and
every output NaN. With a recent window, the newest block of a sequence has residual pages, but the one before it has
none, and so on.

Some steps have one token per sequence. Others have up to 8, a different number for each sequence, and rows of padding.
Some are planned for a GPU with one multiprocessor, so that there are more sequences than concurrent programs. The
results are compared with the CPU code over the same bytes, which the tests compare with float64.

Then one value is set to NaN, first in a stored token and then in a token of the step. Each answer that attends to this
token must be NaN, and all other answers must stay unchanged. The program writes OUT/decode-check.json, and exits with 1
if a result is wrong.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch import tuning
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Several, Shape
from kvpilot_kernels.places import joined_slots
from kvpilot_kernels.residuals import Residuals

LIMIT, READ_LIMIT = 2e-3, 6e-3
"""Largest allowed errors of decode and of `gather`, relative to a head's norm.

Decode rounds queries and probabilities, and `gather` writes bfloat16.
"""
LENGTHS, BLOCK, KV_HEADS = [1, 63, 64, 65, 300, 1000, 2500], 64, 2


PADDED = (80, 112, 160)
"""Head dimensions that have no layout and are stored with padding."""


class Case(NamedTuple):
    """One case to check.

    Attributes:
        name: format.
        dim: head_dim.
        ratio: query heads per KV head.
        recent: length of the recent window.
        tokens: largest number of tokens of a sequence in the step.
        softcap: soft cap of scores; 0 for none.
        sinks: True for attention with sink logits.
        crowded: True to plan for a GPU with one multiprocessor.
    """

    name: str
    dim: int
    ratio: int
    recent: int
    tokens: int = 1
    softcap: float = 0.0
    sinks: bool = False
    crowded: bool = False


DIMS = (*formats.HEAD_DIMS, *PADDED)
CASES = [
    *(Case(name, dim, 4, recent) for name in formats.own_names() for dim in DIMS
      for recent in dict.fromkeys((0, 64 if formats.parse(name).has_residuals else 0, formats.parse(name).window))),
    Case("k4v4", 128, 16, 64), Case("k4v2", 256, 7, 64), Case("k8v4", 96, 12, 300), Case("k2v2", 128, 5, 512),
    Case("k4v4", 128, 1, 64), Case("k4v4", 128, 4, 4096), Case("k2v2", 128, 4, 4096, 4),
    *(Case(name, dim, 4, 64 if formats.parse(name).has_residuals else 0, 4) for name in formats.own_names()
      for dim in DIMS),
    *(Case("k4v4", 128, 4, recent, tokens) for recent in (0, 64) for tokens in (2, 3, 5, 8)),
    Case("k4v4", 64, 1, 64, 3), Case("k4v2", 128, 16, 64, 2), Case("k2v2", 128, 5, 512, 7), Case("k8v4", 96, 8, 300, 6),
    *(Case(name, 64, 8, recent, tokens, sinks=True) for name, recent in (("k8v4", 64), ("k4v4", 0), ("k4v4", 64))
      for tokens in (1, 4)),
    *(Case("k4v4", 256, 2, recent, tokens, softcap=30.0) for recent in (0, 64) for tokens in (1, 4)),
    Case("k4v2", 128, 8, 128, softcap=5.0, sinks=True),
    *(Case("k4v4", dim, ratio, 64, tokens) for dim, ratio in ((64, 32), (64, 71), (128, 48), (256, 17))
      for tokens in (1, 3)),
    *(Case("k4v4", dim, ratio, 64, tokens) for dim in (80, 160, 192) for ratio in (1, 8) for tokens in (1, 3)),
    Case("k8v4", 192, 2, 64, softcap=30.0, sinks=True), Case("k4v4", 80, 8, 64, softcap=30.0, sinks=True),
    *(Case(name, 128, ratio, 64, tokens, crowded=True) for name, ratio in (("k4v4", 4), ("k4v2", 8))
      for tokens in (1, 4)),
    Case("k4v4", 512, 8, 0), Case("k4v4", 512, 8, 64), Case("k4v2", 512, 8, 128), Case("k4v4", 512, 7, 64, 3),
    Case("k8v4", 512, 2, 64, softcap=30.0, sinks=True), Case("k4v4", 512, 16, 64),
]  # fmt: skip
LAYERS, PADDING = 4, 3


def check(case: Case) -> dict[str, Any]:
    """Run one case on the GPU and with the CPU code, and return the errors (see the module's docstring)."""
    name, dim, ratio, recent, most, softcap, sinking, crowded = case
    if crowded:
        tuning.multiprocessors = lambda _device: 1  # type: ignore[assignment]
    torch.manual_seed(dim + ratio + recent + most)
    torch.set_num_threads(2)
    device, fmt, count, scale = torch.device("cuda"), formats.parse(name), len(LENGTHS), dim**-0.5
    newest, residual_count = fmt.recent_blocks(recent, BLOCK), fmt.residual_pages(dim, BLOCK) if recent else 0
    news = [min(n, most - i % 3 % most) for i, n in enumerate(LENGTHS)]  # number of new tokens of each sequence
    owner = torch.arange(count).repeat_interleave(torch.tensor(news))
    seen = torch.cat([torch.arange(n - new + 1, n + 1) for n, new in zip(LENGTHS, news, strict=True)]).int()
    padding = PADDING if most > 1 else 0
    per = [-(-n // BLOCK) for n in LENGTHS]
    total = 1 + sum(per) * (1 + residual_count)
    cache = torch.full((total, KV_HEADS, BLOCK, fmt.row_bytes(dim)), 255, dtype=torch.uint8, device=device)
    blocks = (1 + torch.randperm(total - 1)).int()
    table = torch.full((count, max(per)), -(2**30), dtype=torch.int32)
    for i, part in enumerate(blocks[: sum(per)].split(per)):
        table[i, : per[i]] = part
    residuals, on_cpu = None, None
    if recent:
        pages_of = torch.zeros(total, residual_count, dtype=torch.int32)
        refined = torch.cat([part.flip(0)[::2] for part in blocks[: sum(per)].split(per)]).long()
        pages_of[refined] = blocks[sum(per) :].view(-1, residual_count)[: len(refined)]
        on_cpu = Residuals(pages_of, torch.tensor([newest], dtype=torch.int32))
        residuals = Residuals(*(x.to(device) for x in on_cpu))
    statics = [torch.rand(KV_HEADS, dim) + 0.5 for _ in range(4)] + [2 * torch.randn(KV_HEADS, dim)]
    factors = Factors(*statics)
    shape = Shape(fmt, dim, KV_HEADS, ratio, BLOCK, device, softcap=softcap, residuals=residual_count)
    sinks = 3 * torch.randn(KV_HEADS * ratio).bfloat16() if sinking else None
    plan = Plan(shape, count, most, len(owner) + padding)
    pages = GpuPages(cache, shape, factors.to(device), residuals, None if sinks is None else sinks.to(device))
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0)], dtype=torch.int32, device=device)
    owners = torch.cat([owner, torch.full((padding,), -1)]).int().to(device)
    several = Several(starts, owners, most) if most > 1 else None
    keys, values = ([torch.randn(n, KV_HEADS, dim).bfloat16() for n in LENGTHS] for _ in "kv")

    def where(i: int, begin: int, end: int) -> torch.Tensor:
        at = torch.arange(begin, end)
        return (table[i].long()[at // BLOCK] * BLOCK + at % BLOCK).to(device)

    def store(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, begin: int) -> None:
        query = torch.zeros(len(key), KV_HEADS * ratio, dim, dtype=key.dtype)
        ordinals = torch.arange(begin + 1, begin + 1 + len(key), dtype=torch.int32)
        pages.store(query.to(device), key.to(device), value.to(device), slots, plan, 0, scale, ordinals.to(device))

    for i, n in enumerate(LENGTHS):
        if stored := n - news[i]:
            store(keys[i][:stored], values[i][:stored], where(i, 0, stored), 0)
    rows = len(owner) + padding
    query = torch.randn(LAYERS, rows, KV_HEADS * ratio, dim).bfloat16().to(device)
    query[:, len(owner) :] = torch.nan
    nothing = torch.full((padding, KV_HEADS, dim), torch.nan, dtype=query.dtype)
    key, value = (
        torch.cat([*(x[n - new :] for x, n, new in zip(side, LENGTHS, news, strict=True)), nothing]).to(device)
        for side in (keys, values)
    )
    steps = [where(i, n - new, n) for i, (n, new) in enumerate(zip(LENGTHS, news, strict=True))]
    none = torch.full((padding,), -1, device=device)
    slots, ordinals = torch.cat([*steps, none]), seen.to(device)
    lens, on_gpu = torch.tensor(LENGTHS, dtype=torch.int32, device=device), table.to(device)
    out = torch.empty(LAYERS, rows, KV_HEADS * ratio, dim, device=device)

    def step() -> None:
        plan.update(lens, overlap=several is None, several=several)
        for layer in range(LAYERS):
            pages.store(query[layer], key, value, slots, plan, rows, scale, ordinals)
            pages.decode(on_gpu, lens, plan, out[layer])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    worst = 0.0
    for _ in range(2):
        for scratch in (out, plan.partial, plan.lse, plan.apart, plan.level, plan.units):
            scratch.fill_(torch.nan)
        plan.sums.fill_(2**20)
        plan.rotated.fill_(85)
        graph.replay()
        torch.cuda.synchronize()
        bytes_now = cache.cpu()
        cpu, ends = PackedPages(bytes_now, fmt, dim, factors, on_cpu), torch.tensor(LENGTHS)[owner]
        real = query[:, : len(owner)].cpu()
        wanted = torch.stack([cpu.decode(q, table[owner], seen, scale, softcap, sinks, ends) for q in real])
        off = (out[:, : len(owner)].cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        right = bool(off.isfinite().all()) and not out[:, len(owner) :].any()
        worst = max(worst, float(off.max())) if right else float("inf")
    plain = PackedPages(bytes_now, fmt, dim, factors).decode(real[-1], table[owner], seen, scale, softcap, sinks)
    theirs = torch.full_like(bytes_now, 255)
    cpu = PackedPages(theirs, fmt, dim, factors)
    for i, n in enumerate(LENGTHS):
        cpu.store(keys[i], values[i], where(i, 0, n).cpu(), ordinals=torch.arange(1, n + 1))
    begins = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    read = torch.full((2, int(begins[-1]), KV_HEADS, dim), torch.nan, dtype=torch.bfloat16, device=device)
    # Prefill attends to the step's own tokens in 16 bits, and to earlier tokens as the cache returns them. So compare
    # `gather` with both kinds of tokens.
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0)], dtype=torch.int32, device=device)
    joined = joined_slots(on_gpu, begins.to(device), starts, int(begins[-1]), BLOCK)
    pages.gather(*joined, read[0], read[1], key, value)
    back = PackedPages(bytes_now, fmt, dim, factors)
    off_read = 0.0
    for i, (n, new) in enumerate(zip(LENGTHS, news, strict=True)):
        given = zip(back.read(table[i], n), (keys[i], values[i]), strict=True)
        wanted_rows = [torch.cat([his[: n - new], x[n - new :]]) for his, x in given]
        for mine, his in zip(read[:, begins[i] : begins[i] + n].cpu(), wanted_rows, strict=True):
            off_read = max(off_read, float(((mine - his).norm(dim=-1) / his.norm(dim=-1)).nan_to_num(9.0).max()))
    used = blocks[: sum(per)].long()
    unlike = 0
    for i in (4, 6):
        first, last, place = int(starts[i]), int(starts[i + 1]) - 1, LENGTHS[i] - news[i] - 1
        spoilt = values[i][place : place + 1].clone()
        spoilt[0, 1, 0] = torch.nan

        def answers(stored: torch.Tensor, element: torch.Tensor, i: int = i, place: int = place,
                    last: int = last) -> torch.Tensor:  # fmt: skip
            store(keys[i][place : place + 1], stored, where(i, place, place + 1), place)
            value[last, 1, 0] = element
            graph.replay()
            torch.cuda.synchronize()
            return out.clone()

        element = value[last, 1, 0].clone()
        clean = answers(values[i][place : place + 1], element)
        # Break two tokens in turn: one of an earlier step, to which all queries attend, and the last one of this step.
        for begin, broken in (
            (first, answers(spoilt, element)),
            (last, answers(values[i][place : place + 1], spoilt[0, 1, 0].to(device))),
        ):
            readers = torch.zeros(out.shape[1:3], dtype=torch.bool, device=device)
            readers[begin : last + 1, ratio:] = True
            unlike += int((~broken[:, readers].isnan()).sum() + (broken[:, ~readers] != clean[:, ~readers]).sum())
        answers(values[i][place : place + 1], element)
    return {
        **case._asdict(), "error": worst, "gather_error": off_read, "unlike_where_a_value_is_nan": unlike,
        "bytes_unlike_the_cpus": float((bytes_now[used] != theirs[used]).float().mean()),
        "moved_by_residuals": float(((plain - wanted[-1]).norm(dim=-1) / wanted[-1].norm(dim=-1)).max()),
    }  # fmt: skip


def main() -> int:
    """Check every case, with a few processes at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(DIMS))
    options = parser.parse_args()
    cases = [case for case in CASES if case.dim in options.head_dims]
    # Use a new process for each case, because a fault in a kernel makes its process unusable.
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [(case, pool.submit(check, case)) for case in cases]
        rows = []
        for case, future in futures:
            try:
                rows.append(future.result())
            except Exception as error:
                message = f"{type(error).__name__}: {error}"[:500]
                rows.append({**case._asdict(), "error": float("inf"), "message": message})
            print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decode-check.json").write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [
        row for row in rows
        if not (row["error"] <= LIMIT and row["gather_error"] <= READ_LIMIT)
        or row["bytes_unlike_the_cpus"] > 2e-3 or row["unlike_where_a_value_is_nan"]
        or (row["moved_by_residuals"] > 0) != (row["recent"] > 0)
    ]  # fmt: skip
    print(f"{len(rows) - len(wrong)} of {len(rows)} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
