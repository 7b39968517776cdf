"""Report of a comparison: a verdict for each load, a table for people, JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvpilot_cli.backtest.compare import Row
from kvpilot_cli.backtest.loads import Array
from kvpilot_cli.backtest.service import Objective
from kvpilot_cli.text_tables import render

NAMES = {
    "pilot": "pilot",
    "objectives": "pilot with objectives",
    "bf16-hpa": "static bf16 + HPA",
    "bf16-requests": "static bf16 + HPA on requests",
    "fp8-hpa": "static fp8 + HPA",
    "fp8-requests": "static fp8 + HPA on requests",
    "wva": "static bf16 + llm-d WVA",
    "fp8-wva": "static fp8 + llm-d WVA",
    "max": "static bf16, max replicas",
}
EVEN_PERCENT = 2.0
"""Largest difference of two prices, in percent, at which they count as equal."""
MORE_PERCENT = 1.0
SERVED_PERCENT = 99.0
"""Smallest percentage of good requests at which a policy counts as able to serve the load."""


def judge(pilot: Row, other: Row) -> str:
    """Return whether the first policy is `ahead`, `equal` or `behind`.

    If only one policy has SERVED_PERCENT of good requests, it is ahead. If both have less, the one with more good
    requests is ahead if they differ by more than MORE_PERCENT of all requests. Otherwise the policy with fewer
    GPU-hours per good request is ahead.
    """
    served = pilot.good_percent >= SERVED_PERCENT, other.good_percent >= SERVED_PERCENT
    if served[0] != served[1]:
        return "ahead" if served[0] else "behind"
    more = pilot.good_percent - other.good_percent
    if not served[0] and abs(more) > MORE_PERCENT:
        return "ahead" if more > 0 else "behind"
    if math.isinf(pilot.price) and math.isinf(other.price):
        return "equal"
    if abs(pilot.price - other.price) <= EVEN_PERCENT / 100 * min(pilot.price, other.price):
        return "equal"
    return "ahead" if pilot.price < other.price else "behind"


def verdict(rows: Sequence[Row]) -> str:
    """Return the result of comparing the pilot with each other policy, on one load."""
    pilot = next((r for r in rows if r.policy == "pilot"), None)
    if pilot is None or len(rows) == 1:
        return ""
    words = {"ahead": "ahead of", "equal": "equal to", "behind": "behind"}
    told = [f"{words[judge(pilot, r)]} {NAMES[r.policy]}" for r in rows if r is not pilot]
    return f"{pilot.load}: the pilot is " + ", ".join(told)


HEADER = (
    "load", "policy", "GPU-hours", "good %", "lost", "TTFT p95 s", "TTFT p99 s", "ITL p95 ms", "ITL p99 ms",
    "whole p95 s", "preemptions", "flips", "scalings", "GPU-h / 1M good",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one line of the table."""
    price = "-" if math.isinf(row.price) else f"{row.price:.1f}"
    return (
        row.load, NAMES[row.policy], f"{row.gpu_hours:.1f}", f"{row.good_percent:.2f}", f"{row.lost}",
        f"{row.ttft_p95:.2f}", f"{row.ttft_p99:.2f}", f"{row.itl_p95 * 1000:.0f}", f"{row.itl_p99 * 1000:.0f}",
        f"{row.latency_p95:.1f}", f"{row.preemptions}", f"{row.flips}", f"{row.scalings}", price,
    )  # fmt: skip


def markdown(rows: Sequence[Row], objective: Objective) -> str:
    """Return the table and the verdicts."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(r)) + " |" for r in rows]
    loads = dict.fromkeys(r.load for r in rows)
    lines += ["", f"A good request has its first token within {objective.ttft:g} s and on average at most "
              f"{objective.itl * 1000:g} ms between two tokens. Lost requests timed out, or would have followed "
              "one that did.", ""]  # fmt: skip
    lines += [f"- {text}" for load in loads if (text := verdict([r for r in rows if r.load == load]))]
    return "\n".join(lines) + "\n"


def terminal(rows: Sequence[Row]) -> str:
    """Return the table in aligned columns, and the verdicts."""
    lines = [render(HEADER, [cells(row) for row in rows], left=(0, 1))]
    loads = dict.fromkeys(r.load for r in rows)
    lines += [text for load in loads if (text := verdict([r for r in rows if r.load == load]))]
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return all figures as JSON values. Infinite and unknown numbers become null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{k: plain(v) for k, v in (asdict(r) | {"good_percent": round(r.good_percent, 3),
             "gpu_hours_per_million_good": round(r.price, 2)}).items()} for r in rows]  # fmt: skip


def mean_use(usage: Array) -> str:
    """Return mean and 95th percentile of a history's KV cache usage in percent, without minutes that lack a scrape."""
    seen = usage[np.isfinite(usage)]
    if not len(seen):
        return "not in the history"
    return f"{100 * seen.mean():.0f}% on average, {100 * float(np.quantile(seen, 0.95)):.0f}% at the 95th percentile"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot GPU-hours against the share of good requests, in one panel per load. The file's suffix gives the format."""
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
