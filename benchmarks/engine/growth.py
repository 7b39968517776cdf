"""Compare step times with the physical limit: `python -m benchmarks.engine.growth RAW.json --copy-rate 3.03`.

RAW.json has the results of gpu_engine.py for one shape in every dtype. The program prints a table of step times.
Behind each, it prints the limit as a share of the step time. The limit is the number of bytes of cache and weights that
a step reads, divided by the rate of a plain copy on that GPU. `--plot` draws step and limit against the total tokens,
with a panel for each number of sequences (needs matplotlib).
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.gpu_engine_shapes import SHAPES, Shape
from kvpilot_formats import formats

DTYPES = ("auto", "fp8", "k8v4", "k4v4", "k4v2")


def weights_of(shape: Shape, layers: int) -> int:
    """Return the bytes of weights that a dense 16-bit model reads in a step: all layers and the output projection."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return 2 * (layers * (attention + 3 * shape.hidden * shape.ffn) + shape.vocab * shape.hidden)


def limits(run: dict[str, Any], copy_rate: float) -> Callable[[int], float]:
    """Return a function from total tokens to the smallest possible step time in milliseconds.

    `copy_rate` is in bytes per second.
    """
    name, layers = re.fullmatch(r"(.+?)(?:-(\d+)-layers)?", run["shape"]).groups()  # type: ignore[union-attr]
    shape = SHAPES[name]
    count = int(layers or shape.layers)
    bits = {"auto": 16.0, "fp8": 8.0}.get(run["dtype"]) or formats.parse(run["dtype"]).bits_per_element(shape.head_dim)
    token = count * 2 * shape.kv_heads * shape.head_dim * bits / 8
    return lambda tokens: 1e3 * (tokens * token + weights_of(shape, count)) / copy_rate


def steps(run: dict[str, Any]) -> dict[tuple[int, int], float]:
    """Return the measured step times in milliseconds, by (number of sequences, tokens of each)."""
    cases = [case for case in run["cases"].values() if "step_ms" in case]
    return {(case["batch"], case["context"]): case["step_ms"] for case in cases}


def table(runs: dict[str, dict[str, Any]], copy_rate: float) -> str:
    """Return the table of steps, sorted by total tokens in descending order."""
    found = {dtype: (steps(run), limits(run, copy_rate)) for dtype, run in runs.items()}
    every = {case for of, _ in found.values() for case in of}
    heads = ["sequences x tokens", "tokens in all", *(f"`{dtype}`" for dtype in found)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for batch, context in sorted(every, key=lambda case: (case[0] * case[1], case[0]), reverse=True):
        cells = [f"{batch} x {context:,}", f"{batch * context:,}"]
        for of, limit in found.values():
            step = of.get((batch, context))
            cells.append("-" if step is None else f"{step:.2f} ({limit(batch * context) / step:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: dict[str, dict[str, Any]], copy_rate: float, path: Path) -> None:
    """Plot step times as lines and limits as dashed lines, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    from benchmarks.engine.plots import COLOURS, STYLE

    batches = sorted({batch for run in runs.values() for batch, _ in steps(run)})
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(batches), figsize=(3.1 * len(batches), 3.6), sharey=True, squeeze=False)
        for axes, batch in zip(panels[0], batches, strict=True):
            for dtype, run in runs.items():
                points = sorted((batch * n, step) for (size, n), step in steps(run).items() if size == batch)
                if not points:
                    continue
                tokens, took = zip(*points, strict=True)
                colour, limit = COLOURS[dtype], limits(run, copy_rate)
                axes.plot(tokens, took, marker="o", markersize=3, color=colour, label=dtype)
                axes.plot(tokens, [limit(x) for x in tokens], color=colour, linestyle="--", linewidth=0.9)
            axes.set(xscale="log", yscale="log", title=f"{batch} sequence{'s' * (batch > 1)}", xlabel="tokens in all")
            axes.grid(alpha=0.25)
        panels[0][0].set_ylabel("decode step, ms (dashed: the limit)")
        panels[0][0].legend(frameon=False)
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> int:
    """Print the table of steps and limits, and draw the plot if the command line asks for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument(
        "--copy-rate", type=float, required=True, help="rate of a plain copy in TB/s, bytes read and written together"
    )
    parser.add_argument("--plot", type=Path, help="an SVG to write")
    args = parser.parse_args()
    every = {run["dtype"]: run for run in json.loads(args.raw.read_text())}
    runs = {dtype: every[dtype] for dtype in DTYPES if dtype in every}
    print(table(runs, args.copy_rate * 1e12))
    if args.plot:
        plot(runs, args.copy_rate * 1e12, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
