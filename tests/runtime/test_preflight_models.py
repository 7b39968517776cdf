"""Preflight of models, machines and options: our dtypes on GPUs, mixed layers, calibration."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpilot_formats import formats
from kvpilot_runtime import serve
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.request import Findings, Request
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama

H200 = machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))
A100 = machine.Gpu("NVIDIA A100", 80 * 2**30, 0, (8, 0))
T4 = machine.Gpu("Tesla T4", 16 * 2**30, 0, (7, 5))

# These fields of each family's config.json are enough to recognize the model's shape. A refusal needs no weights.
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "torch_dtype": "bfloat16"}
REFUSED = {
    "MLA": {**SMALL, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512},
    "ALiBi": {**SMALL, "architectures": ["BloomForCausalLM"], "model_type": "bloom"},
    "cross attention": {**SMALL, "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True},
    "all sliding": {**SMALL, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
}
WORDS = {
    "MLA": "latent attention", "ALiBi": "ALiBi", "cross attention": "encoder-decoder",
    "all sliding": "all have a sliding window",
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that this machine has these GPUs, and that vLLM is built for GPUs."""

    def pretend(*gpus: machine.Gpu) -> None:
        monkeypatch.setattr(machine, "platform", lambda: "cuda")
        monkeypatch.setattr(machine, "gpus", lambda: list(gpus))

    return pretend


def refusal(request: Request) -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        check(request)
    return caught.value


def silent(findings: Findings) -> bool:
    return not findings.skip_layers and not findings.warnings


def changed(tmp_path: Path, base: Path, **changes: Any) -> str:
    """Make a model that differs from `base` only in its config."""
    for file in base.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((base / "config.json").read_text()), **changes}))
    return str(tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "k8v4", "k4v4", "k4v2"])
@pytest.mark.parametrize("card", [H200, A100], ids=["9.0", "8.0"])
def test_our_dtypes_are_accepted_on_a_gpu_from_8_0_on(gpu: Any, card: machine.Gpu, dtype: str) -> None:
    gpu(card)
    assert silent(check(Request(str(tiny_llama()), dtype)))


def test_the_error_about_an_older_gpu_names_its_and_the_needed_capability(gpu: Any) -> None:
    gpu(T4)
    error = refusal(Request(str(tiny_llama()), "k4v4"))
    assert error.reason == "DtypeUnsupported"
    assert all(word in error.message for word in ("k4v4", "8.0", "7.5", "Tesla T4", "'auto'"))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_is_served_on_ampere_if_flashinfer_supports_the_heads(gpu: Any, tmp_path: Path, dtype: str) -> None:
    gpu(A100)
    assert silent(check(Request(str(tiny_llama()), dtype)))
    error = refusal(Request(changed(tmp_path, tiny_llama(), head_dim=96), dtype))
    assert error.reason == "DtypeUnsupported"
    assert all(word in error.message for word in ("8.9", "head_dim 96", "NVIDIA A100", "'int8'"))


def test_fp8_without_a_backend_is_refused_with_the_dtypes_that_the_gpu_supports(gpu: Any) -> None:
    gpu(A100)
    assert "8.9" in refusal(Request(str(tiny_llama()), "fp8_per_token_head")).message
    gpu(T4)
    assert "8.0" in refusal(Request(str(tiny_llama()), "fp8")).message
    assert "'int8'" not in refusal(Request(str(tiny_llama()), "fp8")).message


def test_the_oldest_gpu_that_an_engine_uses_decides_which_dtypes_are_refused(gpu: Any) -> None:
    gpu(H200, T4)
    assert "Tesla T4" in refusal(Request(str(tiny_llama()), "k4v4", tensor_parallel=2)).message
    assert silent(check(Request(str(tiny_llama()), "k4v4", tensor_parallel=1)))


def test_a_float32_model_is_refused_on_a_gpu_and_served_on_a_cpu(gpu: Any) -> None:
    assert silent(check(Request(str(tiny_llama()), "k4v4", "float32")))
    gpu(H200)
    assert "--dtype=bfloat16" in refusal(Request(str(tiny_llama()), "k4v4", "float32")).message
    assert silent(check(Request(str(tiny_llama()), "auto", "float32")))


