"""For a model of unknown type, preflight uses the layers that vLLM itself builds."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot_runtime.preflight import machine, vllm_layers
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
CODE = '''
from transformers import Gemma2Config


class BrandNewConfig(Gemma2Config):
    """A class that gives every other layer a window of which config.json says nothing."""

    model_type = "brand_new"
'''


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])


def folder(path: Path, config: dict[str, Any], code: str = "") -> str:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.bin").write_bytes(b"0")
    if code:
        (path / "configuration_brand_new.py").write_text(code)
    return str(path)


def test_loop_coder_keeps_the_windows_of_its_further_passes_in_16_bits(tmp_path: Path) -> None:
    findings = check(Request(folder(tmp_path, LOOP_CODER), "k4v4", others=("--trust-remote-code",), max_model_len=4096))
    assert findings.skip_layers == ("sliding_window",)
    assert findings.config is not None
    assert (findings.config.full_layers, findings.config.window_layers) == (80, 80)
    assert findings.warnings == []


def test_layers_of_a_type_that_is_not_known_are_those_that_vllm_builds(tmp_path: Path) -> None:
    model = folder(tmp_path, {**SHAPE, "architectures": ["Gemma2ForCausalLM"], "model_type": "brand_new"}, CODE)
    findings = check(Request(model, "k4v4", others=("--trust-remote-code",), max_model_len=1024))
    assert findings.config is not None
    assert [(g.kind.value, g.layers, g.window) for g in findings.config.groups] == [("full", 2, 0), ("window", 2, 4096)]
    assert findings.skip_layers == ("sliding_window",)
    assert [reason for reason, _ in findings.warnings] == ["ModelNotKnown"]


def test_a_model_that_vllm_does_not_build_here_is_warned_about_and_skips_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder(tmp_path, {**SHAPE, "architectures": ["Gemma2ForCausalLM"], "model_type": "brand_new"}, "oh no")
    findings = check(Request(model, "k4v4", others=("--trust-remote-code",), max_model_len=1024))
    assert [reason for reason, _ in findings.warnings] == ["ModelNotKnown", "ModelNotBuilt"]
    assert "SyntaxError" in findings.warnings[1][1]
    assert findings.skip_layers == ("sliding_window",)
    monkeypatch.setattr(vllm_layers, "ask", lambda _: pytest.fail("vLLM's own dtypes are for vLLM to judge"))
    assert check(Request(model, "auto", others=("--trust-remote-code",), max_model_len=1024)).skip_layers == ()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([["FullAttentionSpec", 8, 24, 24, 0, 192, 4]], "head_dim 24"),
        ([["FullAttentionSpec", 8, 128, 64, 0, 3072, 4]], "keys and values of different sizes"),
        ([["SlidingWindowSpec", 8, 128, 128, 64, 4096, 4]], "all have a sliding window"),
        ([["CircularBufferSpec", 0, 0, 0, 0, 0, 4]], "neither keys and values nor a state"),
        ([["FullAttentionSpec", 8, 128, 128, 0, 4096, 4], ["CrossAttentionSpec", 8, 128, 128, 0, 4096, 4]],
         "encoder-decoder"),
        ([["MLAAttentionSpec", 1, 576, 576, 0, 1152, 4], ["MLAAttentionSpec", 1, 128, 128, 0, 256, 4]],
         "neither keys and values nor a state"),
    ],
)  # fmt: skip
def test_what_vllm_says_of_a_cache_refuses_our_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[list[Any]], said: str
) -> None:
    monkeypatch.setattr(vllm_layers, "ask", lambda _: ({"groups": groups, "shared": 0}, ""))
    model = folder(tmp_path, {**SHAPE, "architectures": ["Gemma2ForCausalLM"], "model_type": "brand_new"}, CODE)
    with pytest.raises(Exception, match=said):
        check(Request(model, "k4v4", others=("--trust-remote-code",), max_model_len=1024))
