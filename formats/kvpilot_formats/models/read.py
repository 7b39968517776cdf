"""Read a config.json, and return an `Architecture` with the layers that vLLM would build."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpilot_formats.models.architecture import Architecture, Group, Kind
from kvpilot_formats.models.config import MOST_LAYERS, ConfigError, Fields, shown, text_of
from kvpilot_formats.models.layers import HYBRID, REPEATED, WORDS, kinds

LATENT = frozenset({
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "glm4_moe_lite", "glm5_next",
    "glm5_next_text", "glm_moe_dsa", "hy_v4", "kimi_k2", "kimi_linear", "longcat_flash", "pangu_ultra_moe",
})  # fmt: skip
"""model_types for which vLLM caches latents if the config has a kv_lora_rank.

For other types, vLLM expands the latents to keys and values, and caches keys and values.
"""

_ALIBI = frozenset({"bloom", "mpt"})
_INDEX_SCALE_BYTES = 4  # vLLM keeps an index (sparse attention) in fp8 with a float32 scale
_INDEXED = "index_topk"
_LARGEST_CAP = 1e6  # a cap as large as this has no effect on logits
_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_LEGACY_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


def read(raw: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Hugging Face config describes. For a multimodal model, read its text part."""
    fields = Fields(raw)
    crossed = bool(raw.get("is_encoder_decoder")) or fields.model_type in ("whisper",)
    words = _decoder(fields) if crossed else kinds(fields)
    limit = fields.size("max_position_embeddings", "max_target_positions") or None
    window, idle = _window(fields, limit)
    chunk = fields.size("attention_chunk_size")
    own, shared = _sharing(fields, words)
    counted: Counter[Group] = Counter()
    for index, word in enumerate(own):
        kind = Kind.FULL if word == HYBRID else WORDS.get(word, Kind.OTHER)
        if (kind is Kind.WINDOW and not window) or (kind is Kind.CHUNKED and not chunk):
            kind = Kind.FULL
        if kind in (Kind.FULL, Kind.WINDOW, Kind.CHUNKED):
            reach = {Kind.WINDOW: window, Kind.CHUNKED: chunk}.get(kind, 0)
            counted[_group(fields, index, kind, reach, crossed)] += 1
    state = sum(word == HYBRID or WORDS.get(word) is Kind.STATE for word in words)
    other = sorted({word for word in own if word != HYBRID and word not in WORDS})
    latent = _latent(fields)
    return Architecture(
        model_type=text_of(raw.get("model_type")) or fields.model_type,
        architectures=_architectures(raw),
        groups=tuple(replace(group, layers=count) for group, count in _in_order(counted)),
        heads=_heads(fields, crossed) if counted else 0,
        state_layers=state,
        shared_layers=shared,
        other_layers=sum(word in other for word in own),
        latent=latent,
        auto=auto_dtype(raw, bool(latent)),
        index_bytes=fields.size("index_head_dim") + _INDEX_SCALE_BYTES if fields.size(_INDEXED) else 0,
        softcap=_softcap(fields),
        alibi=fields.model_type in _ALIBI or fields.get("alibi") is True,
        encoder_decoder=crossed,
        bidirectional=fields.get("is_causal") is False or fields.get("use_bidirectional_attention") in (True, "all"),
        custom_code="auto_map" in raw,
        max_positions=limit,
        idle_window=idle and any(WORDS.get(word) is Kind.WINDOW for word in own),
        element_bytes=_element_bytes(fields),
        doubt=_doubt(fields, other),
    )


def _doubt(fields: Fields, other: list[str]) -> str:
    if other:
        words = ", ".join(shown(word) for word in other[:4])
        return f"layers of {words} keep a cache that is not known here, and were not counted"
    if fields.known or fields.model_type in LATENT or fields.built_as in REPEATED:
        return ""
    return f"model_type {shown(fields.model_type)} is not known here, and was read as a plain decoder"


