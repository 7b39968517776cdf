"""Output of a plan: tables of at most 120 columns for people, and JSON for programs."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from kvpilot_cli.plan.load import FILL, Cost, Load
from kvpilot_cli.plan.make import Fit, Plan, Request, Row
from kvpilot_cli.text_tables import render

WIDTH = 120


def text(plan: Plan) -> str:
    """Return the whole plan as text."""
    parts = [_head(plan), _capacities(plan)]
    if plan.request.bound is not None:
        parts.append(_bounded(plan))
    if any(row.host_tokens is not None for row in plan.rows):
        parts.append(_hosted(plan))
    if plan.request.load is not None:
        parts.append(_costs(plan, plan.request.load))
    if notes := _notes(plan):
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _head(plan: Plan) -> str:
    request = plan.request
    gpus = f"{request.gpus} x {request.gpu.name}" if request.gpus > 1 else request.gpu.name
    nodes = f"{request.nodes} nodes with " if request.nodes > 1 else ""
    lines = [f"{request.model.name} on {nodes}{gpus}"]
    kv = f"KV cache {plan.kv_bytes / 1e9:,.1f} GB"
    if plan.memory is None:
        lines.append(f"each GPU: {kv}, as given")
    else:
        split = plan.memory
        lines.append(
            f"each GPU: {request.gpu.memory_mib:,} MiB x {request.utilization:g} = {split.usable / 1e9:,.1f} GB, less "
            f"weights ({plan.weights_dtype}) {split.weights / 1e9:,.1f} and engine {split.engine / 1e9:,.1f}: {kv}"
        )
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def _table(plan: Plan, head: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> str:
    """Return a table with a line for each dtype, and dashes for a dtype that cannot serve the model."""
    nothing = ["-"] * (len(head) - 1)
    return render(head, [[row.dtype, *(nothing if row.infeasible is not None else cells(row))] for row in plan.rows])


def _ratio(tokens: int, whole: int) -> str:
    return f"{tokens / whole:.2f}" if whole else "-"


def _capacities(plan: Plan) -> str:
    base = next((row.fits[-1].tokens for row in plan.rows if row.dtype == "auto" and row.fits), 0)
    at = [f"at {c:,}" for c in plan.contexts]

    def cells(row: Row) -> list[str]:
        tokens = row.fits[-1].tokens
        window = f"{row.recent_bytes / 1e6:,.1f}" if row.recent_bytes else "-"
        sizes = [f"{row.bits:g}", f"{row.token_bytes:,}", window, f"{tokens:,}", _ratio(tokens, base)]
        return [*sizes, *(f"{fit.sequences:,}" for fit in row.fits)]

    head = ["dtype", "bits", "bytes a token", "MB a window", "KV tokens", "x auto", *at]
    return f"Sequences that fit at once, by their tokens\n{_table(plan, head, cells)}"


def _bounded(plan: Plan) -> str:
    def cells(row: Row) -> list[str]:
        tokens = row.bounded[-1].tokens
        sizes = [f"{row.bounded_bytes / 1e6:,.1f}", f"{tokens:,}", _ratio(tokens, row.fits[-1].tokens)]
        return [*sizes, *(f"{fit.sequences:,}" for fit in row.bounded)]

    head = ["dtype", "MB a sequence", "KV tokens", "x All", *(f"at {c:,}" for c in plan.contexts)]
    return f"The same with {plan.request.bound}\n{_table(plan, head, cells)}"


def _hosted(plan: Plan) -> str:
    longest, kv = plan.contexts[-1], plan.kv_bytes * plan.request.all_gpus

    def cells(row: Row) -> list[str]:
        tokens = row.host_tokens
        if tokens is None:
            return ["-", "-", "-"]
        return [f"{tokens:,}", _ratio(tokens, kv // row.token_bytes), f"{tokens // longest:,}"]

    head = ["dtype", "tokens", "x the GPU's" if plan.request.gpus == 1 else "x the GPUs'", f"prefixes of {longest:,}"]
    return f"Host memory of each replica, {plan.request.host / 2**30:g} GiB\n{_table(plan, head, cells)}"


def _costs(plan: Plan, load: Load) -> str:
    title = (
        f"Cost of {load.requests_per_second:g} requests/s, {load.prompt_tokens:,} prompt and {load.generated_tokens:,} "
        f"generated tokens, at most {load.token_seconds * 1000:g} ms a token, KV at most {FILL:.0%} full"
    )
    head = ["dtype", "replicas", "GPUs", "ms a token", "sequences", "KV full", "prompts' time", "one less exceeds"]
    if plan.request.gpu_hour is not None:
        head[3:3] = ["an hour", "10^6 tokens"]
        title += f"; {plan.request.gpu_hour:g} an hour for a GPU, by generated tokens"
    title = textwrap.fill(title, WIDTH, subsequent_indent="  ")
    return f"{title}\n{render(head, [_cost(plan, row) for row in plan.rows if row.infeasible is None])}"


def _cost(plan: Plan, row: Row) -> list[str]:
    unpriced = ["-", "-"] if plan.request.gpu_hour is not None else []
    if row.cost is None:
        return [row.dtype, "-", "-", *unpriced, "-", "-", "-", "-", "speed not measured"]
    if row.cost.replicas is None:
        return [row.dtype, "none", "-", *unpriced, "-", "-", "-", "-", f"{row.cost.limit}, alone already"]
    at, hourly, tokens = row.cost.operating, plan.request.hourly(row.cost), plan.request.per_million(row.cost)
    return [
        row.dtype,
        f"{row.cost.replicas:,}",
        f"{row.cost.replicas * plan.request.all_gpus:,}",
        *([] if hourly is None or tokens is None else [f"{hourly:,.2f}", f"{tokens:,.3f}"]),
        f"{at.token_seconds * 1000:.1f}",
        f"{math.ceil(at.sequences):,}",
        f"{at.fill:.0%}",
        f"{at.prompt_share:.0%}",
        row.cost.limit or "",
    ]


def _notes(plan: Plan) -> list[str]:
    found = list(plan.notes)
    for row in plan.rows:
        found += [row.infeasible] if row.infeasible is not None else row.notes
    return [textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ") for note in found]


def document(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values. Keys are stable and contain the units, and counts are integers."""
    request, load = plan.request, plan.request.load
    return {
        "model": request.model.name,
        "gpu": request.gpu.name,
        "nodes": request.nodes,
        "gpus_per_replica": request.all_gpus,
        "weights_dtype": plan.weights_dtype,
        "memory_per_gpu": None
        if plan.memory is None
        else {
            "usable_bytes": plan.memory.usable,
            "weights_bytes": plan.memory.weights,
            "engine_bytes": plan.memory.engine,
        },
        "kv_bytes_per_gpu": plan.kv_bytes,
        "retention": None
        if request.bound is None
        else {
            "sink_tokens": request.bound.sinks,
            "window_tokens": request.bound.window,
            "budget_tokens": request.bound.budget,
        },
        "host_memory_bytes": request.host or None,
        "load": None
        if load is None
        else {
            "requests_per_second": load.requests_per_second,
            "prompt_tokens": load.prompt_tokens,
            "generated_tokens": load.generated_tokens,
            "max_microseconds_per_token": round(load.token_seconds * 1e6),
        },
        "dtypes": [_object(plan, row) for row in plan.rows],
        "notes": list(plan.notes),
    }