@pytest.mark.parametrize("head_dim", [80, 160, 192, 384])
def test_heads_that_need_padding_are_served_on_a_gpu_too(gpu: Any, tmp_path: Path, head_dim: int) -> None:
    gpu(H200)
    assert silent(check(Request(changed(tmp_path, tiny_llama(), head_dim=head_dim), "k4v4")))


@pytest.mark.parametrize("head_dim", [32, 264])
def test_a_head_dim_that_is_not_stored_is_refused_on_a_gpu_too(gpu: Any, tmp_path: Path, head_dim: int) -> None:
    gpu(H200)
    error = refusal(Request(changed(tmp_path, tiny_llama(), head_dim=head_dim), "k4v4"))
    assert f"head_dim {head_dim}" in error.message
    assert "multiples of 8 from 48 to 256" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 71, "num_key_value_heads": 1, "head_dim": 64},
        {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "layer_types": ["full_attention"] * 2},
    ],
    ids=["71 query heads to a KV head", "attention sinks"],
)
def test_supported_models_are_served_on_a_cpu_and_on_a_gpu(gpu: Any, tmp_path: Path, fields: dict[str, Any]) -> None:
    model = changed(tmp_path, tiny_llama(), **fields)
    assert silent(check(Request(model, "k4v4")))
    gpu(H200)
    assert silent(check(Request(model, "k4v4")))


@pytest.mark.parametrize("kind", REFUSED)
def test_the_refusal_of_a_model_that_our_dtypes_do_not_serve_says_why(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFUSED[kind]))
    error = refusal(Request(str(tmp_path), "k4v4"))
    assert error.reason == "DtypeUnsupported"
    assert WORDS[kind] in error.message
    assert "--kv-cache-dtype=auto" in error.message


@pytest.mark.parametrize(
    "option",
    ["--spec-method=medusa", "--speculative-config.method=medusa", "--kv-transfer-config={}",
     "--kv-offloading-backend=lmcache"],
)  # fmt: skip
@pytest.mark.parametrize("model", ["folder", "hub/id"])
def test_unknown_drafts_and_kv_transfer_are_refused_only_with_our_dtypes(option: str, model: str) -> None:
    name = str(tiny_llama()) if model == "folder" else model
    error = refusal(Request(name, "k4v4", others=(option, "x")))
    assert error.reason == "BadArguments"
    assert option.split("=")[0].split(".")[0] in error.message
    check(Request(name, "auto", others=(option, "x")))


def test_sliding_window_layers_stay_in_16_bits_unless_the_user_says_otherwise() -> None:
    gemma = str(tiny_gemma3())
    assert check(Request(gemma, "k4v4")).skip_layers == ("sliding_window",)
    assert check(Request(gemma, "k4v4", skip_layers=("sliding_window",))).skip_layers == ("sliding_window",)
    assert check(Request(gemma, "fp8")).skip_layers == ()
    assert check(Request(str(tiny_llama()), "k4v4")).skip_layers == ()
    assert check(Request("hub/id", "k4v4")).skip_layers == ("sliding_window",)
    error = refusal(Request(gemma, "k4v4", skip_layers=()))
    assert "5 sliding-window layers" in error.message
    assert "--kv-cache-dtype-skip-layers=sliding_window" in error.message


def test_calibration_is_an_existing_file_or_unset_or_off_except_for_k2v2(tmp_path: Path) -> None:
    model = str(tiny_llama())
    assert silent(check(Request(model, "k4v4")))
    assert silent(check(Request(model, "k4v4", calibration="off")))
    assert silent(check(Request(model, "k2v2")))
    assert "kvpilot calibrate" in refusal(Request(model, "k2v2", calibration="off")).message
    missing = refusal(Request(model, "k2v2", calibration=str(tmp_path / "nothing")))
    assert missing.reason == "BadArguments"
    assert "nothing" in missing.message
    file = tmp_path / "factors.safetensors"
    file.write_bytes(b"")
    assert silent(check(Request(model, "k2v2", calibration=str(file))))


