"""Reading the facts of a model from its config.json, as Hugging Face's transformers writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpilot_planning.facts import Model, PlanError, Published

# model_type of decoders whose layers are all alike, but for windows: what is read from their config.json is what they
# are. Others are read in the same way, and the answer says so.
_KNOWN = frozenset({
    "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "internlm2", "llama", "minimax_m2", "ministral", "mistral",
    "mixtral", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip

# Fields of models whose layers differ in more than a window: states of Mamba and linear attention, chunks, compressed
# or shared caches, layers of different shapes.
_UNLIKE_LAYERS = (
    "attention_chunk_size", "block_configs", "compress_ratios", "full_attention_interval",
    "global_head_dim", "hybrid_layer_pattern", "hybrid_override_pattern", "linear_attn_config", "mamba_d_state",
    "num_kv_shared_layers", "ssm_state_size",
)  # fmt: skip

# Models with a plain MLP of two matrices; all others that vLLM serves have a gated one, of three.
_PLAIN_MLP = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2"}
)


def read_folder(folder: Path) -> Model:
    """The facts in a folder's config.json, with the size of the safetensors beside it.

    Raises:
        PlanError: there is no config.json, it is no JSON object, or a field is missing or no positive integer.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise PlanError(f"MODEL {str(folder)!r}: the folder has no config.json; give the folder of a Hugging Face model, or a name that `kvpilot plan --list` shows") from None  # fmt: skip  # noqa: E501
    except (OSError, ValueError) as error:
        raise PlanError(f"MODEL {str(folder)!r}: config.json cannot be read ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise PlanError(f"MODEL {str(folder)!r}: config.json holds no object; download it again")
    # Some folders hold the weights twice: as model-*.safetensors, and consolidated in the publisher's own layout.
    parts = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    return from_config(raw, str(folder), sum(part.stat().st_size for part in parts) or None)


def from_config(raw: Mapping[str, Any], name: str, weight_bytes: int | None = None) -> Model:
    """The facts of a Hugging Face config; of a model with images, those of its text part.

    Raises:
        PlanError: a field is missing or no positive integer.
    """
    config = _Fields(raw, name)
    kind = str(config.get("model_type") or "")
    if raw.get("is_encoder_decoder"):
        raise PlanError(f"MODEL {name!r}: is_encoder_decoder is true; kvpilot plans decoder-only models")
    _only_attention(config, name)
    layers = config.number("num_hidden_layers", "n_layer")
    heads = config.number("num_attention_heads", "n_head")
    hidden = config.number("hidden_size", "n_embd")
    limit = config.optional("max_position_embeddings", "n_positions") or None
    sliding, window = _sliding(config, layers, limit)
    experts = config.optional("num_local_experts", "num_experts", "n_routed_experts")
    dense = config.optional("intermediate_size", "n_inner") or 4 * hidden
    latent = config.optional("kv_lora_rank")
    model = Model(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=dense,
        heads=heads,
        kv_heads=config.optional("num_key_value_heads") or heads,
        head_dim=config.optional("head_dim") or hidden // heads,
        vocabulary=config.number("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        max_positions=limit,
        parameters=None,
        source="config.json",
        sliding_layers=sliding,
        window=window,
        experts=experts,
        experts_per_token=config.optional("num_experts_per_tok", "experts_per_token"),
        expert_intermediate=(config.optional("moe_intermediate_size") or dense) if experts else 0,
        dense_layers=config.optional("first_k_dense_replace") if experts else 0,
        latent_dim=latent + config.optional("qk_rope_head_dim") if latent else 0,
        sinks=kind == "gpt_oss",
        published=_published(raw, name, weight_bytes is not None),
        weight_bytes=weight_bytes,
        doubt="" if kind in _KNOWN else f"model_type {kind!r} is not known here, and was read as a plain decoder",
    )
    return _counted(model, kind, config)


class _Fields:
    """A config's fields, the text part's first."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        text = raw.get("text_config")
        self._parts = (text, raw) if isinstance(text, Mapping) else (raw,)
        self._name = name

    def get(self, field: str, default: Any = None) -> Any:
        return next((part[field] for part in self._parts if part.get(field) is not None), default)

    def optional(self, *names: str) -> int:
        """The first of these fields that is there, or 0."""
        for field in names:
            value = self.get(field)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise PlanError(f"MODEL {self._name!r}: {field} in config.json is {value!r}, which is no size; correct it or download the file again")  # fmt: skip  # noqa: E501
            return value
        return 0

    def number(self, *names: str) -> int:
        """As `optional`, and it must be there and positive."""
        value = self.optional(*names)
        if not value:
            raise PlanError(f"MODEL {self._name!r}: config.json has no {names[0]}; add it, or give the config.json of a decoder")  # fmt: skip  # noqa: E501
        return value


def _only_attention(config: _Fields, name: str) -> None:
    """Refuse layers that keep something else than keys and values of one size."""
    kinds = config.get("layer_types")
    other = (
        {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"} if isinstance(kinds, list) else set()
    )
    found = [f"{', '.join(sorted(other))} in layer_types"] if other else []
    found += [field for field in _UNLIKE_LAYERS if config.get(field)]
    kinds = config.get("attn_type_list")
    found += ["a 0 in attn_type_list"] if isinstance(kinds, list) and 0 in kinds else []
    if found:
        raise PlanError(f"MODEL {name!r}: config.json has {found[0]}, so its layers do not all keep the same keys and values; plan a model whose layers all attend, to all tokens or to a window")  # fmt: skip  # noqa: E501


def _sliding(config: _Fields, layers: int, limit: int | None) -> tuple[int, int]:
    """Layers with a window, and the window in tokens; a window as long as the longest context is none."""
    window = config.optional("sliding_window")
    if not window or config.get("use_sliding_window") is False or (limit is not None and window >= limit):
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        count = kinds.count("sliding_attention")
    else:
        # Gemma 2 alternates and Gemma 3 has one full layer in six; their older configs do not say so.
        every = config.optional("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(
            str(config.get("model_type")), 0
        )
        count = layers - layers // every if every else layers
    return (count, window) if count else (0, 0)


def _published(raw: Mapping[str, Any], name: str, weights_found: bool) -> Published:
    scheme = raw.get("quantization_config")
    if not isinstance(scheme, Mapping):
        return "bfloat16"
    method = scheme.get("quant_method")
    if method in ("fp8", "mxfp4"):
        return "fp8" if method == "fp8" else "mxfp4"
    if method in ("awq", "gptq") and (scheme.get("bits") or scheme.get("w_bit")) == 4:
        return "int4"
    if weights_found:
        return "bfloat16"
    raise PlanError(f"MODEL {name!r}: quantization_config.quant_method in config.json is {method!r}, whose size is unknown without the weights; put them beside it, or remove the field and give --weights-gb")  # fmt: skip  # noqa: E501


def _counted(model: Model, kind: str, config: _Fields) -> Model:
    """The model with its parameters counted from the shapes: matrices and routers, without norms and biases.

    Latent attention has shapes of its own, and is left uncounted.
    """
    if model.latent_dim:
        return model
    matrices = 2 if kind in _PLAIN_MLP else 3
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    moe_layers = model.layers - model.dense_layers if model.experts else 0
    shared = config.optional("n_shared_experts") * model.expert_intermediate or config.optional(
        "shared_expert_intermediate_size"
    )
    mlp = (model.layers - moe_layers) * matrices * model.hidden * model.intermediate
    moe = model.expert_parameters + moe_layers * model.hidden * (model.experts + 3 * shared)
    total = model.embedding_parameters + model.layers * attention + mlp + moe
    values = {field: getattr(model, field) for field in Model.__dataclass_fields__}
    return Model(**{**values, "parameters": total})