def _decoder(fields: Fields) -> list[str]:
    layers = fields.size("decoder_layers", "num_decoder_layers", most=MOST_LAYERS)
    return ["attention"] * (layers or fields.needed("num_hidden_layers", MOST_LAYERS))


def _window(fields: Fields, limit: int | None) -> tuple[int, bool]:
    """Return the sliding window in tokens (0 for none), and True if the window is idle.

    A window is idle if no context is longer than it. Its size is then returned as 0.
    """
    window = fields.size("sliding_window", "sliding_window_size")
    if fields.built_as == "iquestloopcoder":
        window = fields.size("loop_window_size") or 64
    elif fields.model_type in ("cohere2", "cohere2_moe"):
        window += bool(window)  # this config's window leaves out the query's own token
    if fields.get("use_sliding_window") is False:
        return 0, False
    idle = bool(window) and limit is not None and window >= limit
    return 0 if idle else window, idle


def _sharing(fields: Fields, words: list[str]) -> tuple[list[str], int]:
    """Return the kinds of layers with their own cache, and how many later layers read another layer's cache."""
    shared = fields.size("num_kv_shared_layers", most=MOST_LAYERS)
    if shared >= len(words):
        if shared:
            raise ConfigError(f"num_kv_shared_layers in config.json is {shared} of {len(words)} layers; correct one of them or download the file again")  # fmt: skip  # noqa: E501
        return words, 0
    return words[: len(words) - shared], shared


def _heads(fields: Fields, crossed: bool = False) -> int:
    if crossed and (heads := fields.size("decoder_attention_heads")):
        return heads
    return fields.needed("num_attention_heads")


def _group(fields: Fields, index: int, kind: Kind, window: int, crossed: bool) -> Group:
    """Return a group that consists of one layer."""
    heads = _heads(fields, crossed)
    head_dim = fields.size("head_dim", "attention_head_dim", "kv_channels")
    # In models with latent attention, head_dim may be the size of the RoPE part, which does not describe a cache.
    if fields.size("kv_lora_rank") and (nope := fields.size("qk_nope_head_dim")):
        head_dim = nope + fields.size("qk_rope_head_dim")
    if not head_dim:
        head_dim = fields.needed("hidden_size") // heads
    kv_heads = _kv_heads(fields, heads, index)
    # If vLLM expands the latents (MiniCPM3), it pads values to the size of keys.
    unfolded = fields.size("kv_lora_rank") and fields.model_type not in LATENT
    value_dim = (0 if unfolded else fields.size("v_head_dim")) or head_dim
    if kind is Kind.WINDOW:
        kv_heads = fields.size("swa_num_key_value_heads") or kv_heads
        head_dim, value_dim = fields.size("swa_head_dim") or head_dim, fields.size("swa_v_head_dim") or value_dim
    elif fields.size("global_head_dim"):
        head_dim = value_dim = fields.size("global_head_dim")
        if fields.get("attention_k_eq_v"):
            kv_heads = fields.size("num_global_key_value_heads") or kv_heads
    if not head_dim:
        raise ConfigError(f"hidden_size in config.json is {shown(fields.get('hidden_size'))} for {heads} heads, which leaves nothing for each; correct one of them or download the file again")  # fmt: skip  # noqa: E501
    if not fields.size("kv_lora_rank") and kind is Kind.FULL and heads % kv_heads:
        raise ConfigError(f"num_attention_heads in config.json is {heads} and num_key_value_heads {kv_heads}, which does not divide it; correct one of them or download the file again")  # fmt: skip  # noqa: E501
    return Group(kind, 1, kv_heads, head_dim, value_dim, window)


