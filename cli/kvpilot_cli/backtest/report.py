"""Report of a comparison: a verdict for each load, a table for people, JSON for machines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
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
    served = "served" if pilot.good_percent >= SERVED_PERCENT else "not served"
    found = {word: [NAMES[r.policy] for r in rows if r is not pilot and judge(pilot, r) == word] for word in _WORDS}
    told = [f"{_WORDS[word]} {', '.join(names)}" for word, names in found.items() if names]
    return f"{pilot.load}: {served} by the pilot ({pilot.good_percent:.2f}% good), {'; '.join(told)}"


def summary(rows: Sequence[Row]) -> str:
    """Return the verdict over all loads; empty without a pilot to compare."""
    pilots = [r for r in rows if r.policy == "pilot"]
    pairs = [judge(pilot, r) for pilot in pilots for r in rows if r.load == pilot.load and r is not pilot]
    if not pairs:
        return ""
    served = sum(r.good_percent >= SERVED_PERCENT for r in pilots)
    counts = ", ".join(f"{pairs.count(word)} {word}" for word in _WORDS)
    return f"Verdict: the pilot serves {served} of {len(pilots)} loads; of {len(pairs)} comparisons: {counts}"


def explained(objective: Objective) -> str:
    """Return the meaning of the columns, and the rule of the verdict."""
    return (
        f"A good request has its first token within {objective.ttft:g} s and on average at most "
        f"{objective.itl * 1000:g} ms between two tokens. Lost requests timed out, or would have followed one that "
        f"did. A load is served from {SERVED_PERCENT:g}% good requests on; among policies that serve it, fewer "
        "GPU-hours for a million good requests are ahead."
    )


_WORDS = {"ahead": "ahead of", "equal": "equal to", "behind": "behind"}

HEADER = (
    "load", "policy", "GPU-hours", "good %", "lost", "TTFT p95 s", "TTFT p99 s", "ITL p95 ms", "ITL p99 ms",
    "whole p95 s", "preemptions", "flips", "scalings", "GPU-h / 1M good",
)  # fmt: skip


_BESIDE = ("TTFT p99 s", "ITL p99 ms", "whole p95 s", "preemptions")
"""Columns that only the Markdown report has."""


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
    lines += ["", explained(objective), "", *(f"- {text}" for text in _verdicts(rows))]
    return "\n".join(lines) + "\n"


def terminal(rows: Sequence[Row], objective: Objective) -> str:
    """Return the table in aligned columns of at most 120 characters, and the verdicts."""
    shown = [i for i, name in enumerate(HEADER) if name not in _BESIDE]
    table = render([HEADER[i] for i in shown], [[cells(row)[i] for i in shown] for row in rows], left=(0, 1))
    return "\n".join([table, "", textwrap.fill(explained(objective), 118), "", *_verdicts(rows)])


def _verdicts(rows: Sequence[Row]) -> list[str]:
    loads = dict.fromkeys(r.load for r in rows)
    told = [verdict([r for r in rows if r.load == load]) for load in loads]
    return [one for one in (*told, summary(rows)) if one]


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
