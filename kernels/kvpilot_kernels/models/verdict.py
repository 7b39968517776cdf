"""What keeps a KV-cache dtype of ours from a model. vLLM's own dtypes are for vLLM to judge."""

from __future__ import annotations

from kvpilot_kernels import formats
from kvpilot_kernels.latent.formats import ENTRY, RANK
from kvpilot_kernels.models.architecture import Architecture, Kind

MOST_QUERY_HEADS = 16
"""Query heads that may share a KV head on a GPU: what the kernels multiply at once."""


def unsupported(model: Architecture, gpu: bool, ranks: int = 1) -> str | None:
    """What our dtypes do not support in this model, or None.

    `ranks` are those of tensor parallelism, and `gpu` says whether it is to be served on one.
    """
    ours = [group for group in model.groups if group.kind is not Kind.WINDOW]
    sizes = {size for group in ours for size in (group.head_dim, group.value_dim)}
    odd = sorted(sizes - set(formats.HEAD_DIMS))
    sharing = -(-model.heads // ranks) // max(1, model.kv_heads // ranks)
    found = (
        (model.latent, "multi-head latent attention"),
        (model.encoder_decoder, "encoder-decoder models"),
        (model.alibi, "ALiBi"),
        (gpu and model.sinks, "attention sinks on a GPU"),
        (model.bidirectional, "attention to later tokens (a bidirectional model)"),
        (not model.layers and not model.other_layers, "a model without attention: there is no KV cache to quantize"),
        (model.other_layers, "layers whose cache is neither keys and values nor a state"),
        (model.layers and not ours, "a model whose layers all have a sliding window: they stay in 16 bits"),
        (odd, f"head_dim {odd[-1] if odd else 0} (it takes {', '.join(map(str, formats.HEAD_DIMS))})"),
        (len(sizes) > 1 and _unlike_values(model), "keys and values of different sizes"),
        (gpu and model.shared_layers, f"{model.shared_layers} layers that use another layer's KV cache on a GPU"),
        (
            gpu and sharing > MOST_QUERY_HEADS,
            f"{sharing} query heads to a KV head on a GPU (it takes {MOST_QUERY_HEADS})",
        ),
    )
    return next((what for present, what in found if present), None)


def unsupported_latent(model: Architecture) -> str | None:
    """What our dtypes of multi-head latent attention do not support in this model, or None."""
    found = (
        (not model.latent, "a model without multi-head latent attention"),
        (model.index_bytes, "sparse attention with an index, as in DeepSeek V3.2"),
        (
            model.latent != ENTRY,
            f"entries of {model.latent} elements (they take {ENTRY}: {RANK} of a latent, {ENTRY - RANK} with RoPE)",
        ),
        (
            model.state_layers or model.layers != model.full_layers or model.other_layers,
            "layers with states or windows beside those with latents",
        ),
    )
    return next((what for present, what in found if present), None)


def _unlike_values(model: Architecture) -> bool:
    return any(group.kind is Kind.FULL and group.value_dim != group.head_dim for group in model.groups)