def test_a_window_must_be_a_supported_size_and_not_longer_than_the_context() -> None:
    model = str(tiny_llama())
    for recent in formats.RECENT_CHOICES:
        assert silent(check(Request(model, "k4v4", recent=recent)))
    error = refusal(Request(model, "k4v4", max_model_len=128, recent=256))
    assert error.reason == "BadArguments"
    assert "--recent-tokens 256 is more than the context of 128 tokens" in error.message
    for wrong in ("-64", "100", "many", "64.0"):
        with pytest.raises(PreflightError, match=r"--recent-tokens.*use 0, 64, 128, 256, 512 or all"):
            serve.parse(["--model=m", f"--recent-tokens={wrong}"])


def test_a_cache_needs_no_room_for_residual_pages_because_a_request_alone_does_without() -> None:
    # 256 tokens of 144 bytes. The default window of 512 tokens is cut to the context.
    exact = Request(str(tiny_llama()), "k2v2", max_model_len=256, kv_bytes=256 * 144)
    assert silent(check(exact))
    assert refusal(replace(exact, kv_bytes=(exact.kv_bytes or 0) - 1)).reason == "DoesNotFit"
    assert "--recent-tokens 512 is more than the context of 256" in refusal(replace(exact, recent=512)).message


@pytest.mark.parametrize("dtype", ["auto", "fp8", "int8"])
def test_a_window_for_an_8_bit_dtype_causes_a_warning_and_has_no_effect(dtype: str) -> None:
    assert silent(check(Request(str(tiny_llama()), dtype, recent=0)))
    [(reason, message)] = check(Request(str(tiny_llama()), dtype, recent=64)).warnings
    assert reason == "WindowUnused"
    assert dtype in message


def test_a_window_may_come_from_the_environment_or_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.parse(["--model=m"])[0].recent is None
    monkeypatch.setenv("KVPILOT_RECENT_TOKENS", "128")
    assert serve.parse(["--model=m"])[0].recent == 128
    assert serve.parse(["--model=m", "--recent-tokens=0"])[0].recent == 0
    assert serve.parse(["--model=m", "--recent-tokens=all"])[0].recent == formats.ALL
    monkeypatch.setenv("KVPILOT_RECENT_TOKENS", "12")
    with pytest.raises(PreflightError, match=r"'12' is not supported"):
        serve.parse(["--model=m"])


def test_vllm_gets_the_layers_to_skip_as_separate_words_and_the_calibration_that_was_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "factors.safetensors"
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # A variable of the shell must not influence the test.
    monkeypatch.setenv("KVPILOT_CALIBRATION", str(file))
    before = dict(serve.os.environ)
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(serve.os, "execve", lambda _, command, environment: started.append((command, environment)))
    given = [f"--model={tiny_gemma3()}", "--kv-cache-dtype=k4v4", "--recent-tokens=128"]
    assert serve.main(given) == serve.REFUSED
    assert f"KVPILOT_CALIBRATION={str(file)!r}: there is no such file" in capfd.readouterr().err
    file.write_bytes(b"")
    serve.main(given)
    ((command, environment),) = started
    assert command[-2:] == ["--kv-cache-dtype-skip-layers", "sliding_window"]
    assert environment["KVPILOT_CALIBRATION"] == str(file)
    assert environment["KVPILOT_RECENT_TOKENS"] == "128"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert serve.os.environ == before


def test_a_gpu_listing_is_parsed_and_missing_figures_are_unknown() -> None:
    listing = "NVIDIA H200, 143771, 4, 9.0\nNVIDIA H200 MIG 1g.18gb, [N/A], [N/A], 9.0\n"
    assert machine.parse_gpus(listing) == [
        machine.Gpu("NVIDIA H200", 143771 * 2**20, 4 * 2**20, (9, 0)),
        machine.Gpu("NVIDIA H200 MIG 1g.18gb", None, None, (9, 0)),
    ]


def test_layers_skipped_by_number_are_counted_in_16_bits() -> None:
    small = Request(str(tiny_llama()), "k4v4", max_model_len=4096, kv_bytes=2 * 2**20, recent=0)
    assert silent(check(small))  # 4,096 tokens of 272 bytes
    error = refusal(replace(small, skip_layers=("0",)))
    assert error.reason == "DoesNotFit"
    assert "(648 bytes a token)" in error.message  # Of these bytes, 512 are for the layer in 16 bits.
    assert check(replace(small, skip_layers=("0",), kv_bytes=3 * 2**20)).skip_layers == ("0",)


