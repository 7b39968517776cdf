"""What rules a KV-cache dtype out for a model on a GPU, and what else should be known of it."""

from __future__ import annotations

from kvpilot_kernels import dtypes, models
from kvpilot_operator.decide.judging.ladder import hardware_fault
from kvpilot_operator.gpus import Gpu
from kvpilot_operator.state.snapshot import NodeFacts
from kvpilot_planning.facts import Model

_LATENT = ("fp8", "fp8_e4m3")  # of vLLM's own dtypes below 16 bits


def infeasible(model: Model, dtype: str, gpu: Gpu) -> str | None:
    """Why this dtype cannot serve the model there, or None.

    Raises:
        UnknownFormatError: no dtype has this name.
    """
    stored = dtypes.parse(dtype)
    if (refusal := hardware_fault(dtype, NodeFacts(gpu.name, gpu.compute_capability))) is not None:
        return refusal
    if not stored.ours:
        latent = model.latent_dim and stored.bits_per_element() < 16 and dtype not in _LATENT
        return (
            f"{dtype} does not serve multi-head latent attention in vLLM; use one of {', '.join(_LATENT)}"
            if latent
            else None
        )
    refusal = (models.unsupported_latent if stored.latent else models.unsupported)(model.architecture)
    return None if refusal is None else f"{dtype} does not support {refusal}"


def notes(model: Model, dtype: str) -> tuple[str, ...]:
    """What to know of a dtype that is not ruled out."""
    found = []
    if dtype.startswith("fp8") and model.head_dim >= 256:
        found.append(
            f"{dtype} at head_dim {model.head_dim} decodes slower than 16 bits (docs/benchmarks/h200-decode.md)"
        )
    return tuple(found)