def _kv_heads(fields: Fields, heads: int, index: int) -> int:
    """Return the number of KV heads of a layer, from the field that this class of model uses."""
    blocks = fields.listed("block_configs")
    if blocks is not None and index < len(blocks) and isinstance(blocks[index], Mapping):
        attention = blocks[index].get("attention")
        if isinstance(attention, Mapping):
            grouped = attention.get("n_heads_in_group")
            if grouped:
                return max(1, heads // Fields.checked("block_configs.attention.n_heads_in_group", grouped))
    # In older Falcon models, this field has the number of query heads, although these models have one KV head.
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        return 1
    if fields.get("multi_query_attention") is True:  # a field of ChatGLM
        return fields.size("multi_query_group_num") or heads
    nested = fields.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):  # a nested field of DBRX
        return Fields.checked("attn_config.kv_n_heads", nested["kv_n_heads"])
    listed = fields.get("num_key_value_heads")
    if isinstance(listed, list) and index < len(listed):
        return Fields.checked("num_key_value_heads", listed[index]) or heads
    return fields.size("num_key_value_heads") or heads


def _softcap(fields: Fields) -> float | None:
    value = fields.get("attn_logit_softcapping")
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST_CAP
    return float(value) if usable else None


def _latent(fields: Fields) -> int:
    rank = fields.size("kv_lora_rank")
    return rank + fields.size("qk_rope_head_dim") if rank and fields.model_type in LATENT else 0


def _element_bytes(fields: Fields) -> int:
    """Return the bytes of an element in the model's own dtype. vLLM serves float32 checkpoints in 16 bits, too."""
    dtype = str(fields.anywhere("dtype") or fields.anywhere("torch_dtype"))
    return 1 if "float8" in dtype else 2


def _in_order(counted: Counter[Group]) -> list[tuple[Group, int]]:
    order = [Kind.FULL, Kind.WINDOW, Kind.CHUNKED]
    return sorted(counted.items(), key=lambda item: (order.index(item[0].kind), -item[1], -item[0].kv_heads))


def _architectures(raw: Mapping[str, Any]) -> tuple[str, ...]:
    found = raw.get("architectures")
    if found is not None and not (isinstance(found, list) and all(isinstance(name, str) for name in found)):
        raise ConfigError(f"architectures in config.json is {shown(found)}, but must be a list of class names; correct it or download the file again")  # fmt: skip  # noqa: E501
    return tuple(found or ())


def auto_dtype(raw: Mapping[str, Any], latent: bool = False) -> str:
    """Return the dtype that vLLM 0.32 uses for `auto`. Return `auto` if this is the model's own dtype.

    A checkpoint may request a quantized cache. `raw` is a config.json as `load` returns it, with the content of
    hf_quant_config.json as quantization_config. With `latent` attention, ignore schemes of compressed-tensors.
    """
    scheme = _part(raw, "quantization_config")
    if _by_modelopt(scheme):
        return _of_modelopt(scheme)
    scheme = scheme or _part(raw, "compression_config") or _part(_part(raw, "text_config"), "quantization_config")
    method = str(scheme.get("quant_method")).lower()
    if (
        method in ("compressed-tensors", "compressed_tensors")
        and scheme.get("kv_cache_scheme") is not None
        and not latent
    ):
        return "fp8"
    return "auto"


def _by_modelopt(scheme: Mapping[str, Any]) -> bool:
    if str(scheme.get("quant_method")).lower().startswith("modelopt"):
        return True
    # ModelOpt before 0.31 wrote its settings to a separate file, which does not name the method.
    inner = _part(scheme, "quantization")
    written = _part(scheme, "producer").get("name") == "modelopt" or "modelopt_quant_config" in inner
    return written and str(inner.get("quant_algo")).upper() in _LEGACY_ALGORITHMS


def _of_modelopt(scheme: Mapping[str, Any]) -> str:
    inner = _part(scheme, "quantization") or scheme
    fields = ("kv_cache_scheme", "kv_cache_quant_algo")
    found = next((part[field] for field in fields for part in (inner, scheme) if part.get(field)), None)
    if isinstance(found, Mapping):
        bits = found.get("num_bits") if found.get("type") == "float" else None
        found = "fp8" if bits == 8 and found.get("dynamic") is False else "nvfp4" if bits == 4 else None
    return _MODELOPT.get(found.lower(), "auto") if isinstance(found, str) else "auto"


def _part(raw: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = raw.get(field)
    return value if isinstance(value, Mapping) else {}