def _object(plan: Plan, row: Row) -> dict[str, Any]:
    if row.infeasible is not None:
        return {"dtype": row.dtype, "veto": row.infeasible}
    return {
        "dtype": row.dtype,
        "veto": None,
        "bits_per_element": row.bits,
        "bytes_per_token": row.token_bytes,
        "window_bytes_per_sequence": row.window_bytes,
        "recent_tokens": row.recent_tokens,
        "recent_bytes_per_sequence": row.recent_bytes,
        "capacities": _fitting(row.fits),
        "bounded": None
        if plan.request.bound is None
        else {"bytes_per_sequence": row.bounded_bytes, "capacities": _fitting(row.bounded)},
        "host_capacity_tokens": row.host_tokens,
        "notes": list(row.notes),
        "cost": None if row.cost is None else _figures(row.cost, plan.request),
    }


def _fitting(fits: tuple[Fit, ...]) -> list[dict[str, int]]:
    return [{"context_tokens": f.context, "capacity_tokens": f.tokens, "sequences": f.sequences} for f in fits]


def _figures(cost: Cost, request: Request) -> dict[str, Any]:
    if cost.replicas is None:
        return {"replicas": None, "gpus": None, "limit": cost.limit}
    at = cost.operating
    return {
        "replicas": cost.replicas,
        "gpus": cost.replicas * request.all_gpus,
        "limit": cost.limit,
        "microseconds_per_token": round(at.token_seconds * 1e6),
        "sequences_per_replica": math.ceil(at.sequences),
        "kv_fill_percent": round(at.fill * 100),
        "prompt_time_percent": round(at.prompt_share * 100),
        "per_hour_micros": _micros(request.hourly(cost)),
        "per_million_tokens_micros": _micros(request.per_million(cost)),
    }


def _micros(price: float | None) -> int | None:
    return None if price is None else round(price * 1e6)
