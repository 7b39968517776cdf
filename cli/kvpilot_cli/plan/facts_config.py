"""Read the facts about a model from the config.json that transformers writes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpilot_cli.plan.facts import Model, PlanError, Published
from kvpilot_formats.models import Architecture, ConfigError, Group, Kind, load, read, weights
from kvpilot_formats.models.config import Fields

# Model types whose MLP has two matrices. All other models that vLLM supports have a gated MLP with three.
_PLAIN_MLP = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2"}
)


def read_folder(folder: Path) -> Model:
    """Return the facts in a folder's config.json, with the bytes of the weight files beside it."""
    try:
        raw = load(folder / "config.json")
    except ConfigError as error:
        hint = (
            "; give the folder of a Hugging Face model, or a name that `kvpilot plan --list` shows"
            if error.missing
            else ""
        )
        raise PlanError(f"MODEL {str(folder)!r}: {error}{hint}") from error
    return from_config(raw, str(folder), _weight_bytes(folder))


def _weight_bytes(folder: Path) -> int | None:
    try:
        return weights.weight_bytes(folder) or None
    except ConfigError as error:
        if error.missing:
            return None
        raise PlanError(f"MODEL {str(folder)!r}: {error}") from error


def from_config(raw: Mapping[str, Any], name: str, weight_bytes: int | None = None) -> Model:
    """Return the facts in a Hugging Face config. For a multimodal model they describe the text part."""
    try:
        return _model(raw, name, weight_bytes)
    except ConfigError as error:
        raise PlanError(f"MODEL {name!r}: {error}") from error


def _model(raw: Mapping[str, Any], name: str, weight_bytes: int | None) -> Model:
    found, fields = read(raw), Fields(raw)
    if found.encoder_decoder:
        raise PlanError(f"MODEL {name!r}: is_encoder_decoder is true; kvpilot plans decoder-only models")
    if found.other_layers:
        raise PlanError(
            f"MODEL {name!r}: {found.doubt}, so its tokens cannot be sized; start an engine: its log says how many fit"
        )
    full = [group for group in found.groups if group.kind is Kind.FULL]
    others = [group for group in found.groups if group.kind is not Kind.FULL]
    if len(full) > 1 or len(others) > 1:
        raise PlanError(
            f"MODEL {name!r}: config.json has layers with keys and values of different sizes; "
            "plan a model with equal layers"
        )
    if not found.groups:
        raise PlanError(f"MODEL {name!r}: config.json has no attention layers, and so no KV cache to plan")
    main, window = (full or others)[0], next(iter(others), None)
    hidden, published = fields.needed("hidden_size"), _published(raw)
    experts = fields.size("num_local_experts", "num_experts", "n_routed_experts")
    dense = fields.size("intermediate_size") or 4 * hidden
    model = Model(
        name=name,
        layers=found.layers,
        hidden=hidden,
        intermediate=dense,
        heads=found.heads,
        kv_heads=main.kv_heads,
        head_dim=main.head_dim,
        vocabulary=fields.needed("vocab_size"),
        tied_embeddings=bool(fields.anywhere("tie_word_embeddings")),
        max_positions=found.max_positions,
        parameters=None,
        source="config.json",
        sliding_layers=found.layers - found.full_layers,
        window=0 if window is None else window.window,
        experts=experts,
        experts_per_token=fields.size("num_experts_per_tok", "experts_per_token", "top_k_experts"),
        expert_intermediate=(fields.size("moe_intermediate_size") or dense) if experts else 0,
        dense_layers=fields.size("first_k_dense_replace") if experts else 0,
        latent_dim=found.latent,
        alibi=found.alibi,
        auto=found.auto,
        chunked=window is not None and window.kind is Kind.CHUNKED,
        window_kv_heads=_unlike(window, main, "kv_heads"),
        window_head_dim=_unlike(window, main, "head_dim"),
        value_dim=_unlike_value(main, found),
        state_layers=found.state_layers,
        shared_layers=found.shared_layers,
        published=published or "bfloat16",
        weight_bytes=weight_bytes,
        doubt=found.doubt,
    )
    if published is None and weight_bytes is None:
        method = raw["quantization_config"].get("quant_method")
        unknown = f"quantization_config.quant_method in config.json is {method!r}: size unknown without the weights"
        return replace(model, uncounted=unknown)
    return _counted(model, fields)


def _unlike(window: Group | None, main: Group, field: str) -> int:
    value = 0 if window is None else int(getattr(window, field))
    return 0 if value == getattr(main, field) else value


def _unlike_value(main: Group, found: Architecture) -> int:
    return 0 if found.latent or main.value_dim == main.head_dim else main.value_dim


def _published(raw: Mapping[str, Any]) -> Published | None:
    """Return the format of the weights, or None if config.json does not give their size."""
    scheme = raw.get("quantization_config")
    if not isinstance(scheme, Mapping):
        return "bfloat16"
    method = scheme.get("quant_method")
    if method in ("fp8", "mxfp4"):
        return "fp8" if method == "fp8" else "mxfp4"
    if method in ("awq", "gptq") and (scheme.get("bits") or scheme.get("w_bit")) == 4:
        return "int4"
    return None


def _counted(model: Model, fields: Fields) -> Model:
    """Return the model with its number of parameters: those of matrices and routers, without norms and biases.

    Models with latent attention, state layers or unequal layers have other shapes, so their parameters are not counted.
    """
    unlike = model.window_kv_heads or model.window_head_dim or model.value_dim or model.shared_layers
    if model.latent_dim or model.state_layers or unlike:
        return model
    matrices = 2 if fields.model_type in _PLAIN_MLP else 3
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    moe_layers = model.layers - model.dense_layers if model.experts else 0
    shared = fields.size("n_shared_experts") * model.expert_intermediate or fields.size(
        "shared_expert_intermediate_size"
    )
    mlp = (model.layers - moe_layers) * matrices * model.hidden * model.intermediate
    moe = model.expert_parameters + moe_layers * model.hidden * (model.experts + 3 * shared)
    total = model.embedding_parameters + model.layers * attention + mlp + moe
    return replace(model, parameters=total)
