"""Facts about a model reach the operator: from config.json by the environment of kvpilot-serve to a metric."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from kvpilot_formats.models import read
from kvpilot_runtime import serve
from kvpilot_runtime.metrics import model_info
from kvpilot_runtime.preflight.check import read_config
from kvpilot_smallmodels.models import tiny_gemma3, tiny_llama

LLAMA = 'kvpilot_model_info{head_dim="64",kv_heads="2",layers="2",mla="false",window_layers="0"} 1.0'


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the Prometheus registry of the process after each test."""
    monkeypatch.delenv(model_info.VARIABLE, raising=False)
    yield
    gauge = REGISTRY._names_to_collectors.get(model_info.NAME)
    if gauge is not None:
        REGISTRY.unregister(gauge)


def lines() -> list[str]:
    return [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith(model_info.NAME)]


def test_a_config_becomes_one_series_even_if_the_plugin_is_loaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(model_info.VARIABLE, model_info.encode(read_config(tiny_llama())))
    assert model_info.publish()
    assert not model_info.publish()
    assert lines() == [LLAMA]


def test_the_gauge_reports_window_layers_and_latent_attention(tmp_path: Path) -> None:
    gemma = json.loads(model_info.encode(read_config(tiny_gemma3())))
    assert 0 < gemma["window_layers"] < gemma["layers"]
    raw = json.loads((tiny_llama() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "deepseek_v3", "kv_lora_rank": 512}))
    assert json.loads(model_info.encode(read_config(tmp_path)))["mla"] is True


def test_layers_with_chunked_attention_do_not_count_as_window_layers() -> None:
    corpus = json.loads((Path(__file__).parents[2] / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
    facts = [read(entry["config"]) for entry in corpus if "Llama-4" in entry["model"]]
    assert all(found.chunked_layers for found in facts)
    assert {json.loads(model_info.encode(found))["window_layers"] for found in facts} == {0}


def test_without_the_environment_variable_no_model_info_is_published() -> None:
    assert not model_info.publish()
    assert lines() == []


def test_only_the_process_that_becomes_vllm_gets_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _, __, environment: started.append(environment))
    serve.main([f"--model={tiny_llama()}"])
    [environment] = started
    assert environment[model_info.VARIABLE] == model_info.encode(read_config(tiny_llama()))
    assert model_info.VARIABLE not in os.environ


def test_a_model_without_a_readable_config_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _, __, environment: started.append(environment))
    serve.main(["--model=some-team/some-model"])
    assert model_info.VARIABLE not in started[0]
