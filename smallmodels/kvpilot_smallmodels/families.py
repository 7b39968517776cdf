"""Models of two to four layers with seeded random weights, one for each kind of attention.

The models are so small that an engine and plain transformers answer hundreds of requests in seconds. They have no
tokenizer, so requests are token ids.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Recipe for a model.

    Attributes:
        config: the config class in transformers.
        fields: fields of its config.
        filled: constant values of some weights, by the suffix of their names. With random values there, attention would
            be uniform.
        skip: layers that stay in 16 bits.
    """

    config: str
    fields: dict[str, Any]
    filled: dict[str, float] = field(default_factory=dict)
    skip: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "plain": Family(
        "LlamaConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "shared-kv-head": Family(  # 32 query heads per KV head
        "LlamaConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64},
    ),
    "gemma2": Family(
        "Gemma2Config",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256,
         "query_pre_attn_scalar": 256, "attn_logit_softcapping": 20.0, "sliding_window": WINDOW,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"post_attention_layernorm.weight": 30.0}, ("sliding_window",),
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
         "tie_word_embeddings": False,
         "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"sinks": 3.0}, ("sliding_window",),
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256,
         "num_kv_shared_layers": 2, "sliding_window": WINDOW, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 16, "intermediate_size": [256] * 4,
         "activation_sparsity_pattern": [0.0] * 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"post_attention_layernorm.weight": 8.0}, ("sliding_window",),
    ),
    # like Gemma 4 E2B: full layers have 8 query heads of 512 elements per KV head, and some layers share caches
    "gemma4": Family(
        "Gemma4TextConfig",
        {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
         "global_head_dim": 512, "num_kv_shared_layers": 2, "sliding_window": WINDOW, "use_double_wide_mlp": True,
         "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"q_norm.weight": 0.2, "post_attention_layernorm.weight": 20.0}, ("sliding_window",),
    ),
    "gemma4-26b": Family(  # full layers use keys as values, and have fewer KV heads
        "Gemma4TextConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
         "global_head_dim": 512, "attention_k_eq_v": True, "num_global_key_value_heads": 2, "sliding_window": WINDOW,
         "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]},
        {"q_norm.weight": 0.2, "post_attention_layernorm.weight": 20.0}, ("sliding_window",),
    ),
    "llama-4": Family(  # no experts; three of four layers attend within chunks, and requests are longer than a chunk
        "Llama4TextConfig",
        {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
         "intermediate_size_mlp": 256, "moe_layers": [], "interleave_moe_layer_step": 0,
         "attention_chunk_size": WINDOW // 2},
    ),
    "granite-4": Family(
        "GraniteMoeHybridConfig",
        {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 0,
         "num_experts_per_tok": 0, "shared_intermediate_size": 256, "hidden_size": 256,
         "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16,
         "mamba_chunk_size": 16, "position_embedding_type": "nope", "attention_multiplier": 0.125},
    ),
    "qwen2": Family(  # also covers Qwen2.5: a bias of keys and queries gives some channels a large mean
        "Qwen2Config",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256},
        {"q_proj.bias": 0.5, "k_proj.bias": 2.0},
    ),
    "qwen3": Family(  # normalized queries and keys
        "Qwen3Config",
        {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "phi3": Family(
        "Phi3Config",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 384},
    ),
    "stablelm": Family(  # heads of 80 elements, a quarter of them with RoPE
        "StableLmConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 320},
    ),
    "heads-of-192": Family(
        "LlamaConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 192},
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256,
         "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        # Gemma scales embeddings up and normalizes queries and keys. With plain random weights it only repeats itself.
        {"post_attention_layernorm.weight": 8.0, "q_norm.weight": 1.5, "k_norm.weight": 1.5}, ("sliding_window",),
    ),
    "lfm2": Family(  # most layers are convolutions
        "Lfm2Config",
        {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256,
         "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"],
         "initializer_range": 0.1, "conv_dim": 256, "block_dim": 256},
        {"q_layernorm.weight": 2.0, "k_layernorm.weight": 2.0},
    ),
    "nemotron-h": Family(
        "NemotronHConfig",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
         "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
         "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16,
         "tie_word_embeddings": False},
    ),
    "qwen3-next": Family(  # gated linear attention, and a gate after attention
        "Qwen3NextConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256,
         "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "tie_word_embeddings": False},
        {"q_norm.weight": 1.0, "k_norm.weight": 1.0},  # the model adds 1 to these weights
    ),
}  # fmt: skip


def make(
    name: str, folder: Path, change: Callable[[Any], None] = lambda _model: None, *, kind: str | None = None,
    fields: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write the model of a family to a folder, and return the folder.

    Args:
        change: function that modifies the model before it is written.
        kind: config class to use instead of the family's.
        fields: fields of the config that replace those of the family.
    """
    import torch
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, kind or family.config)(**{**_COMMON, **family.fields, **(fields or {})})
    torch.manual_seed(20260101)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        for ending, value in family.filled.items():
            if name.endswith(ending):
                weight.data.fill_(value)
    change(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
