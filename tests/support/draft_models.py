"""Small models that draft for one of `support.families`, and what stands in for their skill, which random weights lack.

`right_drafts` runs what vLLM's proposer runs, KV cache and all, and puts the expected tokens in place of its drafts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.families import VOCABULARY

HIDDEN, INNER, DIM = 128, 256, 64
"""Of the models that are drafted for."""


def _drawn(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 0.1).bfloat16()


def _layer(
    prefix: str, config: dict[str, Any], inputs: int = HIDDEN, *, biased: bool = False
) -> dict[str, torch.Tensor]:
    """A decoder layer's weights, with random values."""
    queries, keys = config["num_attention_heads"] * DIM, config["num_key_value_heads"] * DIM
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    found = {f"{prefix}self_attn.{name}.weight": _drawn(size, inputs) for name, size in sizes.items()}
    if biased:
        found |= {f"{prefix}self_attn.{name}.bias": _drawn(size) for name, size in sizes.items()}
    found |= {
        f"{prefix}self_attn.o_proj.weight": _drawn(HIDDEN, queries),
        f"{prefix}mlp.gate_proj.weight": _drawn(INNER, HIDDEN), f"{prefix}mlp.up_proj.weight": _drawn(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": _drawn(HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN).bfloat16(),
    }  # fmt: skip
    return found


def _ones(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(HIDDEN).bfloat16() for name in names}


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def shaken(model: Path, folder: Path, by: float = 0.02) -> Path:
    """The model with some noise on all weights but the embedding: it drafts right now and then."""
    torch.manual_seed(1)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if "embed" not in name:
            weight += (torch.randn(weight.shape) * by * weight.float().std()).to(weight.dtype)
    return _save(folder, json.loads((model / "config.json").read_text()), weights)


def eagle(model: Path, folder: Path) -> Path:
    """An EAGLE head: one layer over the model's last state."""
    torch.manual_seed(2)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    return _save(folder, config, {"fc.weight": _drawn(HIDDEN, 2 * HIDDEN), **_layer("layers.0.", config)})


def eagle3(model: Path, folder: Path) -> Path:
    """An EAGLE-3 head: one layer over the states of three of the model's layers."""
    torch.manual_seed(3)
    config = json.loads((model / "config.json").read_text()) | {
        "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY,
        "tie_word_embeddings": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }  # fmt: skip
    weights = {
        "fc.weight": _drawn(HIDDEN, 3 * HIDDEN), "lm_head.weight": _drawn(VOCABULARY, HIDDEN),
        **_layer("midlayer.", config, 2 * HIDDEN),
        **_ones("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight"),
    }  # fmt: skip
    return _save(folder, config, weights)


def with_mtp(model: Path, folder: Path) -> Path:
    """A model of Qwen2 as one of MiMo, which is the same and a layer that predicts a token more (MTP)."""
    torch.manual_seed(4)
    config = json.loads((model / "config.json").read_text()) | {
        "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
    }  # fmt: skip
    layer = "model.mtp_layers.0."
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    weights = {
        **load_file(model / "model.safetensors"), f"{layer}input_proj.weight": _drawn(HIDDEN, 2 * HIDDEN),
        **_layer(layer, config, biased=True), **_ones(*(f"{layer}{name}.weight" for name in names)),
    }  # fmt: skip
    return _save(folder, config, weights)


def right_drafts(expected: list[list[int]]) -> None:
    """Let this process's drafts be taken from these sequences, prompts with answers; in a third of them one is wrong.

    vLLM's proposer runs as it is before, with all that it stores.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock, before, choose = SpecDecodeBaseProposer.propose, GPUModelRunner.propose_draft_token_ids, random.Random(1)
    runners: list[Any] = []

    def of_runner(self: Any, *args: Any, **kwargs: Any) -> Any:
        runners[:] = [self]
        return before(self, *args, **kwargs)

    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        common, taken_back = kwargs["common_attn_metadata"], kwargs["num_rejected_tokens_gpu"]
        stored = common.seq_lens[: common.num_reqs].clone()
        if taken_back is not None:
            stored -= taken_back
        drafts: torch.Tensor = stock(self, *args, **kwargs)
        for row, request in enumerate(runners[0].input_batch.req_ids):
            prompt = runners[0].requests[request].prompt_token_ids
            whole = next(each for each in expected if each[: len(prompt)] == prompt)
            right = whole[int(stored[row]) + 1 :][: drafts.shape[1]]
            if right and choose.random() < 0.3:
                right[choose.randrange(len(right))] = choose.randrange(3, VOCABULARY)
            drafts[row, : len(right)] = torch.tensor(right, dtype=drafts.dtype)
        return drafts

    SpecDecodeBaseProposer.propose, GPUModelRunner.propose_draft_token_ids = propose, of_runner
