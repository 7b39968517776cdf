"""Find out the kind of each layer of a model, from lists in its config or from a rule for its config class."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvpilot_formats.models.architecture import Kind
from kvpilot_formats.models.config import MOST_LAYERS, ConfigError, Fields, shown

WORDS: dict[str, Kind] = {
    **dict.fromkeys(("full_attention", "attention", "global_attention"), Kind.FULL),
    **dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), Kind.FULL),
    **dict.fromkeys(("sliding_attention", "sliding_window", "local_attention"), Kind.WINDOW),
    "chunked_attention": Kind.CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent"), Kind.STATE),
    **dict.fromkeys(("mlp", "moe"), Kind.NONE),
}  # fmt: skip
"""Kinds of layers, by their names in transformers and in configs. Layers with other names have an unknown cache."""

HYBRID = "hybrid"
"""Name of a kind of layer that has both attention and a state."""
REPEATED = frozenset({"longcat_flash", "iquestloopcoder"})
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # Nemotron-H's hybrid_override_pattern


def kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer as one word: a key of `WORDS`, `hybrid`, or an unknown word."""
    if fields.built_as in REPEATED:
        return _repeated(fields)
    if fields.listed("compress_ratios") is not None:  # DeepSeek V4 caches windows and merged tokens
        return ["compressed_attention"] * fields.needed("num_hidden_layers", MOST_LAYERS)
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_PATTERN.get(letter, letter) for letter in pattern[:MOST_LAYERS]]
    # Configs use either name for this list. Without num_hidden_layers, its length is the number of layers.
    for field in ("layer_types", "layers_block_type"):
        found = fields.listed(field)
        if found is not None:
            layers = fields.size("num_hidden_layers", most=MOST_LAYERS) or len(found)
            # Some configs also list layers for multi-token prediction. These are not layers of the model, so leave them
            # out.
            return [_word(field, value) for value in _as_long(field, found, layers)]
    layers = fields.needed("num_hidden_layers", MOST_LAYERS)
    for listed in (_by_sparsity, _by_index, _by_flag, _by_block, _by_period):
        named = listed(fields, layers)
        if named is not None:
            return named
    return _by_class(fields, layers)


def _repeated(fields: Fields) -> list[str]:
    """Return one word per attention, for models whose layers attend several times, each time with its own cache."""
    if fields.built_as == "longcat_flash":  # LongCat's num_hidden_layers counts attentions, two per layer
        twice = 2 * fields.size("num_layers", most=MOST_LAYERS)
        return ["attention"] * (twice or fields.needed("num_hidden_layers", MOST_LAYERS))
    layers = fields.needed("num_hidden_layers", MOST_LAYERS)
    loops = fields.size("loop_num", most=MOST_LAYERS // layers) or 2
    return ["attention"] * layers + ["sliding_attention"] * layers * (loops - 1)


def _by_sparsity(fields: Fields, layers: int) -> list[str] | None:
    """Return the kinds of layers of MiniMax M3, in which some layers have sparse attention with an index."""
    sparse = fields.get("sparse_attention_config")
    if not isinstance(sparse, Mapping) or not sparse.get("use_sparse_attention"):
        return None
    chosen = sparse.get("sparse_attention_freq")
    flags = _as_long("sparse_attention_freq", chosen, layers) if isinstance(chosen, list) else [1] * layers
    return ["sparse_attention" if flag else "attention" for flag in flags]


def _by_index(fields: Fields, layers: int) -> list[str] | None:
    """Return the kinds of layers of a config that lists the numbers of its attention layers."""
    for field, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
        found = fields.listed(field)
        if found is not None:
            return _where(_indices(field, found), "attention", other, layers)
    linear = fields.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        numbers = _indices("linear_attn_config.full_attn_layers", linear["full_attn_layers"])
        return _where({n - 1 for n in numbers}, "attention", "linear_attention", layers)
    return None


def _by_flag(fields: Fields, layers: int) -> list[str] | None:
    """Return the kinds of layers of a config that marks each layer with 0 or another number."""
    for field, one, zero in (
        ("attn_type_list", "attention", "linear_attention"),
        ("hybrid_layer_pattern", "sliding_attention", "attention"),
        ("no_rope_layers", "chunked_attention", "attention"),
    ):
        if field == "no_rope_layers" and not fields.get("attention_chunk_size"):
            continue
        found = fields.listed(field)
        if found is not None:
            return [one if value else zero for value in _as_long(field, found, layers)]
    return None


def _by_block(fields: Fields, layers: int) -> list[str] | None:
    """Return the kinds of layers of repeated blocks (RecurrentGemma), or of blocks without attention (Nemotron-NAS)."""
    repeated = fields.listed("block_types")
    if repeated is not None:
        return [_word("block_types", repeated[i % len(repeated)]) for i in range(layers)]
    blocks = fields.listed("block_configs")
    if blocks is None:
        return None
    found = [block.get("attention") if isinstance(block, Mapping) else None for block in blocks]
    off = [isinstance(a, Mapping) and bool(a.get("no_op") or a.get("replace_with_linear")) for a in found]
    return ["mlp" if skipped else "attention" for skipped in _as_long("block_configs", off, layers)]


def _by_period(fields: Fields, layers: int) -> list[str] | None:
    """Return the kinds of layers of Jamba, in which every `attn_layer_period`-th layer has attention."""
    period, offset = fields.size("attn_layer_period"), fields.size("attn_layer_offset")
    if not period:
        return None
    return ["attention" if i % period == offset else "mamba" for i in range(layers)]


def _by_class(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of layers by the rule of the config class, for a config that does not list them."""
    rule = fields.kinds
    if "period" in rule:
        period: Sequence[str] = rule["period"]
        written = fields.get(rule["by"]) if "by" in rule else None
        if isinstance(written, str) and written and set(written) <= set("LG"):  # EXAONE writes a pattern such as LLLG
            period = ["sliding_attention" if letter == "L" else "attention" for letter in written]
            written = None
        length = 0 if written is None else Fields.checked(rule["by"], written, MOST_LAYERS)
        if length:
            # By the rule of the class, all of these layers but the first or the last are of one kind.
            odd, others = (0, 1) if rule["odd"] == 0 else (-1, 0)
            one, many = [period[odd]], [period[others]] * (length - 1)
            period = one + many if odd == 0 else many + one
        return [period[i % len(period)] for i in range(layers)]
    if "after" in rule:
        first = fields.size(rule["after"])
        return ["attention" if i < first else "sliding_attention" for i in range(layers)]
    length = fields.size("sliding_window_pattern", most=MOST_LAYERS)
    if length:
        return ["sliding_attention" if (i + 1) % length else "attention" for i in range(layers)]
    windowed = fields.size("sliding_window") and "none" not in rule
    return ["sliding_attention" if windowed else "attention"] * layers


def _word(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{field} in config.json holds {shown(value)}, which names no kind of layer; correct it or download the file again")  # fmt: skip  # noqa: E501
    return value


def _as_long(field: str, found: list[Any], layers: int) -> list[Any]:
    if len(found) < layers:
        raise ConfigError(f"{field} in config.json has {len(found)} entries and num_hidden_layers is {layers}; correct one of them or download the file again")  # fmt: skip  # noqa: E501
    return found[:layers]


def _indices(field: str, found: list[Any]) -> set[int]:
    return {Fields.checked(field, value) for value in found}


def _where(chosen: set[int], one: str, other: str, layers: int) -> list[str]:
    return [one if i in chosen else other for i in range(layers)]
