"""The plot of a plan: sequences that fit at once against their context, a line for each dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpilot_kernels import formats
from kvpilot_planning.facts import PlanError
from kvpilot_planning.plan_make import Plan

SUFFIXES = (".svg", ".png")
# White behind everything, so that a dark viewer shows it as a light one does; no random ids, so that the same plan
# gives the same file.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvpilot",
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def check(file: Path) -> None:
    """Raise PlanError unless a plot can be written there."""
    if file.suffix.lower() not in SUFFIXES:
        raise PlanError(f"--plot {str(file)!r}: the suffix is no {' or '.join(SUFFIXES)}; name the file so")
    if not file.absolute().parent.is_dir():
        raise PlanError(f"--plot {str(file)!r}: its folder does not exist; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlanError("--plot needs matplotlib, which is not installed; pip install 'kvpilot[planning]'") from None


def draw(plan: Plan, file: Path) -> None:
    """Write the plot; `check` must have passed."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    request = plan.request
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 4.5))
        ends = []
        for row in plan.rows:
            fits = sorted({fit.context: fit.sequences for fit in row.fits if fit.sequences}.items())
            if not fits:
                continue
            contexts, sequences = zip(*fits, strict=True)
            colour = formats.parse(row.dtype).colour
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
        try:
            figure.savefig(file, bbox_inches="tight", metadata={"Date": None} if file.suffix.lower() == ".svg" else {})
        except OSError as error:
            raise PlanError(f"--plot {str(file)!r} cannot be written ({error}); choose another place") from error
        finally:
            plt.close(figure)


def _label(axes: Any, ends: list[tuple[int, int, str, str]]) -> None:
    """Name each line at its right end, far enough from one another to be read."""
    low, high = axes.get_ylim()
    gap = (high / low) ** 0.05
    lowest = 0.0
    for height, context, dtype, colour in sorted(ends):
        lowest = max(float(height), lowest * gap)
        place = (axes.get_xlim()[1], lowest)
        axes.annotate(f" {dtype}  {height:,}", (context, height), place, color=colour, va="center")
