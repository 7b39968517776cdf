"""What rules a KV-cache dtype out for a model on a GPU, and what else should be known of it."""

from __future__ import annotations

from kvpilot_kernels import formats
from kvpilot_operator.decide.judging.feasibility import hardware_fault
from kvpilot_operator.decide.judging.gpus import Gpu
from kvpilot_operator.state.snapshot import NodeFacts
from kvpilot_planning.facts import Model
from kvpilot_planning.plan_capacity import kv_heads_per_gpu

MOST_QUERY_HEADS = 16
"""Query heads that may share a KV head in our GPU kernels (docs/serving.md)."""


def veto(model: Model, dtype: str, gpu: Gpu, gpus: int) -> str | None:
    """Why this dtype cannot serve the model there, or None.

    Raises:
        UnknownFormatError: no dtype has this name.
    """
    stored = formats.parse(dtype)
    if (refusal := hardware_fault(dtype, NodeFacts(gpu.name, gpu.compute_capability))) is not None:
        return refusal
    if model.latent_dim and stored.bits_per_element() < 16:
        return f"{dtype} does not support multi-head latent attention, which has formats of its own"
    if not stored.ours:
        return None
    if model.sinks:
        return f"{dtype} does not support attention sinks"
    if not model.full_layers:
        return f"{dtype}: all layers have a sliding window and stay in 16 bits, so there is nothing to gain"
    if model.head_dim not in formats.HEAD_DIMS:
        return f"{dtype} does not support head_dim {model.head_dim} (it takes {', '.join(map(str, formats.HEAD_DIMS))})"
    sharing = -(-model.heads // gpus) // kv_heads_per_gpu(model, gpus)
    if sharing > MOST_QUERY_HEADS:
        return f"{dtype} does not support {sharing} query heads to a KV head (it takes {MOST_QUERY_HEADS})"
    return None


def notes(model: Model, dtype: str) -> tuple[str, ...]:
    """What to know of a dtype that is not ruled out."""
    found = []
    if formats.parse(dtype).calibrated_only:
        found.append(f"{dtype} needs a calibration of the model (kvpilot calibrate)")
    if dtype.startswith("fp8") and model.head_dim >= 256:
        found.append(
            f"{dtype} at head_dim {model.head_dim} decodes slower than 16 bits (docs/benchmarks/h200-decode.md)"
        )
    return tuple(found)
