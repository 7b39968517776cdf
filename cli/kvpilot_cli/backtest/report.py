"""Format the results of a backtest: a table for people, and JSON for programs."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from kvpilot_cli.backtest.compare import Row
from kvpilot_cli.backtest.service import Objective
from kvpilot_cli.text_tables import render

HEADER = (
    "load", "policy", "GPU-hours", "good %", "lost", "TTFT p95 s", "TTFT p99 s", "ITL p95 ms", "ITL p99 ms",
    "whole p95 s", "preemptions", "flips", "scalings", "GPU-h / 1M good",
)  # fmt: skip
_HIDDEN = ("TTFT p99 s", "ITL p99 ms", "whole p95 s", "preemptions")
"""Columns that are left out on a terminal, which has no room for them."""


def explained(objective: Objective) -> str:
    """Return a text that explains the columns of the table."""
    return (
        f"A good request has its first token within {objective.ttft:g} s and on average at most "
        f"{objective.itl * 1000:g} ms between two tokens. A request is lost if it times out, or if it would "
        "follow a lost one."
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one line of the table."""
    price = "-" if math.isinf(row.price) else f"{row.price:.1f}"
    return (
        row.load, row.policy, f"{row.gpu_hours:.1f}", f"{row.good_percent:.2f}", f"{row.lost}",
        f"{row.ttft_p95:.2f}", f"{row.ttft_p99:.2f}", f"{row.itl_p95 * 1000:.0f}", f"{row.itl_p99 * 1000:.0f}",
        f"{row.latency_p95:.1f}", f"{row.preemptions}", f"{row.flips}", f"{row.scalings}", price,
    )  # fmt: skip


def terminal(rows: Sequence[Row], objective: Objective) -> str:
    """Return the table in aligned columns of at most 120 characters, and its explanation."""
    shown = [i for i, name in enumerate(HEADER) if name not in _HIDDEN]
    table = render([HEADER[i] for i in shown], [[cells(row)[i] for i in shown] for row in rows], left=(0, 1))
    return f"{table}\n\n{textwrap.fill(explained(objective), 118)}"


def as_json(rows: Sequence[Row]) -> bytes:
    """Return all figures as JSON. Infinite and unknown numbers become null."""
    more = [{"good_percent": round(r.good_percent, 3), "gpu_hours_per_million_good": round(r.price, 2)} for r in rows]
    return msgspec.json.format(msgspec.json.encode([asdict(r) | m for r, m in zip(rows, more, strict=True)]), indent=1)
