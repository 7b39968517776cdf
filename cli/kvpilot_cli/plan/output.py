"""Output of a plan: tables of at most 120 columns for people, and JSON for programs."""

import math
import textwrap
from collections.abc import Callable, Sequence

import msgspec

from kvpilot_cli.plan.load import FILL, Load
from kvpilot_cli.plan.make import Plan, Row
from kvpilot_cli.text_tables import render

WIDTH = 120


def text(plan: Plan) -> str:
    """Return the whole plan as text."""
    parts = [_head(plan), _capacities(plan)]
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
        usable, weights, engine = (
            f"{part / 1e9:,.1f}"
            for part in (plan.memory.usable_bytes, plan.memory.weights_bytes, plan.memory.engine_bytes)
        )
        lines.append(
            f"each GPU: {request.gpu.memory_mib:,} MiB x {request.utilization:g} = {usable} GB, less "
            f"weights ({plan.weights_dtype}) {weights} and engine {engine}: {kv}"
        )
    seconds = [row.gate_seconds for row in plan.rows if row.gate_seconds is not None]
    if seconds:
        through = ", with loads through its KV connector" if request.connector else ""
        at = f"{plan.contexts[-1]:,} tokens{through}"
        lines.append(f"accuracy gate of a canary at {at}: at most about {max(seconds):,} s")
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def _table(plan: Plan, head: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> str:
    """Return a table with a line for each dtype, and dashes for a dtype that cannot serve the model."""
    nothing = ["-"] * (len(head) - 1)
    return render(head, [[row.dtype, *(nothing if row.veto is not None else cells(row))] for row in plan.rows])


def _capacities(plan: Plan) -> str:
    base = next((row.capacities[-1].capacity_tokens for row in plan.rows if row.dtype == "auto" and not row.veto), 0)
    at = [f"at {c:,}" for c in plan.contexts]

    def cells(row: Row) -> list[str]:
        tokens = row.capacities[-1].capacity_tokens
        window = f"{row.recent_bytes_per_sequence / 1e6:,.1f}" if row.recent_bytes_per_sequence else "-"
        sizes = [f"{row.bits_per_element:g}", f"{row.bytes_per_token:,}", window, f"{tokens:,}"]
        ratio = f"{tokens / base:.2f}" if base else "-"
        return [*sizes, ratio, *(f"{fit.sequences:,}" for fit in row.capacities)]

    head = ["dtype", "bits", "bytes a token", "MB a window", "KV tokens", "x auto", *at]
    return f"Sequences that fit at once, by their tokens\n{_table(plan, head, cells)}"


def _costs(plan: Plan, load: Load) -> str:
    title = (
        f"Cost of {load.requests_per_second:g} requests/s, {load.prompt_tokens:,} prompt and {load.generated_tokens:,} "
        f"generated tokens, at most {load.token_seconds * 1000:g} ms a token, KV at most {FILL:.0%} full"
    )
    head = ["dtype", "replicas", "GPUs", "ms a token", "sequences", "KV full", "prompts' time", "one less exceeds"]
    title = textwrap.fill(title, WIDTH, subsequent_indent="  ")
    return f"{title}\n{render(head, [_cost(row) for row in plan.rows if row.veto is None])}"


def _cost(row: Row) -> list[str]:
    if row.cost is None:
        return [row.dtype, *["-"] * 6, "speed not measured"]
    if row.cost.replicas is None:
        return [row.dtype, "none", *["-"] * 5, f"{row.cost.limit}, alone already"]
    at = row.cost.operating
    return [
        row.dtype,
        f"{row.cost.replicas:,}",
        f"{row.cost.gpus:,}",
        f"{at.token_seconds * 1000:.1f}",
        f"{math.ceil(at.sequences):,}",
        f"{at.fill:.0%}",
        f"{at.prompt_share:.0%}",
        row.cost.limit or "",
    ]


def _notes(plan: Plan) -> list[str]:
    found = list(plan.notes)
    for row in plan.rows:
        found += [row.veto] if row.veto is not None else row.notes
    return [textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ") for note in found]


def as_json(plan: Plan) -> str:
    """Return the plan as JSON. Keys are stable and contain the units. Infinite numbers become null."""
    request = plan.request
    document = {
        "model": request.model.name,
        "gpu": request.gpu.name,
        "nodes": request.nodes,
        "gpus_per_replica": request.all_gpus,
        "weights_dtype": plan.weights_dtype,
        "memory_per_gpu": plan.memory,
        "kv_bytes_per_gpu": plan.kv_bytes,
        "load": request.load,
        "dtypes": plan.rows,
        "notes": plan.notes,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
