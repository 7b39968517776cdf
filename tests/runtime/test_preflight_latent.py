"""Preflight of our dtypes for multi-head latent attention: models, platforms and options."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpilot_formats import latent
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.request import Request
from kvpilot_smallmodels.models import tiny_llama
from support.latent_engine import make_model
from support.preflights import refusal


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mla") / "model")


def changed(folder: Path, base: Path, **changes: Any) -> str:
    """Make a model that differs from `base` only in its config."""
    for file in base.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((base / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", latent.names())
def test_a_model_with_latents_is_served_on_a_cpu_and_its_cache_is_counted(deepseek: Path, name: str) -> None:
    found = check(Request(str(deepseek), name))
    assert not found.warnings
    assert not found.skip_layers
    row = 2 * latent.parse(name).row_bytes
    assert f"({row} bytes a token)" in refusal(Request(str(deepseek), name, kv_bytes=500 * row)).message
    check(Request(str(deepseek), name, kv_bytes=512 * row))


def test_a_model_with_mla_disabled_is_judged_by_keys_and_values(
    deepseek: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert "a model without multi-head latent attention" in refusal(Request(str(deepseek), "mla4")).message
    config = check(Request(str(deepseek))).config
    assert config is not None
    assert not config.latent
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    check(Request(str(deepseek), "mla4"))


def test_gpus_from_ampere_on_serve_latents_of_16_bit_models(deepseek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    gpu = partial(machine.Gpu, "GPU", 141 * 2**30, 0)
    monkeypatch.setattr(machine, "gpus", lambda: [gpu((9, 0))])
    assert not check(Request(str(deepseek), "mla4", model_dtype="bfloat16")).warnings
    assert "needs a model in 16 bits" in refusal(Request(str(deepseek), "mla4", model_dtype="float32")).message
    monkeypatch.setattr(machine, "gpus", lambda: [gpu((7, 5))])
    assert "needs compute capability 8.0" in refusal(Request(str(deepseek), "mla4", model_dtype="bfloat16")).message


def test_mla_dtypes_refuse_a_model_without_latents_or_with_other_sizes(deepseek: Path, tmp_path: Path) -> None:
    assert "a model without multi-head latent attention" in refusal(Request(str(tiny_llama()), "mla4")).message
    others = {
        "entries of 320 elements": {"kv_lora_rank": 256},
        "sparse attention with an index, as in DeepSeek V3.2": {
            "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 128,
            "index_n_heads": 64, "index_topk": 2048,
        },
    }  # fmt: skip
    for i, (told, changes) in enumerate(others.items()):
        (tmp_path / str(i)).mkdir()
        message = refusal(Request(changed(tmp_path / str(i), deepseek, **changes), "mla8")).message
        assert told in message
        assert "use --kv-cache-dtype=auto" in message


def test_the_error_of_a_key_value_dtype_names_the_latent_dtypes(deepseek: Path) -> None:
    message = refusal(Request(str(deepseek), "k4v4")).message
    assert "use --kv-cache-dtype=auto or --kv-cache-dtype=mla8 or --kv-cache-dtype=mla4" in message


@pytest.mark.parametrize(
    ("request_of", "told"),
    [
        ({"others": ("--speculative-config.method=ngram",)}, "speculative decoding"),
        ({"others": ("--kv-offloading-size=1",)}, "--kv-offloading-size"),
        ({"others": ("--decode-context-parallel-size=2",)}, "decode context parallelism"),
        ({"skip_layers": ("0",)}, "--kv-cache-dtype-skip-layers"),
        ({"calibration": __file__}, "no static factors of latents"),
    ],
)
def test_options_that_latents_do_not_support_are_refused_before_the_start(
    deepseek: Path, request_of: dict[str, Any], told: str
) -> None:
    assert told in refusal(Request(str(deepseek), "mla4", **request_of)).message
