"""Random LoRA adapter for a small model, and the same model with the adapter merged into its weights."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def make(model: Path, adapter: Path, merged: Path) -> None:
    """Write an adapter of the query, key and value projections to one folder, and the merged model to another."""
    shutil.copytree(model, merged, dirs_exist_ok=True)
    weights = {name: w.float() for name, w in load_file(merged / "model.safetensors").items()}
    rng, parts = torch.Generator().manual_seed(4), dict[str, torch.Tensor]()
    for name in [n for n in weights if n.removesuffix(".weight").endswith(_PROJECTIONS)]:
        out, into = weights[name].shape
        a, b = torch.randn(RANK, into, generator=rng) / 8, torch.randn(out, RANK, generator=rng) / 4
        weights[name] += b @ a * (ALPHA / RANK)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        parts |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir(parents=True, exist_ok=True)
    save_file(parts, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": list(_PROJECTIONS), "base_model_name_or_path": "m",
    }))  # fmt: skip
