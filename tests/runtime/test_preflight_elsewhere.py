"""If options change config, weights or GPUs, preflight follows them, or leaves the check to vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_runtime import serve
from kvpilot_runtime.preflight import hub, machine
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.elsewhere import asks_a_hub, overridden
from kvpilot_smallmodels.models import tiny_llama
from support.preflights import asked, refusal

OLD = machine.Gpu("Tesla V100", 16 * 2**30, 0, (7, 0))
DEEPSEEK_VL2 = {
    "candidate_resolutions": [[384, 384], [384, 768]],
    "language_config": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 1280,
        "num_attention_heads": 10, "num_key_value_heads": 10, "num_hidden_layers": 12, "kv_lora_rank": None,
        "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "use_mla": False,
        "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "vocab_size": 129280,
    },
    "model_type": "deepseek_vl_v2", "projector_config": {"model_type": "mlp_projector", "n_embed": 1280},
    "tile_tag": "2D", "torch_dtype": "bfloat16", "vision_config": {"layers": 27, "model_type": "vision", "width": 1152},
}  # fmt: skip
"""Fields of deepseek-ai/deepseek-vl2-tiny that describe its cache."""
CLASS = '--hf-overrides={"architectures": ["DeepseekVLV2ForCausalLM"]}'


def folder(path: Path, config: dict[str, Any] | None, weights: bool = True) -> str:
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if weights:
        (path / "model.bin").write_bytes(b"0")
    return str(path)


def config_of(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def test_an_architecture_may_come_from_hf_overrides(tmp_path: Path) -> None:
    model = folder(tmp_path, DEEPSEEK_VL2)
    findings = check(asked(CLASS, dtype="auto", model=model))
    assert findings.config is not None
    assert findings.config.architectures == ("DeepseekVLV2ForCausalLM",)
    assert (
        "hf-overrides"
        in refusal(asked(dtype="auto", model=folder(tmp_path, {**DEEPSEEK_VL2, "model_type": "x"}))).message
    )


@pytest.mark.parametrize("spelled", [('--hf-overrides={"head_dim": 40}',), ("--hf-overrides.head_dim", "40"),
                                     ("--hf_over.head_dim=40",)])  # fmt: skip
def test_preflight_judges_overridden_fields(spelled: tuple[str, ...]) -> None:
    check(asked())
    assert "head_dim 40" in refusal(asked(*spelled)).message


@pytest.mark.parametrize("value", ["my_module.my_function", "not json", "[1]"])
def test_overrides_that_are_a_function_leave_the_config_to_vllm(tmp_path: Path, value: str) -> None:
    model = folder(tmp_path, {"architectures": ["NobodyKnowsItForCausalLM"]})
    assert refusal(asked(dtype="auto", model=model)).reason == "ModelUnsupported"
    check(asked(f"--hf-overrides={value}", dtype="auto", model=model))


values = st.recursive(
    st.none() | st.integers() | st.lists(st.integers()), lambda inner: st.dictionaries(st.sampled_from("abc"), inner)
)
objects = st.dictionaries(st.sampled_from("abc"), values)


@given(objects, objects)
def test_overrides_change_only_the_named_fields(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    merged = overridden(raw, changes)
    assert merged.keys() == raw.keys() | changes.keys()
    assert overridden(merged, changes) == merged
    assert all(merged[key] == raw[key] for key in raw.keys() - changes.keys())
    assert all(merged[key] == value for key, value in changes.items() if not isinstance(value, dict))


@pytest.mark.parametrize("dtype", ["auto", "fp8", "k4v4"])
def test_a_model_with_params_json_alone_is_left_to_vllm(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "params.json").write_text('{"dim": 4096, "n_layers": 32}')
    check(asked(dtype=dtype, model=folder(tmp_path, None)))


def test_a_folder_without_any_config_is_refused(tmp_path: Path) -> None:
    assert refusal(asked(dtype="auto", model=folder(tmp_path, None))).reason == "ModelNotFound"


@pytest.mark.parametrize("arguments", [("--config-format=mistral",), ("--model-class-overrides", '{"A": "b:C"}')])
def test_a_config_in_another_format_is_left_to_vllm(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    check(asked(*arguments, dtype="auto", model=folder(tmp_path, {"architectures": ["NobodyKnowsIt"]})))


def test_preflight_judges_the_config_at_another_path(tmp_path: Path) -> None:
    model = folder(tmp_path, None)
    assert check(asked(f"--hf-config-path={tiny_llama()}", model=model)).config is not None
    assert refusal(asked("--hf-config-path=/models/nowhere", model=model)).reason == "ModelNotFound"


@pytest.mark.parametrize("value", ["True", "true", "1"])
def test_the_hub_is_not_asked_for_a_model_of_modelscope(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    def config_file(*_: object) -> Path:
        raise AssertionError("the Hugging Face hub was asked")

    monkeypatch.setattr(hub, "config_file", config_file)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", value)
    for dtype in ("auto", "k4v4"):
        check(asked(dtype=dtype, model="Qwen/Qwen3-8B"))


def test_a_token_in_the_arguments_is_sent_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(hub, "config_file", lambda *given: told.extend(given))
    check(asked("--hf-token=hf_x", "--revision=v2", dtype="auto", model="a/b"))
    assert told == ["a/b", "v2", "hf_x"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--load-format=dummy",), ("--load-format", "runai_streamer"), ("-q", "fp8"), ("--cpu-offload-gb=8",),
        ("--language-model-only",),
    ],
)  # fmt: skip
def test_weights_that_vllm_converts_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    model = folder(tmp_path, config_of(tiny_llama()), weights=False)
    with (tmp_path / "model.bin").open("wb") as stream:
        stream.truncate(2**40)
    assert refusal(asked(dtype="auto", model=model)).reason == "DoesNotFit"
    check(asked(*arguments, dtype="auto", model=model))


@pytest.mark.parametrize("arguments", [("--load-format=safetensors",), ("--cpu-offload-gb=0",), ()])
def test_weights_that_vllm_loads_unchanged_are_counted(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert (
        refusal(asked(*arguments, dtype="auto", model=folder(tmp_path, config_of(tiny_llama()), weights=False))).reason
        == "ModelNotFound"
    )


@pytest.mark.parametrize("by", ["CUDA_VISIBLE_DEVICES", "--device-ids=1", "--distributed-executor-backend=ray"])
def test_gpus_chosen_by_other_options_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [OLD])
    two = "--tensor-parallel-size=2"
    assert refusal(asked(two, dtype="auto")).reason == "DoesNotFit"
    assert refusal(asked()).reason == "DtypeUnsupported"
    arguments = (by,) if by.startswith("--") else ()
    if not arguments:
        monkeypatch.setenv(by, "1,2")
    check(asked(*arguments, two, dtype="auto"))
    check(asked(*arguments))


def test_an_architecture_of_another_library_is_left_to_vllm(tmp_path: Path) -> None:
    config = {**config_of(tiny_llama()), "architectures": ["NobodyKnowsItForCausalLM"]}
    model = folder(tmp_path, config)
    assert refusal(asked(dtype="auto", model=model)).reason == "ModelUnsupported"
    check(asked("--model-impl=terratorch", dtype="auto", model=model))


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_vllm_chooses_the_longest_context_that_fits(value: str) -> None:
    small = "--kv-cache-memory-bytes=128K"
    assert refusal(asked(small, dtype="auto")).reason == "DoesNotFit"
    request, arguments = serve.parse([f"--model={tiny_llama()}", small, "--max-model-len", value])
    check(request)
    assert f"--max-model-len={value}" in arguments


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        ((), False),
        (("--tokenizer=some-team/some-tokenizer",), True),
        ((f"--tokenizer={tiny_llama()}",), False),
        (("--spec-model=some-team/draft", "--spec-tokens=2"), True),
        (("--spec-method=ngram", "--spec-tokens=2"), False),
        (('-sc={"model": "[ngram]", "num_speculative_tokens": 2}',), False),
        (("--enable-lora", "--lora-modules", "sql=/adapters/sql", "chat=some-team/chat"), True),
        (("--lora-modules", '{"name": "sql", "path": "some-team/sql"}'), True),
        (("--lora-modules", "sql=/adapters/sql"), False),
    ],
)
def test_a_model_in_a_folder_runs_without_the_hub_unless_an_option_needs_it(
    arguments: tuple[str, ...], asks: bool
) -> None:
    assert asks_a_hub(asked(*arguments)) == asks
