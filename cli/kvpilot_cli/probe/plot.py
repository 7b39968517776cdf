"""Plot of damage by context position beside the baseline's noise: a mean hides damage of long contexts."""

from __future__ import annotations

from pathlib import Path

from kvpilot_cli import plots
from kvpilot_cli.probe.compare import Comparison

_NOISE, _DAMAGE, _WIDTH = "#9a9a9a", "#d1491f", 0.4


def draw(found: Comparison, file: Path) -> None:
    """Write the plot; `plots.check` must have passed.

    Raises:
        PlotError: the file cannot be written.
    """
    sides = (("baseline", found.control, _NOISE), ("candidate", found.measured, _DAMAGE))
    places = sorted({(b.from_position, b.to_position) for _, side, _ in sides for b in side.buckets})
    with plots.drawing(file, 7.5, 4) as axes:
        for i, (name, side, colour) in enumerate(sides):
            at = [places.index((b.from_position, b.to_position)) + (i - 0.5) * _WIDTH for b in side.buckets]
            heights = [b.mean_kl_micronats / 1000 for b in side.buckets]
            axes.bar(at, heights, _WIDTH, color=colour, label=f"{name} ({found.models[i]})")
        axes.set_xticks(range(len(places)), [f"{low:,}-{high:,}" for low, high in places])
        axes.set(
            xlabel="tokens before",
            ylabel="mean KL, millinats",
            title=f"{found.judgement.verdict}: {found.judgement.reason}",
        )
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False)
