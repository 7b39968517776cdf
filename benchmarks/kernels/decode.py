"""Compare our decode kernel with FlashAttention 3 and FlashInfer on a GPU: `python -m benchmarks.kernels.decode`.

One layer decodes over random pages of random block tables. A CUDA graph of 32 launches rotates over several layers'
caches, so that no cache stays in L2. Times are medians of ten replays:

- `decode`: the split kernel alone.
- `merged`: the split kernel and the merge of its results, which FlashAttention and FlashInfer include.
- `layer`: these two, and the store of the step's token.

For comparison, the program also times a device-to-device copy. FlashAttention comes with vLLM, and FlashInfer is a
separate package; the program leaves out what is not installed. Our formats are measured with each window of `--recent`,
whose blocks all have residual pages. The program writes OUT/decode.json, from which `decode_page.py` makes pages.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import decode_rivals
from benchmarks.kernels.timing import copy_rate, layers_for, microseconds
from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from kvpilot_kernels.residuals import Residuals


@dataclass(frozen=True)
class Case:
    """Shape of one measurement: `batch` sequences of `context` tokens, and the heads."""

    shape: str
    heads: int
    kv_heads: int
    dim: int
    batch: int
    context: int


SHAPES = {
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B": (64, 8, 128),
    "Llama-3-70B, a share of 8": (8, 1, 128),
    "Qwen3-30B-A3B": (32, 4, 128),
    "StableLM 3B": (32, 32, 80),
    "head_dim 192": (32, 8, 192),
    "head_dim 256": (16, 8, 256),
    "Gemma 4 26B": (16, 2, 512),
}
CASES = [
    *(
        Case("Llama-3-8B", *SHAPES["Llama-3-8B"], *size)
        for size in ((32, 16384), (32, 2048), (8, 1024), (1, 65536), (256, 4096), (128, 4096))
    ),
    *(Case(name, *shape, 32, 16384) for name, shape in list(SHAPES.items())[1:]),
    Case("Gemma 4 26B", *SHAPES["Gemma 4 26B"], 8, 1024),
]


def random_pages(fmt: formats.Format, case: Case, block: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Return KV pages of random quantized values. Scales are between 0.01 and 0.03, zero points near the middle."""
    cache = torch.randint(
        0, 256, (blocks, case.kv_heads, block, fmt.row_bytes(case.dim)), dtype=torch.uint8, device=device
    )
    layout = fmt.page_layout(case.dim, block)
    groups = (layout.size - layout.key_meta.offset) // 2
    scale = (torch.rand(blocks, case.kv_heads, groups, device=device) * 0.02 + 0.01).half().view(torch.int16).int()
    zero = torch.randint(10, 20, scale.shape, device=device)
    meta = (((scale >> 4) << 5) | zero).to(torch.int16).view(torch.uint8)
    cache.flatten(2)[..., layout.key_meta.offset :] = meta
    return cache


def residuals_for(fmt: formats.Format, case: Case, block: int, recent: int, table: torch.Tensor) -> Residuals | None:
    """Return a map that gives residual pages to all blocks of the recent windows; None without a window.

    The residual pages follow the blocks of `table`, int32 [sequences, blocks], which are numbered from 1 on.
    """
    newest, count = fmt.recent_blocks(recent, block), fmt.residual_pages(case.dim, block)
    if not newest:
        return None
    refined, first = table[:, -newest:].flatten().long(), 1 + table.numel()
    pages = torch.zeros(first + refined.numel() * count, count, dtype=torch.int32, device=table.device)
    ids = first + torch.randperm(refined.numel() * count, device=table.device)
    pages[refined] = ids.view(-1, count).int()
    return Residuals(pages, torch.tensor([newest], dtype=torch.int32, device=table.device))


def bytes_read(fmt: formats.Format, case: Case) -> int:
    """Return the bytes of a case's stored tokens in one layer, without residuals."""
    return case.batch * case.context * case.kv_heads * fmt.row_bytes(case.dim)


