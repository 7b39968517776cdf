"""Shapes of models for the engine benchmark. Each shape becomes a `config.json`, which is used with dummy weights.

The time of a step depends only on the shape, so no checkpoint is needed. Some shapes simplify the model, but keep its
attention. A mixture of experts becomes a dense FFN as wide as its active experts. One of eight tensor-parallel ranks
becomes a model with an eighth of the heads, FFN and vocabulary.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Shape of a model: number of layers, query heads and KV heads, head_dim, and widths. It determines step times."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    architecture: str = "LlamaForCausalLM"
    others: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json to add or to replace."""

    def config(self, layers: int, max_model_len: int) -> dict[str, Any]:
        """Return the content of config.json for a model of this shape with `layers` layers."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3" if self.architecture.startswith("Qwen3") else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": max_model_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **self.others,
        }


def latent(layers: int, heads: int, nope: int, value: int, hidden: int, vocab: int, **others: Any) -> Shape:
    """Return a shape with multi-head latent attention: DeepSeek V2's architecture, with DeepSeek-V2-Lite's MoE."""
    fields = {
        "model_type": "deepseek_v2", "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64, "v_head_dim": value, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "rope_theta": 10000.0, **others,
    }  # fmt: skip
    return Shape(layers, heads, heads, 64, hidden, 10944, vocab, "DeepseekV2ForCausalLM", fields)


SHAPES = {
    "llama3-8b": Shape(32, 32, 8, 128, 4096, 14336, 128256),
    "llama3-70b-tp8-share": Shape(80, 8, 1, 128, 8192, 3584, 16032),
    "llama3-70b-16-layers": Shape(16, 64, 8, 128, 8192, 28672, 128256),
    "qwen3-30b-a3b": Shape(48, 32, 4, 128, 2048, 6144, 151936, "Qwen3ForCausalLM"),
    "phi3-mini": Shape(32, 32, 32, 96, 3072, 8192, 32064),
    # With more layers, 32 x 16K tokens in 16 bits would not fit in one H200.
    "hd256": Shape(16, 16, 8, 256, 3584, 14336, 128256),
    "deepseek-v2-lite": latent(27, 16, 128, 128, 2048, 102400),
    # GLM's own class needs a hidden size that is a multiple of the number of heads, so use the class of DeepSeek V2.
    "glm-4.7-flash": latent(47, 20, 192, 256, 1920, 154880, q_lora_rank=768, num_experts_per_tok=4, n_shared_experts=1),
    "tiny": Shape(2, 4, 2, 64, 128, 256, 4096),
}


def write(folder: Path, shape: Shape, layers: int, max_model_len: int) -> Path:
    """Write the model folder of a shape, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(layers, max_model_len), indent=1))
    return folder
