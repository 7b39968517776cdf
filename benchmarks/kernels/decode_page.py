"""Write the pages about runs of `decode.py` in docs/benchmarks: `python -m benchmarks.kernels.decode_page`.

The pages are h200-decode.md, and h100-decode-heads.md for heads of 80, 192 and 512 elements.
"""

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
COLUMNS = """\
Each table measures the attention of one layer to random pages, in one decode step. Its heading has the shape of the
attention (query heads / KV heads / elements of a head), and the number of sequences x the tokens in each.
"Window 64" means that the last 64 tokens are read at 8 bits.

* *decode, us*: microseconds of kvpilot's decode kernel. It divides each sequence into splits.
* *with merge, us*: the decode kernel, and the kernel that merges the splits' results. Other backends always include a
  merge.
* *with store, us*: these two, and the kernel that stores the new tokens.
* *read rate*: bytes of the cache that are read per second, relative to a plain copy on the GPU. It is computed from
  *decode*, or from *with merge* for other backends.
* *speed*: how many times as fast as the first row of the table, by *with merge*.
"""
RESIDUAL_PAGES = "h200-decode-residual-pages.json"
HEADS = (
    "| cache | decode, us | with merge, us | with store, us | read rate | speed |",
    "|---|---|---|---|---|---|",
)


class Run(NamedTuple):
    """Section of a page: the raw file of a run, the section's title, and the only shape to show, or "" for all."""

    source: str
    title: str
    shape: str = ""


def where(case: dict[str, Any]) -> str:
    """Return the heading of a table: shape of the attention, number of sequences and tokens in each."""
    shape = f"{case['shape']} ({case['heads']}/{case['kv_heads']}/{case['dim']})"
    return f"{shape}, {case['batch']} x {case['context']:,}"


def line(row: dict[str, Any], base: float | None, copy: float) -> str:
    """Return a row of a table. `base` is the microseconds of its first row; `copy` is bytes per second."""
    name = row["name"].replace(", last 64 finer", ", window 64")
    if "error" in row:
        return f"| {name} | {row['error'].splitlines()[0][:90]} | | | | |"
    cells = [f"{row[k]:.1f}" if k in row else "" for k in ("decode", "merged", "layer")]
    share = row["bytes"] / row.get("decode", row["merged"]) * 1e6 / copy
    speed = f"{base / row['merged']:.2f}x" if base else ""
    return f"| {name} | {' | '.join(cells)} | {share:.2f} | {speed} |"


def section(run: Run) -> str:
    """Return a run's results as Markdown."""
    facts = json.loads((DOCS / run.source).read_text())
    copy = facts["copy_bytes_per_s"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    about = (
        f"{facts['gpu']}, {facts['date']}, {versions}. A plain copy ran at {copy / 1e12:.2f} TB/s. "
        f"Raw: [{run.source}]({run.source})."
    )
    lines = [f"## {run.title}", "", "```sh", facts["command"], "```", "", wrapped(about)]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in facts["rows"]:
        if run.shape in {"", row["case"]["shape"]}:
            tables.setdefault(where(row["case"]), []).append(row)
    for heading, rows in tables.items():
        base = rows[0].get("merged")
        lines += ["", f"### {heading}", "", *HEADS, *(line(row, base, copy) for row in rows)]
    return "\n".join(lines) + "\n"


def beside_rings() -> str:
    """Return the section that compares kernels with residual pages and kernels with rings."""
    trees = json.loads((DOCS / RESIDUAL_PAGES).read_text())
    rings, pages = trees["rings"]["decode"], trees["residual pages"]["decode"]
    versions = ", ".join(f"{name} {number}" for name, number in pages["versions"].items())
    about = (
        f"Both runs used the command of the section above, and one {pages['gpu']}, {pages['date']}, {versions}. "
        f"A plain copy ran at {pages['copy_bytes_per_s'] / 1e12:.2f} TB/s. "
        "A [ring](../decisions/0016-keep-the-recent-window-as-residuals-in-a-ring.md) gives 8 bits to the last 64 "
        "tokens. Residual pages give them to the newest two blocks of 64 tokens. The host had no vLLM, so other "
        f"backends did not run. Raw: [{RESIDUAL_PAGES}]({RESIDUAL_PAGES})."
    )
    lines = [
        "## Residual pages beside rings", "", wrapped(about), "",
        "| Llama-3-8B, sequences x tokens | cache | with merge, us: rings | residual pages | ratio "
        "| with store, us: rings | residual pages | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for old, new in zip(rings["rows"], pages["rows"], strict=True):
        case, name = new["case"], new["name"].partition(",")[0]
        cells = [f"{old[k]:.1f} | {new[k]:.1f} | {new[k] / old[k]:.2f}" for k in ("merged", "layer")]
        lines.append(f"| {case['batch']} x {case['context']:,} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    """Wrap a paragraph at the line length of the documentation."""
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def write(name: str, head: str, sections: Iterable[str]) -> None:
    """Write a page of several sections below its title and first paragraphs (`head`)."""
    (DOCS / name).write_text("\n".join([head, COLUMNS, *sections]))


def main() -> None:
    """Write the pages."""
    write(
        "h200-decode.md",
        """\
# Time of one layer's decode attention on an H200

This page shows how fast one layer attends to each kind of KV cache: kvpilot's kernels, FlashAttention 3 and
FlashInfer's XQA. **With 32 sequences of 16,384 tokens, `k4v4` takes 139 us, XQA with fp8 322 us, and FlashAttention 3
with bf16 480 us.** In that run, a ring for each request held the recent window. Today's kernels read the window from
residual pages. The second section compares the two on one GPU. With residual pages, `k4v4` takes 1.01 times as long in
this case. In all cases, decode with merge takes 0.98 to 1.07 times as long, and with store 0.99 to 1.06 times.
""",
        (
            section(Run("h200-decode-xqa.json", "Beside FlashAttention 3 and XQA")),
            beside_rings(),
            section(Run("h200-decode.json", "Heads of 256 elements, with the kernels of 2026-11-21", "head_dim 256")),
            section(Run("h200-decode-integers.json", "Other models and dtypes, with the kernels of 2026-11-22")),
        ),
    )
    write(
        "h100-decode-heads.md",
        """\
# Time of one layer's decode attention with heads of 80, 192 and 512 elements

This page shows how fast one layer attends to its KV cache on an H100 if the model has heads of an unusual size. **With
32 sequences of 16,384 tokens, `k4v4` with its window is 2.6 to 3.2 times as fast as bf16.** Today's kernels divide
the work better if sequences are few. In a later run, `k4v4` with StableLM's heads took 713 us with merge instead of
879.
""",
        (
            section(Run("h100-decode-heads.json", "Heads of 80 and 192 elements, beside FlashAttention 3")),
            section(Run("h100-decode-wide.json", "Heads of 512 elements, beside vLLM's Triton kernel")),
        ),
    )


if __name__ == "__main__":
    main()
