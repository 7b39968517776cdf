"""Properties of models that our KV-cache dtypes do not support. For its own dtypes, vLLM decides."""

from __future__ import annotations

from kvpilot_formats import formats
from kvpilot_formats.latent import ENTRY, RANK
from kvpilot_formats.models.architecture import Architecture, Kind


def unsupported(model: Architecture) -> str | None:
    """Name the property of this model that our dtypes do not support, or return None."""
    ours = [group for group in model.groups if group.kind is not Kind.WINDOW]
    sizes = {size for group in ours for size in (group.head_dim, group.value_dim)}
    odd = sorted(size for size in sizes if formats.stored_dim(size) is None)
    found = (
        (model.latent, "multi-head latent attention"),
        (model.encoder_decoder, "encoder-decoder models"),
        (model.alibi, "ALiBi"),
        (model.bidirectional, "attention to later tokens (a bidirectional model)"),
        (not model.layers and not model.other_layers, "a model without attention: there is no KV cache to quantize"),
        (model.other_layers, "layers whose cache is neither keys and values nor a state"),
        (model.layers and not ours, "a model whose layers all have a sliding window: they stay in 16 bits"),
        (odd, f"head_dim {odd[-1] if odd else 0} (it takes {formats.SERVED})"),
        (len(sizes) > 1 and _unlike_values(model), "keys and values of different sizes"),
    )
    return next((what for present, what in found if present), None)


def unsupported_latent(model: Architecture) -> str | None:
    """Name the property of this model that our latent dtypes do not support, or return None."""
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


def unsupported_bounded(model: Architecture) -> str | None:
    """Name the property of this model that bounded caches do not support, or return None."""
    found = (
        (model.latent, "multi-head latent attention"),
        (model.encoder_decoder, "an encoder-decoder model"),
        (model.alibi, "a model with ALiBi"),
        (model.bidirectional or model.image_prefix, "attention to later tokens"),
        (any(group.kind is Kind.CHUNKED for group in model.groups), "a model with chunked attention"),
        (model.window_layers, f"a model with {model.window_layers} sliding-window layers"),
        (model.state_layers or model.other_layers, "a model with layers of another kind than attention"),
        (model.shared_layers, f"a model with {model.shared_layers} layers that use another layer's KV cache"),
    )
    return next((what for present, what in found if present), None)


def _unlike_values(model: Architecture) -> bool:
    return any(group.kind is Kind.FULL and group.value_dim != group.head_dim for group in model.groups)