# As published: fields with a default in the class are missing.
GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-4b": {**GEMMA3, "text_config": {
        "hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}},
    "gemma-3-12b": {**GEMMA3, "text_config": {
        "hidden_size": 3840, "model_type": "gemma3_text", "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "sliding_window": 1024}},
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "torch_dtype": "float32", "head_dim": 256,
        "hidden_size": 3584, "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "sliding_window": 4096},
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "torch_dtype": "bfloat16", "hidden_size": 3072,
        "max_position_embeddings": 131072, "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": 262144},
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16", "head_dim": 256,
    "hidden_size": 2048, "max_position_embeddings": 262144, "num_attention_heads": 16, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "full_attention_interval": 4,
}  # fmt: skip
CUSTOM = {
    "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "torch_dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
    "llm_config": {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_hidden_layers": 24,
                   "num_key_value_heads": 2},
}  # fmt: skip


def served(tmp_path: Path, config: dict[str, Any]) -> str:
    """Make a folder with this config and placeholders for weights."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.bin").write_bytes(b"0")
    return str(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", ["auto", "fp8", "k4v4"])
def test_a_config_without_the_defaults_of_its_class_is_accepted(
    gpu: Any, tmp_path: Path, name: str, dtype: str
) -> None:
    gpu(H200)
    findings = check(Request(served(tmp_path, PUBLISHED[name]), dtype, max_model_len=8192))
    assert findings.warnings == []
    # vLLM gives Phi's layers their window of 262,144 tokens unless told otherwise, and our backend supports no window.
    assert findings.disable_window == (dtype == "k4v4" and name == "phi-4-mini")
    assert findings.skip_layers == (("sliding_window",) if dtype == "k4v4" and name != "phi-4-mini" else ())


def test_a_sliding_window_longer_than_the_context_is_turned_off_only_for_our_dtypes(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(H200)
    started: list[list[str]] = []
    monkeypatch.setattr(serve.os, "execve", lambda _, command, environment: started.append(command))
    for dtype in ("k4v4", "auto"):
        serve.main([f"--model={served(tmp_path, PUBLISHED['phi-4-mini'])}", f"--kv-cache-dtype={dtype}"])
    assert ["--disable-sliding-window" in command for command in started] == [True, False]


def test_only_the_attention_layers_of_a_hybrid_model_need_a_cache(gpu: Any, tmp_path: Path) -> None:
    gpu(H200)
    model = served(tmp_path, QWEN3_NEXT)
    exact = 262144 * 12 * 2 * 2 * 256 * 2
    assert silent(check(Request(model, "auto", kv_bytes=exact)))
    assert "(24576 bytes a token)" in refusal(Request(model, "auto", kv_bytes=exact - 1)).message


def test_vllm_judges_its_own_dtypes_that_we_do_not_offer(gpu: Any, tmp_path: Path) -> None:
    gpu(H200)
    config = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "torch_dtype": "bfloat16"}
    for dtype in formats.VLLM_DTYPES_LEFT_OUT:
        assert silent(check(Request(served(tmp_path, config), dtype, max_model_len=8192)))


def test_every_rank_holds_the_whole_latent_cache(gpu: Any, tmp_path: Path) -> None:
    gpu(*[H200] * 8)
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16"}
    request = Request(served(tmp_path, config), "auto", max_model_len=1024, tensor_parallel=8, kv_bytes=1024 * 70_272)
    assert silent(check(request))
    assert "(70272 bytes a token)" in refusal(replace(request, kv_bytes=1024 * 70_272 - 1)).message


def test_a_model_with_code_in_its_repository_needs_trust_remote_code(tmp_path: Path) -> None:
    model = served(tmp_path, CUSTOM)
    error = refusal(Request(model, "auto"))
    assert error.reason == "ModelUnsupported"
    assert all(word in error.message for word in ("internvl_chat", "auto_map", "--trust-remote-code"))
    check(Request(model, "auto", others=("--trust-remote-code",)))


def test_a_config_of_100_mb_is_refused_in_one_line(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(100 * 2**20)
    error = refusal(Request(str(tmp_path), "auto"))
    assert error.reason == "ModelUnsupported"
    assert "104,857,600 bytes" in error.message
    assert "\n" not in error.message
