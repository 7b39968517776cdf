"""Make page and plots of the engine benchmark: `python -m benchmarks.engine.plots RAW.json ... [--out DIR]`.

RAW are files of gpu_engine.py. The program writes OUT/h200-engine.json (all runs in one file), OUT/h200-engine.md and
two SVGs per shape: step time against context, and tokens that fit. From h200-engine.json alone it writes the same page
again. The program needs matplotlib, which kvpilot does not depend on.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.engine import gpu_engine_report as report

mpl.use("svg")
import matplotlib.pyplot as plt  # Import pyplot only after the plot backend is chosen.

COLOURS = {
    "auto": "#333333",
    "fp8": "#3b6fb6",
    "int8": "#7a9e3a",
    "k8v4": "#e2a21b",
    "k4v4": "#d1491f",
    "k4v2": "#8f2d8c",
    "k2v2": "#c87fb4",
}
RIVAL = "#9a9a9a"
TICKS = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 60, 80, 120, 200)
OUR_WIDTH, RIVAL_WIDTH = 2.2, 1.3
# Fix the seed of the ids, so that the same data always give the same file.
STYLE: Any = {"svg.hashsalt": "kvpilot", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def steps_plot(title: str, runs: report.Runs, path: Path) -> bool:
    """Plot a step's milliseconds over the context, one line per dtype. Return False if there are no data.

    The plot shows only the batch size that was measured at the most contexts.
    """
    cases = [case for run in runs.values() for case in run["cases"].values() if "step_ms" in case]
    batches = [case["batch"] for case in cases if case["context"] >= 1024]
    if not batches:
        return False
    batch = max(set(batches), key=lambda size: (batches.count(size), size))
    figure, axes = plt.subplots(figsize=(7, 4.2))
    ends = []
    for dtype, run in runs.items():
        points = sorted((c["context"], c["step_ms"]) for c in run["cases"].values() if c.get("batch") == batch)
        if not points:
            continue
        contexts, steps = zip(*points, strict=True)
        colour, width = COLOURS.get(dtype, RIVAL), OUR_WIDTH if dtype in COLOURS else RIVAL_WIDTH
        axes.plot([c / 1024 for c in contexts], steps, marker="o", markersize=3.5, color=colour, linewidth=width)
        ends.append((steps[-1], contexts[-1] / 1024, dtype, colour))
    axes.set(xlabel="context of each sequence, thousands of tokens", ylabel="decode step, ms", title=title)
    # Use a logarithmic axis, so that equal ratios are equal distances and slow dtypes do not compress the rest.
    axes.set_yscale("log")
    ticks = [tick for tick in TICKS if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.25)
    _label_ends(axes, ends)
    _save(figure, path)
    return True


def _label_ends(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its right end. If names would overlap, move them apart."""
    low, high = axes.get_ylim()
    gap = (high / low) ** 0.05
    lowest = 0.0
    for height, context, dtype, colour in sorted(ends):
        lowest = max(height, lowest * gap)
        text = f"{dtype}  {height:.1f} ms"
        axes.annotate(text, (context, height), (1.01 * axes.get_xlim()[1], lowest), color=colour, va="center")


def capacity_plot(title: str, runs: report.Runs, path: Path) -> bool:
    """Plot the tokens that fit in the KV cache, one bar per dtype. Return False if there are no data."""
    held = sorted((run["kv_tokens"], dtype) for dtype, run in runs.items() if run.get("kv_tokens"))
    if not held:
        return False
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.42 * len(held)))
    base = report.capacity(runs.get("auto"))
    for row, (tokens, dtype) in enumerate(held):
        axes.barh(row, tokens / 1e6, color=COLOURS.get(dtype, RIVAL), height=0.62)
        times = f" ({tokens / base:.2f}x)" if base else ""
        axes.text(tokens / 1e6, row, f" {tokens / 1e6:.2f}M{times}", va="center")
    axes.set_yticks(range(len(held)), [dtype for _, dtype in held])
    axes.set(xlabel="tokens in the KV cache, millions", title=title)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    _save(figure, path)
    return True


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    """Write the page, the plots and the joined raw file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "benchmarks")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = report.load(args.raw)
    every = [run for runs in found.values() for run in runs.values()]
    (args.out / "h200-engine.json").write_text(json.dumps(every, indent=1) + "\n")
    plots: dict[str, list[str]] = {}
    with mpl.rc_context(STYLE):
        for shape, runs in found.items():
            slug = re.sub(r"[^a-z0-9]+", "-", shape.lower())
            device = next((run["versions"]["device"] for run in runs.values() if "versions" in run), "")
            for kind, draw in (("step", steps_plot), ("capacity", capacity_plot)):
                name = f"h200-engine-{slug}-{kind}.svg"
                if draw(f"{shape}; {device}", runs, args.out / name):
                    plots.setdefault(shape, []).append(name)
    (args.out / "h200-engine.md").write_text(report.page(found, plots))
    return 0


if __name__ == "__main__":
    sys.exit(main())
