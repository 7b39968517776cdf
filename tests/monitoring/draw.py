"""Draw a dashboard's panels from a Prometheus as figures for docs/. The figures are not screenshots."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from monitored import NAME, NAMESPACE, Monitored
from panels import DASHBOARDS, Panel, load

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "kvpilot"
# SVG text is smaller than outlines, and searchable.
mpl.rcParams["svg.fonttype"] = "none"
COLUMNS = 3
STEP_SECONDS = 2
_LINES = ("timeseries", "state-timeline")


async def draw(monitored: Monitored, start: float, end: float, folder: Path) -> list[Path]:
    """Draw one SVG for each dashboard, with its panels over time; `start` and `end` are Unix times."""
    made = []
    for path in DASHBOARDS:
        shown = [panel for panel in load(path)["panels"] if panel["type"] in _LINES]
        data = [(panel["title"], await _series(monitored, path.stem, panel, start, end)) for panel in shown]
        made.append(_figure(path.stem, [one for one in data if one[1]], start, folder))
    return made


async def _series(
    monitored: Monitored, dashboard: str, panel: dict[str, Any], start: float, end: float
) -> list[tuple[str, list[tuple[float, float]]]]:
    found = []
    for target in panel["targets"]:
        text = Panel(dashboard, panel["title"], target["expr"]).filled(NAMESPACE, NAME)
        for one in (await monitored.ask("query_range", query=text, start=start, end=end, step=STEP_SECONDS))["result"]:
            labels, legend = one["metric"], target["legendFormat"]
            name = re.sub(r"\{\{(\w+)\}\}", lambda match, labels=labels: labels.get(match[1], ""), legend)
            found.append((name, [(float(time) - start, float(value)) for time, value in one["values"]]))
    return found


def _figure(name: str, data: list[tuple[str, Any]], start: float, folder: Path) -> Path:
    rows = -(-len(data) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(15, 2.6 * rows), layout="constrained", squeeze=False)
    for place in axes.flat[len(data) :]:
        place.remove()
    for place, (title, lines) in zip(axes.flat, data, strict=False):
        for label, points in lines:
            alone = "." if len(points) == 1 else None
            place.plot(*zip(*points, strict=True), label=label or None, linewidth=1, marker=alone)
        place.set_title(title, fontsize=9, loc="left")
        place.tick_params(labelsize=7)
        place.grid(alpha=0.3)
        place.set_ylim(bottom=0)
        if any(label for label, _ in lines):
            place.legend(fontsize=6, loc="best", framealpha=0.6)
    began = datetime.fromtimestamp(start, UTC)
    figure.suptitle(
        f"{name}.json, its queries over seconds since {began:%Y-%m-%d %H:%M:%S} UTC. "
        "Drawn by matplotlib from a Prometheus; not a screenshot of Grafana.",
        fontsize=9,
    )
    path = folder / f"dashboard-{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return path
