"""Features of vLLM with our dtypes: preflight refuses combinations that cannot work, and lets all others pass."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot_formats.arguments import rules
from kvpilot_runtime import serve
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama
from support.preflights import asked, refusal

H200 = machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
         "torch_dtype": "bfloat16"}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024},
}  # fmt: skip


def folder(path: Path, config: dict[str, Any]) -> str:
    """Write a model with this config and a placeholder for its weights to a folder, and return the folder."""
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.bin").write_bytes(b"0")
    return str(path)


@pytest.mark.parametrize(
    "spelled", [("-tp", "2"), ("-tp=2",), ("--tensor-parallel-size=2",), ("--tensor_parallel_size", "2")]
)
def test_every_gpu_of_an_engine_counts_however_their_number_is_spelled(spelled):
    request, arguments = serve.parse([f"--model={tiny_llama()}", *spelled])
    assert request.tensor_parallel == 2
    assert [one for one in arguments if one.startswith(("-tp", "--tensor"))] == ["--tensor-parallel-size=2"]


@pytest.mark.parametrize("given", [("--config", "vllm.yaml"), ("--config=vllm.yaml",)])
def test_a_config_file_of_options_is_refused(given):
    with pytest.raises(PreflightError, match=r"^--config is not supported: .* write the file's options as arguments"):
        asked(*given)


REFUSED = {
    "decode context parallelism": [
        ("--decode-context-parallel-size=2",), ("--decode-context-parallel-size", "2"), ("-dcp", "4"),
        ("--decode-context-par=2",), ("--decode_context_parallel_size=2",),
    ],
    "prefill context parallelism": [("--prefill-context-parallel-size=2",), ("-pcp=2",)],
    "fast prefill of layers that share a cache": [("--kv-sharing-fast-prefill",), ("--kv_sharing_fast_prefill",)],
    "dual batch overlap": [("--enable-dbo",), ("--ubatch-size=2",), ("--enable-db", "--seed=1")],
    "pooling": [("--runner=pooling",), ("--runner", "pooling"), ("--convert=embed",), ("--convert", "classify"),
                ("--pooler-config.pooling_type=MEAN",)],
    "offloading by another backend than vLLM's own": [("--kv-offloading-size=1", "--kv-offloading-backend=lmcache")],
}  # fmt: skip

TRANSFER = {
    "KV transfer other than by --kv-offloading-size": [
        ("--kv-transfer-config={}",), ("--kv-transfer-config", "not json"),
        ("--kv-transfer-config.kv_connector=LMCacheConnectorV1",),
    ],
}  # fmt: skip

DRAFTS = {
    "speculative decoding by 'dflash'": [("--speculative-config", '{"method": "dflash"}'), ("-sc.method=dflash",),
                                         ("--spec-method=dflash",), ("--speculative-conf.method", "dflash")],
    "(ngram, suffix, draft_model, eagle, eagle3 and mtp are served)": [
        ('-sc={"method": "medusa", "model": "org/heads"}',), ("--spec-method", "mlp_speculator", "--spec-tokens=1"),
    ],
    "a KV-cache dtype of the draft's own (kv_cache_dtype)": [
        ("--spec-model=org/draft", "-sc.kv_cache_dtype=auto"), ('-sc={"method": "mtp", "kv-cache-dtype": "fp8"}',),
    ],
    "parallel drafting": [('-sc={"method": "eagle3", "model": "org/head", "parallel_drafting": true}',)],
    "a model that drafts, beside offloading,": [("--spec-model=org/draft", "--kv-offloading-size=1")],
    "a model that drafts, beside adapters,": [("--spec-method=mtp", "--enable-lora")],
    "a model that drafts, beside tensor parallelism,": [("--spec-method=eagle", "--tensor-parallel-size=2")],
    "a model that drafts, beside pipeline parallelism,": [
        ("--spec-model=org/draft", "--pipeline-parallel-size=2"), ("--spec-method=eagle3", "-pp", "2"),
    ],
    "a draft of another vocabulary": [('-sc={"model": "org/draft", "use_heterogeneous_vocab": true}',)],
}  # fmt: skip

OF_A_MODEL = [
    ("--spec-model=org/draft",), ("--spec-tokens", "3"), ("-sc.model=org/draft",), ("--spec-method=eagle3",),
    ('-sc={"method": "mtp", "num_speculative_tokens": 1}',), ("--spec-method=mimo_mtp",),
    ('-sc={"method": "eagle", "model": "org/head", "parallel_drafting": false}',),
]  # fmt: skip
"""Draft methods that use a separate model, or extra layers of the served model."""


@pytest.mark.parametrize(
    ("what", "arguments"),
    [(what, arguments) for what, each in {**REFUSED, **TRANSFER, **DRAFTS}.items() for arguments in each],
)
def test_an_unsupported_option_is_refused_only_with_our_dtypes(what: str, arguments: tuple[str, ...]) -> None:
    error = refusal(asked(*arguments))
    assert error.reason == "BadArguments"
    assert what in error.message
    assert "'k4v4'" in error.message
    assert "--kv-cache-dtype=auto" in error.message
    check(asked(*arguments, dtype="auto"))


@pytest.mark.parametrize("arguments", OF_A_MODEL)
def test_draft_models_are_served_on_a_cpu_and_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    check(asked(*arguments))
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [H200])
    check(asked(*arguments))


def test_a_draft_model_beside_layers_in_16_bits_is_refused() -> None:
    error = refusal(asked("--spec-model=org/draft", model=str(tiny_gemma3())))
    assert error.reason == "DtypeUnsupported"
    assert "beside layers that are not full attention" in error.message
    assert "ngram" in error.message
    check(asked("--spec-method=ngram", model=str(tiny_gemma3())))


def test_a_draft_models_weights_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, draft = folder(tmp_path, json.loads((tiny_llama() / "config.json").read_text())), tmp_path / "draft"
    draft.mkdir()
    monkeypatch.setattr(machine, "available_memory", lambda: 4 * 2**30)
    assert refusal(asked(f"--spec-model={draft}", "--max-model-len=256", model=model)).reason == "ModelNotFound"
    with (draft / "model.bin").open("wb") as stream:
        stream.truncate(2**30)
    check(asked(f"--spec-model={draft}", "--max-model-len=256", model=model))
    with (draft / "model.bin").open("wb") as stream:
        stream.truncate(2 * 2**30)
    assert refusal(asked(f"--spec-model={draft}", "--max-model-len=256", model=model)).reason == "DoesNotFit"
    check(asked("--spec-method=ngram", "--max-model-len=256", model=model))


@pytest.mark.parametrize(
    "arguments",
    [("--decode-context-parallel-size=1",), ("-dcp", "1"), ("--ubatch-size", "0"), ("--no-enable-dbo",),
     ("--runner=generate",), ("--runner", "auto"), ("--convert=none",), ("-dc", "{}"), ("--enable-sleep-mode",),
     ('--speculative-config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup-max": 4}',),
     ("-sc.method=ngram", "-sc.num-speculative-tokens=4"), ("--spec-method", "suffix"), ("--spec-model=[ngram]",),
     ("--kv-offloading-backend=native",)],
)  # fmt: skip
def test_an_option_that_turns_a_feature_off_is_accepted(arguments: tuple[str, ...]) -> None:
    check(asked(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [("--enable-lora", "--max-lora-rank=8"), ("--structured-outputs-config.backend=xgrammar",),
     ("--enable-auto-tool-choice", "--tool-call-parser=hermes"), ("--max-logprobs=-1",), ("--data-parallel-size=2",),
     ("--enable-expert-parallel",), ("--quantization=fp8",), ("--kv-events-config={}",)],
)  # fmt: skip
def test_options_that_do_not_concern_attention_are_passed_to_vllm(arguments: tuple[str, ...]) -> None:
    request = asked(*arguments)
    check(request)
    assert request.others == arguments


@pytest.mark.parametrize("value", ["1", "2"])
def test_batch_invariance_is_refused_only_with_our_dtypes(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    error = refusal(asked())
    assert error.reason == "BadArguments"
    assert all(word in error.message for word in ("VLLM_BATCH_INVARIANT", "'k4v4'", "leave it out"))
    check(asked(dtype="auto"))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    check(asked())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({**SMALL, "architectures": ["BertModel"], "model_type": "bert"}, id="embeds"),
        pytest.param({**SMALL, "architectures": ["LlamaModel"], "model_type": "llama", "head_dim": 64}, id="no-head"),
        pytest.param({**SMALL, "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3",
                      "head_dim": 64}, id="classifies"),
    ],
)  # fmt: skip
def test_a_pooling_model_is_refused_only_with_our_dtypes(tmp_path: Path, config: dict[str, Any]) -> None:
    model = folder(tmp_path, config)
    error = refusal(asked(model=model))
    assert error.reason == "DtypeUnsupported"
    assert "pooling" in error.message
    assert config["architectures"][0] in error.message
    check(asked(model=model, dtype="auto"))


def test_a_sentence_transformer_counts_as_pooling_unless_the_runner_generates(tmp_path: Path) -> None:
    for file in tiny_llama().iterdir():
        (tmp_path / file.name).symlink_to(file)
    check(asked(model=str(tmp_path)))
    (tmp_path / "modules.json").write_text("[]")
    assert "pooling" in refusal(asked(model=str(tmp_path))).message
    assert "pooling" in refusal(asked("--runner=auto", model=str(tmp_path))).message
    check(asked("--runner=generate", model=str(tmp_path)))


def test_images_that_attend_both_ways_are_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [H200])
    model = folder(tmp_path, GEMMA3)
    for dtype in ("k4v4", "fp8"):
        check(asked("--max-model-len=8192", model=model, dtype=dtype))


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    config = {**SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **field}
    error = refusal(asked(model=folder(tmp_path, config)))
    assert error.reason == "DtypeUnsupported"
    assert "attention to later tokens" in error.message


def published(model: str) -> dict[str, Any]:
    """Return the config of a model of the corpus."""
    corpus = json.loads((Path(__file__).parents[2] / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
    [config] = [entry["config"] for entry in corpus if entry["model"] == model]
    return dict(config)


def test_chunked_attention_is_served_in_our_dtype_but_without_offloading(tmp_path: Path) -> None:
    model = folder(tmp_path, published("meta-llama/Llama-4-Scout-17B-16E-Instruct"))
    assert check(asked("--max-model-len=4096", model=model)).skip_layers == ()
    error = refusal(asked("--max-model-len=4096", "--kv-offloading-size=1", model=model))
    assert error.reason == "DtypeUnsupported"
    assert "chunked attention" in error.message


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    error = refusal(asked(model=folder(tmp_path, published("openai/whisper-tiny"))))
    assert error.reason == "DtypeUnsupported"
    assert "encoder-decoder" in error.message
    assert "--kv-cache-dtype=auto" in error.message


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8"])
def test_quantized_weights_are_counted_by_their_file_size(tmp_path: Path, method: str) -> None:
    for file in tiny_llama().iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    findings = check(asked(model=str(tmp_path)))
    assert findings.warnings == []


def test_stages_and_data_parallel_engines_share_weights_and_stages_share_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cards = [H200]
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: cards)
    config = json.loads((tiny_llama() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.bin").open("wb") as stream:
        stream.truncate(200 * 2**30)  # This is more memory than a GPU has.
    model = str(tmp_path)
    assert refusal(asked(model=model)).reason == "DoesNotFit"
    assert "--pipeline-parallel-size 2" in refusal(asked("--pipeline-parallel-size=2", model=model)).message
    check(asked("--pipeline-parallel-size=2", "--nnodes=2", model=model))
    four = ("--pipeline-parallel-size=2", "--nnodes=2", "--tensor-parallel-size=2")
    assert "2 on each of 2 nodes" in refusal(asked(*four, model=model)).message
    cards.append(H200)
    check(asked("--pipeline-parallel-size=2", model=model))
    check(asked("-dp", "2", model=model))
    # Two layers with 4,096 tokens of 272 bytes each. Each of two stages has half.
    short = ("--max-model-len=4096", "--recent-tokens=0", f"--kv-cache-memory-bytes={4096 * 272 * 2 // 2 // 2}")
    assert refusal(asked(*short, "--tensor-parallel-size=1", model=model)).reason == "DoesNotFit"
    check(asked(*short, "-pp", "2", model=model))


@pytest.mark.parametrize("dtype", ["k4v4", "int8"])
def test_every_rule_about_a_switch_is_tested_here(dtype: str) -> None:
    tried = [arguments for each in (*REFUSED.values(), *DRAFTS.values()) for arguments in each]
    assert {switch.what for switch in rules.BESIDE_OURS} == set(REFUSED)
    assert all(refusal(asked(*arguments, dtype=dtype)).reason == "BadArguments" for arguments in tried)
