"""Draft models for a small random model: a noisy copy of it, and heads of one layer with random weights.

The drafts of random heads are wrong, but an engine runs random heads in the same way as trained ones.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def _drawn(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 0.1).bfloat16()


def _layer(prefix: str, config: dict[str, Any], inputs: int = 1, *, biased: bool = False) -> dict[str, torch.Tensor]:
    """Return random weights of a decoder layer by name.

    Args:
        prefix: beginning of the weights' names.
        config: the model's config.json.
        inputs: number of concatenated hidden states that the layer reads.
        biased: True for biases of queries, keys and values.
    """
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * dim, config["num_key_value_heads"] * dim
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    found = {f"{prefix}self_attn.{name}.weight": _drawn(size, inputs * hidden) for name, size in sizes.items()}
    if biased:
        found |= {f"{prefix}self_attn.{name}.bias": _drawn(size) for name, size in sizes.items()}
    found |= {
        f"{prefix}self_attn.o_proj.weight": _drawn(hidden, queries),
        f"{prefix}mlp.gate_proj.weight": _drawn(inner, hidden), f"{prefix}mlp.up_proj.weight": _drawn(inner, hidden),
        f"{prefix}mlp.down_proj.weight": _drawn(hidden, inner),
        **_ones(hidden, f"{prefix}post_attention_layernorm.weight"),
    }  # fmt: skip
    return found


def _ones(size: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(size).bfloat16() for name in names}


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def shaken(model: Path, folder: Path, by: float = 0.02) -> Path:
    """Write a copy of the model with noise on all weights but the embedding. Some of its drafts are right."""
    torch.manual_seed(1)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if "embed" not in name:
            weight += (torch.randn(weight.shape) * by * weight.float().std()).to(weight.dtype)
    return _save(folder, json.loads((model / "config.json").read_text()), weights)


def eagle(model: Path, folder: Path) -> Path:
    """Write an EAGLE head: one layer that reads the model's last hidden state."""
    torch.manual_seed(2)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    hidden = config["hidden_size"]
    return _save(folder, config, {"fc.weight": _drawn(hidden, 2 * hidden), **_layer("layers.0.", config)})


def eagle3(model: Path, folder: Path) -> Path:
    """Write an EAGLE-3 head: one layer that reads the hidden states of three layers of the model."""
    torch.manual_seed(3)
    config = json.loads((model / "config.json").read_text())
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    config |= {
        "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocabulary,
        "tie_word_embeddings": False, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }  # fmt: skip
    weights = {
        "fc.weight": _drawn(hidden, 3 * hidden), "lm_head.weight": _drawn(vocabulary, hidden),
        **_layer("midlayer.", config, 2),
        **_ones(hidden, "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight"),
    }  # fmt: skip
    return _save(folder, config, weights)


def with_mtp(model: Path, folder: Path) -> Path:
    """Write a Qwen2 model as a MiMo model, with a random layer that predicts a second token (MTP)."""
    torch.manual_seed(4)
    config = json.loads((model / "config.json").read_text()) | {
        "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
    }  # fmt: skip
    hidden, layer = config["hidden_size"], "model.mtp_layers.0."
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    weights = {
        **load_file(model / "model.safetensors"), f"{layer}input_proj.weight": _drawn(hidden, 2 * hidden),
        **_layer(layer, config, biased=True), **_ones(hidden, *(f"{layer}{name}.weight" for name in names)),
    }  # fmt: skip
    return _save(folder, config, weights)
