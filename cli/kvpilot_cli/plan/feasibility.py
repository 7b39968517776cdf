"""Reasons against a KV-cache dtype for a model on a GPU, and notes about it."""

from __future__ import annotations

from kvpilot_cli.plan.facts import Model
from kvpilot_formats import dtypes, hardware, models
from kvpilot_operator.gpus import Gpu


def infeasible(model: Model, dtype: str, gpu: Gpu) -> str | None:
    """Return the reason why this dtype cannot serve the model there, or None.

    Raises:
        UnknownFormatError: no dtype has this name.
    """
    stored, latent = dtypes.parse(dtype), bool(model.latent_dim)
    fault = hardware.gpu_fault(dtype, gpu.compute_capability, model.head_dim, latent)
    if fault is not None:
        return f"{dtype} {fault}; {gpu.name} has {hardware.shown(gpu.compute_capability)}"
    if not stored.ours:
        unserved = hardware.latent_fault(dtype) if latent else None
        return None if unserved is None else f"{dtype} {unserved}"
    refusal = (models.unsupported_latent if stored.latent else models.unsupported)(model.architecture)
    return None if refusal is None else f"{dtype} does not support {refusal}"


def notes(model: Model, dtype: str) -> tuple[str, ...]:
    """Return notes about a dtype that is not ruled out."""
    found = []
    if dtype.startswith("fp8") and model.head_dim >= 256:
        found.append(
            f"{dtype} at head_dim {model.head_dim} decodes slower than 16 bits (docs/benchmarks/h200-decode.md)"
        )
    return tuple(found)