def random_layers(
    fmt: formats.Format, case: Case, block: int, recent: int, table: torch.Tensor
) -> tuple[Shape, list[GpuPages]]:
    """Return layers with random pages, of which a step reads one after another so that no cache stays in L2."""
    residuals = residuals_for(fmt, case, block, recent, table)
    count, blocks = (0, 1 + table.numel()) if residuals is None else (residuals.pages.shape[1], len(residuals.pages))
    shape = Shape(fmt, case.dim, case.kv_heads, case.heads // case.kv_heads, block, table.device, residuals=count)
    factors = Factors.identity(case.kv_heads, case.dim, table.device)
    return shape, [
        GpuPages(random_pages(fmt, case, block, blocks, table.device), shape, factors, residuals)
        for _ in range(layers_for(bytes_read(fmt, case)))
    ]


def ours(
    name: str, case: Case, device: torch.device, recent: int = 0, block: int = 64, overlap: bool | None = None
) -> dict[str, Any]:
    """Measure our kernels in one format. If `overlap` is None, the plan decides whether decode overlaps `store`."""
    fmt, per = formats.parse(name), -(-case.context // block)
    table = (1 + torch.randperm(per * case.batch, device=device)).view(case.batch, per).int()
    shape, pages = random_layers(fmt, case, block, recent, table)
    plan, turn = Plan(shape, case.batch), iter(range(10**9))
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    query = torch.randn(case.batch, case.heads, case.dim, device=device, dtype=torch.bfloat16)
    key, value = torch.randn(2, case.batch, case.kv_heads, case.dim, device=device, dtype=torch.bfloat16)
    slots = table[:, -1].long() * block + (case.context - 1) % block
    out = torch.empty_like(query)
    plan.update(lens, overlap=True)
    if overlap is not None:
        plan.overlap = overlap

    def store() -> GpuPages:
        at = pages[next(turn) % len(pages)]
        at.store(query, key, value, slots, plan, case.batch, case.dim**-0.5, lens)
        return at

    def layer() -> None:
        store().decode(table, lens, plan, out)

    store()
    taken = pages[0].attend(table, lens, plan)
    shape.settle(1, taken)
    plan.update(lens, overlap=plan.overlap)
    return {
        "registers": taken.registers if taken else None,
        "splits": int((plan.splits[:, 0] >= 0).sum()),
        "wave": plan.cut().wave,
        "store": microseconds(store),
        "decode": microseconds(lambda: pages[next(turn) % len(pages)].attend(table, lens, plan)),
        "merged": microseconds(lambda: pages[next(turn) % len(pages)].decode(table, lens, plan, out)),
        "layer": microseconds(layer),
        "bytes": bytes_read(fmt, case),
        "recent": recent if shape.residuals else 0,
    }


def measure(out: Path, windows: list[int], shapes: list[str], names: list[str], sizes: list[str]) -> None:
    """Measure our kernels and the installed kernels of other projects, and write the results after each row.

    Args:
        windows: lengths of the recent window, in tokens.
        sizes: cases to measure, such as 32x16384 (sequences x context); empty for all.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    packages = {name: _version(name) for name in ("torch", "triton", "vllm", "flashinfer-python")}
    facts: dict[str, Any] = {
        "command": f"python -m benchmarks.kernels.decode --shapes {' '.join(shapes)} --formats {' '.join(names)} "
        f"--recent {' '.join(map(str, windows))}{' --sizes ' if sizes else ''}{' '.join(sizes)}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "gpu": torch.cuda.get_device_name(device),
        "versions": {name: number for name, number in packages.items() if number},
        "copy_bytes_per_s": copy_rate(device),
        "rows": [],
    }
    own = {
        f"{f}, last {w} finer" if w else f: (lambda c, d, f=f, w=w: ours(f, c, d, w))
        for f in names
        for w in windows
        if not w or formats.parse(f).has_residuals
    }
    for case in (c for c in CASES if c.shape in shapes and (not sizes or f"{c.batch}x{c.context}" in sizes)):
        for name, run in {**decode_rivals.installed(case.dim), **own}.items():
            try:
                row = run(case, device)
            except Exception as error:  # another project's kernel may not support a shape
                row = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            facts["rows"].append({"case": case.__dict__, "name": name, **row})
            print(f"{case.shape} {case.batch}x{case.context} {name}: {row}", flush=True)
            torch.cuda.empty_cache()
            out.mkdir(parents=True, exist_ok=True)
            (out / "decode.json").write_text(json.dumps(facts, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def main() -> int:
    """Run the measurements that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--recent", type=int, nargs="+", default=[0, 64], help="windows of our formats")
    parser.add_argument("--formats", nargs="+", default=list(formats.own_names()))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="names of attention shapes")
    parser.add_argument("--sizes", nargs="+", default=[], help="cases to measure, such as 32x16384 (default: all)")
    options = parser.parse_args()
    measure(options.out, options.recent, options.shapes, options.formats, options.sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
