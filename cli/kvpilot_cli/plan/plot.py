"""Plot a plan: the number of sequences that fit by their context, with a line for each dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpilot_cli import plots
from kvpilot_cli.plan.make import Plan
from kvpilot_formats import dtypes


def draw(plan: Plan, file: Path) -> None:
    """Write the plot; `plots.check` must have passed."""
    request = plan.request
    with plots.drawing(file, 7.5, 4.5) as axes:
        ends = []
        for row in plan.rows:
            fits = sorted({fit.context: fit.sequences for fit in row.fits if fit.sequences}.items())
            if not fits:
                continue
            contexts, sequences = zip(*fits, strict=True)
            colour = dtypes.parse(row.dtype).colour
            axes.plot(contexts, sequences, color=colour, marker="o", markersize=4, linewidth=1.8)
            ends.append((sequences[-1], contexts[-1], row.dtype, colour))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(plan.contexts, [f"{c:,}" for c in plan.contexts])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="y", alpha=0.25)
        axes.set(
            xlabel="tokens of each sequence",
            ylabel="sequences that fit at once",
            title=f"{request.model.name} on {request.gpus} x {request.gpu.name}",
        )
        _label(axes, ends)


def _label(axes: Any, ends: list[tuple[int, int, str, str]]) -> None:
    """Label each line at its right end, with enough distance between labels."""
    low, high = axes.get_ylim()
    gap = (high / low) ** 0.05
    lowest = 0.0
    for height, context, dtype, colour in sorted(ends):
        lowest = max(float(height), lowest * gap)
        place = (axes.get_xlim()[1], lowest)
        axes.annotate(f" {dtype}  {height:,}", (context, height), place, color=colour, va="center")
