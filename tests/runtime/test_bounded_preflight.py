"""`--retention` in kvpilot-serve: valid values, incompatible options that it names, and the memory that it needs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvpilot_runtime import serve
from kvpilot_runtime.config import retention
from kvpilot_runtime.config.retention import SinksAndWindow
from kvpilot_runtime.errors import PreflightError, UnsupportedModelError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama

BOUND = "--retention=4:1024"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 32, "max_position_embeddings": 131072,
         "torch_dtype": "bfloat16"}  # fmt: skip
PHI = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "max_position_embeddings": 4096,
       "sliding_window": 262144}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "5 sliding-window layers": json.loads((tiny_gemma3() / "config.json").read_text()),
    "multi-head latent attention": {**LLAMA, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
                                    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                                    "v_head_dim": 128},
    "ALiBi": {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 2, "n_head": 4,
              "hidden_size": 256},
    "another kind than attention": {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(retention.VARIABLE, raising=False)
    monkeypatch.setattr(machine, "available_memory", lambda: 64 * 2**30)


def refusal(*arguments: str, model: str | None = None, dtype: str = "auto") -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        check(serve.parse([f"--model={model or tiny_llama()}", f"--kv-cache-dtype={dtype}", *arguments])[0])
    return caught.value


def folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.bin").write_bytes(b"0")
    return str(path)


UNREADABLE = pytest.mark.parametrize(
    "text", ["4", "4:", "0:64", "4:0", "4:-1", "4:64:1", "4:1k", "SinksAndWindow:4:64"]
)


@UNREADABLE
def test_a_bound_that_cannot_be_read_is_refused(text: str) -> None:
    error = refusal(f"--retention={text}")
    assert error.reason == "BadArguments"
    assert f"{text!r} is not a bound; write SINKS:WINDOW" in error.message


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--speculative-config.method=ngram", "-sc.num_speculative_tokens=2"), "speculative decoding"),
        (("--kv-offloading-size=1",), "--kv-offloading-size"),
        (("--kv-transfer-config={}",), "KV transfer"),
        (("-dcp=2",), "decode context parallelism"),
        (("--kv-sharing-fast-prefill",), "fast prefill"),
        (("--enable-dbo",), "dual batch overlap"),
        (("--kv-cache-dtype-skip-layers=sliding_window,0",), "--kv-cache-dtype-skip-layers 0"),
        (("--recent-tokens=64",), "--recent-tokens 64 (the recent window)"),
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "k4v4"])
def test_what_does_not_go_with_a_bound_is_refused_by_name(arguments: tuple[str, ...], word: str, dtype: str) -> None:
    error = refusal(BOUND, *arguments, dtype=dtype)
    assert error.reason == "BadArguments"
    assert word in error.message
    assert "leave" in error.message


@pytest.mark.parametrize("what", OTHERS)
def test_a_model_that_a_bound_does_not_serve_is_refused_by_what_is_in_the_way(what: str, tmp_path: Path) -> None:
    error = refusal(BOUND, model=folder(tmp_path, OTHERS[what]))
    assert error.reason == "ModelUnsupported"
    assert what in error.message
    assert "--retention 4:1024" in error.message


def test_dtypes_of_latents_are_refused() -> None:
    assert "kv-cache dtype 'mla4'" in refusal(BOUND, dtype="mla4").message


def test_a_request_needs_memory_for_what_it_keeps_alone(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA)
    pool = "--kv-cache-memory-bytes=256M"  # 2,048 tokens in 16 bits
    assert "one request of 131072 tokens needs" in refusal(pool, model=model).message
    check(serve.parse([f"--model={model}", pool, BOUND])[0])
    error = refusal(pool, "--retention=4:2048", model=model)
    assert error.reason == "DoesNotFit"
    assert "for the 2303 tokens that it keeps" in error.message
    assert "make the window of --retention smaller" in error.message


def test_a_window_that_no_context_leaves_is_said_to_be_of_no_effect() -> None:
    found = check(serve.parse([f"--model={tiny_llama()}", BOUND, "--max-model-len=512"])[0])
    assert [reason for reason, _ in found.warnings] == ["RetentionUnused"]
    assert not check(serve.parse([f"--model={tiny_llama()}", BOUND, "--max-model-len=2048"])[0]).warnings


def test_layers_that_the_model_has_not_may_be_skipped_as_the_operator_asks_for() -> None:
    check(serve.parse([f"--model={tiny_llama()}", "--kv-cache-dtype=k4v4", BOUND,
                       "--kv-cache-dtype-skip-layers=sliding_window"])[0])  # fmt: skip


def test_a_window_of_the_models_own_that_no_context_leaves_is_switched_off(tmp_path: Path) -> None:
    model = folder(tmp_path, PHI)
    assert check(serve.parse([f"--model={model}", BOUND])[0]).disable_window
    assert not check(serve.parse([f"--model={model}"])[0]).disable_window


def test_the_engine_is_told_by_its_environment_and_reads_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: started.append((command, environment)))
    serve.main([f"--model={tiny_llama()}", BOUND])
    monkeypatch.setenv(retention.VARIABLE, "8:512")
    serve.main([f"--model={tiny_llama()}"])
    serve.main([f"--model={tiny_llama()}", "--retention="])
    told = [environment[retention.VARIABLE] for _, environment in started]
    assert told == ["4:1024", "8:512", ""]
    assert not any("--retention" in word for command, _ in started for word in command)
    bounds = (SinksAndWindow(4, 1024), SinksAndWindow(8, 512), None)
    for text, bound in zip(told, bounds, strict=True):
        monkeypatch.setenv(retention.VARIABLE, text)
        assert retention.asked() == bound


@UNREADABLE
def test_an_environment_that_cannot_be_read_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(retention.VARIABLE, text)
    with pytest.raises(UnsupportedModelError, match=f"KVPILOT_RETENTION: {text!r} is not a bound; write SINKS:WINDOW"):
        retention.asked()
    assert text in refusal().message
