"""Write the defaults of transformers' config classes for fields that a config.json leaves out.

    .venv/bin/python scripts/model_defaults.py formats/kvpilot_formats/models/defaults.json

The script instantiates the classes instead of parsing their source. It makes each config with the defaults, and with
other pattern lengths and windows. From the kinds of layers in these configs it derives the rule by which `layers.py`
computes the kind of each layer.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
sys.modules["torch"] = None  # type: ignore[assignment]  # configurations need none, and it takes seconds to load

import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: E402

FIELDS = (
    "alibi", "attention_chunk_size", "attention_head_dim", "attention_k_eq_v", "attn_layer_offset",
    "attn_layer_period", "attn_logit_softcapping", "block_types", "decoder_attention_heads", "decoder_layers",
    "first_k_dense_replace", "head_dim", "hidden_size", "index_head_dim", "index_topk", "intermediate_size",
    "kv_lora_rank", "max_position_embeddings", "max_target_positions", "max_window_layers", "moe_intermediate_size",
    "multi_query", "n_routed_experts", "n_shared_experts", "new_decoder_architecture", "num_attention_heads",
    "num_decoder_layers", "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_kv_shared_layers", "num_local_experts", "qk_nope_head_dim", "qk_rope_head_dim",
    "shared_expert_intermediate_size", "sliding_window", "tie_word_embeddings", "use_sliding_window", "v_head_dim",
    "vocab_size",
)  # fmt: skip
"""Config fields that kvpilot reads and that have a default in a class."""

LENGTHS = ("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers", "no_rope_layer_interval")
"""Config fields that may set the number of layers after which the kinds of layers repeat."""
STATES = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
LAYERS = 24


def row(kind: str) -> dict[str, Any] | None:
    """Return the entry of one model_type, or None if its models have no decoder."""
    cls = CONFIG_MAPPING[kind]
    try:
        config = cls()
        text = config.get_text_config(decoder=True)
    except Exception:
        return None
    part = next((n for n in cls.sub_configs if _holds(getattr(config, n, None), text)), None)
    if part is not None:
        return {"text": [part, getattr(config, part).model_type]}
    named = {"num_attention_heads", "num_hidden_layers"} <= {*cls.attribute_map, *(f.name for f in fields(cls))}
    if not named and kind not in STATES and not hasattr(config, "layers_block_type"):
        return None
    found: dict[str, Any] = {"defaults": _defaults(cls, config)}
    if names := {canonical: own for canonical, own in cls.attribute_map.items() if canonical in FIELDS}:
        found["names"] = names
    if rule := _rule(kind, cls):
        found["kinds"] = rule
    return found


def _holds(part: Any, text: Any) -> bool:
    within = isinstance(part, PreTrainedConfig) and any(getattr(part, n, None) is text for n in part.sub_configs)
    return part is text or within


def _defaults(cls: type[PreTrainedConfig], config: Any) -> dict[str, Any]:
    declared = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    found = {}
    for field in FIELDS:
        value = declared.get(field, declared.get(cls.attribute_map.get(field, "")))
        if value is not None and isinstance(value, bool | int | float | tuple | list):
            found[field] = list(value) if isinstance(value, tuple) else value
    if getattr(config, "is_heterogeneous", False):
        # In some classes, only the config of each layer shows that full-attention layers have another head_dim.
        full = [c for c, k in zip(config.per_layer_config, config.layer_types, strict=True) if k == "full_attention"]
        if full and full[0].head_dim != declared.get("head_dim"):
            found["global_head_dim"] = full[0].head_dim
    return dict(sorted(found.items()))


def _made(cls: type[PreTrainedConfig], **arguments: Any) -> list[str] | None:
    """Create a config with these arguments. Return the kind of each layer, or None if the config lists no kinds."""
    try:
        config: Any = cls(**arguments)
    except Exception:
        return None
    for field in ("layer_types", "layers_block_type"):
        found = getattr(config, field, None)
        if isinstance(found, list | tuple) and found:
            return [str(word) for word in found]
    return None


def _rule(kind: str, cls: type[PreTrainedConfig]) -> dict[str, Any] | None:
    if kind in STATES:
        return {"period": ["linear_attention"]}
    known = {f.name for f in fields(cls)}
    base: dict[str, Any] = {"num_hidden_layers": LAYERS}
    base |= {"sliding_window": 128} if "sliding_window" in known else {}
    base |= {"use_sliding_window": True} if "use_sliding_window" in known else {}
    made = _made(cls, **base)
    if made is None or len(made) != LAYERS:
        return None
    if "max_window_layers" in known:
        after = _made(cls, **base, max_window_layers=5)
        if after == ["full_attention"] * 5 + ["sliding_attention"] * (LAYERS - 5):
            return {"after": "max_window_layers"}
    if set(made) == {"full_attention"}:
        # Some classes have a window but do not use it.
        return {"none": True} if "sliding_window" in known else None
    period = next((made[:n] for n in range(1, 9) if all(made[i] == made[i % n] for i in range(LAYERS))), None)
    if period is None:
        # If the kinds of layers do not repeat, there is no rule. The configs of such models list the kinds.
        return {"period": ["unnamed"]}
    rule: dict[str, Any] = {"period": period}
    for field in LENGTHS:
        for odd in (0, -1):
            # Try the value 7. The field sets the period if the layers then repeat every seven, and only the first
            # (odd = 0) or the last (odd = -1) of the seven is of the other kind.
            seven = [period[1 if odd == 0 else 0]] * 7 if len(period) > 1 else period * 7
            seven[odd] = period[odd]
            if len(set(period)) == 2 and _made(cls, **base, **{field: 7}) == [seven[i % 7] for i in range(LAYERS)]:
                rule |= {"by": field, "odd": odd}
    return rule


def table() -> Mapping[str, Any]:
    """Return the entry of each model_type that has a decoder, sorted by model_type."""
    rows = {kind: row(kind) for kind in sorted(CONFIG_MAPPING)}
    return {kind: found for kind, found in rows.items() if found}


def main() -> None:
    """Write the defaults of every config class to the file that the command line names."""
    lines = [f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in table().items()]
    body = ",\n".join(lines)
    text = f'{{"transformers": "{transformers.__version__}", "models": {{\n{body}\n}}}}\n'
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
