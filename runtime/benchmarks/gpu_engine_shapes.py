"""Model shapes for the engine benchmark: a `config.json` each, served with dummy weights.

A step's time depends on shapes alone, so no checkpoint is needed. Dense stand-ins keep the attention shape of models
whose other parts do not matter here: a mixture of experts becomes a dense FFN of its active width, and the share of
one GPU in eight under tensor parallelism becomes a model of an eighth of the heads, FFN and vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Layers, query heads / KV heads / head_dim, and the widths that set the rest of a step's time."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    architecture: str = "LlamaForCausalLM"

    def config(self, layers: int, max_model_len: int) -> dict[str, Any]:
        """The content of config.json with `layers` layers."""
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
        }


SHAPES = {
    "llama3-8b": Shape(32, 32, 8, 128, 4096, 14336, 128256),
    "llama3-70b-tp8-share": Shape(80, 8, 1, 128, 8192, 3584, 16032),
    "llama3-70b-16-layers": Shape(16, 64, 8, 128, 8192, 28672, 128256),
    "qwen3-30b-a3b": Shape(48, 32, 4, 128, 2048, 6144, 151936, "Qwen3ForCausalLM"),
    # 16 layers: with more, 32 x 16K tokens in 16 bits would not fit one H200.
    "hd256": Shape(16, 16, 8, 256, 3584, 14336, 128256),
    "tiny": Shape(2, 4, 2, 64, 128, 256, 4096),
}


def write(folder: Path, shape: Shape, layers: int, max_model_len: int) -> Path:
    """Write the model folder of a shape and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(layers, max_model_len), indent=1))
    return folder
