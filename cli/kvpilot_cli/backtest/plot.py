"""Plot of GPU-hours against the share of good requests, a panel for each load (extra `cli`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpilot_cli.backtest.compare import Row
from kvpilot_cli.backtest.report import NAMES


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the figure in the format of the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = list(dict.fromkeys(r.load for r in rows))
    figure, axes = pyplot.subplots(1, len(loads), figsize=(4 * len(loads), 3.4), squeeze=False)
    for panel, load in zip(axes[0], loads, strict=True):
        for row in (r for r in rows if r.load == load):
            panel.scatter(row.gpu_hours, row.good_percent, label=NAMES[row.policy], s=50)
        panel.set(title=load, xlabel="GPU-hours", ylabel="good requests, %")
        panel.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
