"""Checkpoints whose linear layers are quantized, and the same weights dequantized, in 16 bits.

They are written from the formats' descriptions, without the usual tools. An engine with the first folder computes the
same as plain transformers with the second, up to rounding (and, if activations have 8 bits, up to theirs).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
"""Elements of a weight's row that share a scale, in formats of 4 bits."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column in each nibble of a group of eight, from the lowest."""

Tensors = dict[str, torch.Tensor]


def _packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight codes of 4 bits of the last dimension into an int32."""
    eights = codes.long().view(*codes.shape[:-1], -1, 8)[..., list(order)]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize as compressed-tensors W8A8: one scale per output, symmetric."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize symmetrically, 8 is zero; codes are packed along the inputs."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(2, keepdim=True) / 7).half()
    codes = (groups / scale.float()).round().clamp(-8, 7)
    stored = {
        "qweight": _packed((codes + 8).flatten(1)).T.contiguous(),
        "qzeros": _packed(torch.full((scale.shape[1], weight.shape[0]), 7)),  # the format has one less than zero's code
        "scales": scale[..., 0].T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return stored, (codes * scale.float()).flatten(1)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize with zero points; codes are packed along the outputs."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float() + zero).round().clamp(0, 15)
    stored = {
        "qweight": _packed(codes.flatten(1).T, _AWQ_ORDER),
        "qzeros": _packed(zero[..., 0].T, _AWQ_ORDER),
        "scales": scale[..., 0].T.contiguous(),
    }
    return stored, ((codes - zero) * scale.float()).flatten(1)


_EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
METHODS: dict[str, tuple[Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "compressed-tensors": (_int8, {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {**_EIGHT, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT, "strategy": "token", "dynamic": True}, "output_activations": None,
        }},
    }),
    "gptq": (_gptq, {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False,
    }),
    "awq": (_awq, {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    }),
}  # fmt: skip


def make(method: str, model: Path, quantized: Path, read_back: Path) -> None:
    """Write `model` with its projections quantized, and dequantized."""
    quantize, said = METHODS[method]
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = weight
            continue
        parts, back = quantize(weight.float())
        stored |= {name.removesuffix("weight") + part: x for part, x in parts.items()}
        plain[name] = back
    for folder, what, more in ((quantized, stored, {"quantization_config": said}), (read_back, plain, {})):
        shutil.copytree(
            model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True
        )
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        save_file({name: x.contiguous() for name, x in what.items()}, folder / "model.safetensors", {"format": "pt"})
