"""A plan for programs: stable keys with units in their names, and integers for counts."""

from __future__ import annotations

import math
from typing import Any

from kvpilot_cli.plan.load import Cost
from kvpilot_cli.plan.make import Fit, Plan, Request, Row


def document(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    request, load = plan.request, plan.request.load
    return {
        "model": request.model.name,
        "gpu": request.gpu.name,
        "gpus_per_replica": request.gpus,
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
        "dtypes": [_row(plan, row) for row in plan.rows],
        "notes": list(plan.notes),
    }


def _row(plan: Plan, row: Row) -> dict[str, Any]:
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
        "capacities": _capacities(row.fits),
        "bounded": None
        if plan.request.bound is None
        else {"bytes_per_sequence": row.bounded_bytes, "capacities": _capacities(row.bounded)},
        "host_capacity_tokens": row.host_tokens,
        "notes": list(row.notes),
        "cost": None if row.cost is None else _cost(row.cost, plan.request),
    }


def _capacities(fits: tuple[Fit, ...]) -> list[dict[str, int]]:
    return [{"context_tokens": f.context, "capacity_tokens": f.tokens, "sequences": f.sequences} for f in fits]


def _cost(cost: Cost, request: Request) -> dict[str, Any]:
    if cost.replicas is None:
        return {"replicas": None, "gpus": None, "limit": cost.limit}
    at = cost.operating
    return {
        "replicas": cost.replicas,
        "gpus": cost.replicas * request.gpus,
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
