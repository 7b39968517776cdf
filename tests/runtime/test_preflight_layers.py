"""Preflight keeps layers with a window in 16 bits, also those of a model whose type it does not know."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.request import Request

LOOP_CODER = {
    "architectures": ["IQuestLoopCoderForCausalLM"], "model_type": "iquestloopcoder", "head_dim": 128,
    "hidden_size": 5120, "intermediate_size": 27648, "loop_num": 2, "loop_window_size": 64,
    "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "vocab_size": 76800, "torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "configuration_loop.LoopConfig"},
}  # fmt: skip
SHAPE = {
    "head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 128, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_brand_new.BrandNewConfig"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])


def folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.bin").write_bytes(b"0")
    return str(path)


def test_window_layers_in_the_later_passes_of_a_looped_model_stay_in_16_bits(tmp_path: Path) -> None:
    findings = check(Request(folder(tmp_path, LOOP_CODER), "k4v4", others=("--trust-remote-code",), max_model_len=4096))
    assert findings.skip_layers == ("sliding_window",)
    assert findings.config is not None
    assert (findings.config.full_layers, findings.config.window_layers) == (80, 80)
    assert findings.warnings == []


def test_a_model_of_unknown_type_is_warned_about_and_skips_windows(tmp_path: Path) -> None:
    model = folder(tmp_path, {**SHAPE, "architectures": ["Gemma2ForCausalLM"], "model_type": "brand_new"})
    findings = check(Request(model, "k4v4", others=("--trust-remote-code",), max_model_len=1024))
    assert [reason for reason, _ in findings.warnings] == ["ModelNotKnown"]
    assert findings.skip_layers == ("sliding_window",)
    assert check(Request(model, "auto", others=("--trust-remote-code",), max_model_len=1024)).skip_layers == ()
