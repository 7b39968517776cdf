"""Preflight and planner count exactly the weight files that vLLM's own loader reads."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from kvpilot_cli.plan import facts_config
from kvpilot_formats.models import ConfigError, weights
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check, weight_bytes
from kvpilot_runtime.preflight.request import Request
from support.own_process import ask
from support.weight_folders import write_index, write_safetensors


def main() -> None:
    """Read folders from stdin, and print the names of the weight files that vLLM would load from each."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig())
    found: list[list[str] | None] = []
    for folder in json.load(sys.stdin):
        try:
            files = loader._prepare_weights(folder, None, None, True, None)[1]
        except (RuntimeError, FileNotFoundError):
            found.append(None)
        else:
            found.append(sorted(Path(file).name for file in files))
    print(json.dumps(found))


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PARTS = {
    "shards": SHARDS,
    "consolidated": ("consolidated.safetensors",),
    "consolidated below": ("original/consolidated.safetensors",),
    "adapter": ("adapter.safetensors",),
    "hidden": (".model.safetensors",),
    "bin": ("pytorch_model.bin",),
    "optimizer": ("optimizer.bin",),
    "pt": ("model.pt",),
}
INDICES = (None, SHARDS, SHARDS[:1], ("gone.safetensors",))
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768,
    "max_position_embeddings": 32768, "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip


def made(folder: Path, files: tuple[str, ...], index: tuple[str, ...] | None) -> Path:
    for name in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(file, 100)
    folder.mkdir(exist_ok=True)
    if index is not None:
        write_index(folder / "model.safetensors.index.json", index)
    return folder


def ours(folder: Path) -> list[str] | None:
    try:
        return sorted(file.name for file in weights.weight_files(folder))
    except ConfigError:
        return None


def test_the_counted_files_are_those_that_vllms_default_loader_reads(tmp_path: Path) -> None:
    kinds = itertools.product((False, True), repeat=len(PARTS))
    folders = [
        made(
            tmp_path / f"{i}-{j}",
            tuple(name for names, there in zip(PARTS.values(), chosen, strict=True) if there for name in names),
            index,
        )
        for i, chosen in enumerate(kinds)
        for j, index in enumerate(INDICES)
    ]
    theirs = ask("test_weight_files", [str(folder) for folder in folders])
    assert any(found and len(found) == 2 for found in theirs)
    differs = {
        tuple(file.name for file in folder.rglob("*")): (found, ours(folder))
        for folder, found in zip(folders, theirs, strict=True)
        if found != ours(folder)
    }
    assert differs == {}


def test_weights_present_in_two_formats_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("NVIDIA L4", 23_034 * 2**20, 0, (8, 9))])
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL_7B))
    for name in SHARDS:
        write_safetensors(tmp_path / name, 7_248_000_000)
    write_index(tmp_path / "model.safetensors.index.json", SHARDS)
    write_safetensors(tmp_path / "consolidated.safetensors", 14_496_000_000)
    check(Request(str(tmp_path), "auto", max_model_len=8192))
    assert weight_bytes(tmp_path) == 14_496_000_000
    assert facts_config.read_folder(tmp_path).weight_bytes == 14_496_000_000


def test_a_missing_shard_that_the_index_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL_7B))
    made(tmp_path, SHARDS[:1], SHARDS)
    with pytest.raises(PreflightError, match=rf"names '{SHARDS[1]}', which the folder does not hold") as caught:
        weight_bytes(tmp_path)
    assert caught.value.reason == "ModelNotFound"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 1}', "[" * 100_000])
def test_an_invalid_index_file_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    made(tmp_path, SHARDS, None)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PreflightError, match=r"model\.safetensors\.index\.json cannot be read"):
        weight_bytes(tmp_path)


def test_a_folder_whose_name_has_brackets_is_read(tmp_path: Path) -> None:
    assert weights.weight_bytes(made(tmp_path / "a[1]*", ("model.safetensors",), None)) == 100
