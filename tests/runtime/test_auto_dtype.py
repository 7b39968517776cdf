"""The dtype that `auto` becomes for a checkpoint, and the size of its cache, compared with the pinned vLLM."""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpilot_formats.models import auto_dtype, read
from kvpilot_runtime import serve
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.request import Request
from support.own_process import ask


def main() -> None:
    """Read quantization settings from stdin, and write the dtypes that vLLM resolves to stdout."""
    print(json.dumps([resolved(scheme) for scheme in json.load(sys.stdin)]))


def resolved(scheme: dict[str, Any] | None) -> str | None:
    """Return the dtype of one checkpoint, as vLLM's engine arguments resolve it."""
    from transformers import PreTrainedConfig
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    config = PreTrainedConfig()
    if scheme is not None:
        config.quantization_config = scheme
    try:
        ModelArchConfigConvertorBase(config, config).get_quantization_config()
    except ValueError:
        return None
    return str(resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=config)))


CORPUS = json.loads((Path(__file__).parents[2] / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}
SCHEMES: list[Any] = [None, {}, "FP8", "fp8", "NVFP4", "nvfp4", "INT8", STATIC, {**STATIC, "dynamic": True},
                      {**STATIC, "dynamic": None}, {**STATIC, "type": "int"}, {"num_bits": 4, "type": "float"},
                      {"num_bits": 4, "type": "int"}, {"num_bits": 2, "type": "float"}]  # fmt: skip
METHODS = ["modelopt", "modelopt_fp4", "modelopt_mixed", "ModelOpt", "fp8", "compressed-tensors", "awq"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 128,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def written() -> list[dict[str, Any]]:
    """Return quantization settings in every form that checkpoints use, and some invalid ones."""
    found: list[dict[str, Any]] = []
    for method, scheme, algorithm in itertools.product(METHODS, SCHEMES, SCHEMES):
        # One method uses all combinations, because the others read the two fields in the same way.
        one_alone = method == METHODS[0] or scheme is None or algorithm is None
        if one_alone and not (method in ("fp8", "awq") or isinstance(scheme, str)):
            found.append({"quant_method": method, "kv_cache_scheme": scheme, "kv_cache_quant_algo": algorithm})
    for algorithm, cache, producer in itertools.product(
        ("FP8", "fp8_pb_wo", "NVFP4", None), SCHEMES, ("modelopt", "other")
    ):
        inner = {"quant_algo": algorithm, "kv_cache_quant_algo": cache}
        found.append({"producer": {"name": producer}, "quantization": inner})
        found.append({"quantization": {**inner, "modelopt_quant_config": {}}})
    return found


def test_the_dtype_auto_is_resolved_as_vllm_resolves_it() -> None:
    published = [entry["config"].get("quantization_config") for entry in CORPUS]
    schemes = [scheme for scheme in (*published, *written()) if scheme is None or isinstance(scheme, dict)]
    theirs = ask("test_auto_dtype", schemes)
    wrong = [
        (scheme, found, auto_dtype({"quantization_config": scheme}))
        for scheme, found in zip(schemes, theirs, strict=True)
        # A compressed-tensors scheme takes effect only in the layers, which the next test covers.
        if found is not None and "compressed" not in str((scheme or {}).get("quant_method"))
        and found != auto_dtype({"quantization_config": scheme})
    ]  # fmt: skip
    assert wrong == []
    assert {"auto", "fp8_e4m3", "nvfp4"} <= set(theirs)


def test_a_scheme_of_compressed_tensors_makes_auto_fp8_in_vllms_layers() -> None:
    kept = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    scheme = {**kept, "kv_cache_scheme": {**STATIC, "strategy": "tensor", "symmetric": True}}
    asked = {
        "kept": {**LLAMA, "quantization_config": kept}, "quantized": {**LLAMA, "quantization_config": scheme},
    }  # fmt: skip
    found = ask("support.vllm_specs", {name: [config, {}] for name, config in asked.items()})
    for name, config in asked.items():
        facts = read(config)
        assert found[name]["dtype"] == facts.auto, found[name]
        assert sum(group[-2] * group[-1] for group in found[name]["groups"]) == facts.token_bytes("auto")
    assert read(asked["quantized"]).token_bytes("auto") * 2 == read(asked["kept"]).token_bytes("auto")


def test_preflight_counts_auto_as_the_checkpoints_dtype_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])
    scheme = {"quant_method": "modelopt", "kv_cache_scheme": STATIC}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": scheme}))
    (tmp_path / "model.bin").write_bytes(b"0")
    exact = 4096 * 2 * 2 * 2 * 64
    ((reason, message),) = check(Request(str(tmp_path), "auto", kv_bytes=exact)).warnings
    assert reason == "AutoIsQuantized"
    assert all(word in message for word in ("fp8_e4m3", "quantization_config", "bfloat16"))
    assert check(Request(str(tmp_path), "bfloat16", kv_bytes=2 * exact)).warnings == []
    with pytest.raises(PreflightError, match=r"\(512 bytes a token"):
        check(Request(str(tmp_path), "auto", kv_bytes=exact - 1))
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("Tesla T4", 16 * 2**30, 0, (7, 5))])
    with pytest.raises(PreflightError, match=r"'auto', which this checkpoint makes fp8_e4m3, .*use 'float16'"):
        check(Request(str(tmp_path), "auto"))


@pytest.mark.parametrize(
    ("scheme", "asked", "started"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": STATIC}, "auto", "fp8_e4m3"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}, "auto", "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": STATIC}, "bfloat16", "bfloat16"),
        (None, "auto", "auto"),
    ],
)
def test_vllm_gets_the_name_of_the_dtype_that_the_checkpoint_chooses_for_auto(
    scheme: Any, asked: str, started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))])
    became: list[list[str]] = []
    monkeypatch.setattr(serve, "_become_vllm", lambda arguments, _: became.append(arguments) or 0)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **({"quantization_config": scheme} if scheme else {})}))
    (tmp_path / "model.bin").write_bytes(b"0")
    assert serve.main([f"--model={tmp_path}", f"--kv-cache-dtype={asked}"]) == 0
    assert [one for one in became[0] if one.startswith("--kv-cache-dtype=")][-1] == f"--kv-cache-dtype={started}"
