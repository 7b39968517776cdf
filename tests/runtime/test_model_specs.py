"""The layers that we read for published models (published.json) equal the KV-cache specs that vLLM builds for them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpilot_formats.models import Architecture, Kind, read
from kvpilot_runtime.preflight import installed
from support.own_process import ask

ROOT = Path(__file__).parents[2]
CORPUS = json.loads((ROOT / "cli/kvpilot_cli/plan/published.json").read_text())["models"]
BUILT = [entry for entry in CORPUS if "vllm" not in entry]
"""Models that vLLM's CPU build can build. The entries of other models have a reason."""
LARGEST_FIRST = sorted(BUILT, key=lambda entry: -read(entry["config"]).layers)
ONE_OF_EACH = list({(entry["family"], read(entry["config"]).idle_window): entry for entry in LARGEST_FIRST}.values())
"""Smallest model of each family, with and without an unused window."""
SPECS = {
    "FullAttentionSpec": Kind.FULL, "MLAAttentionSpec": Kind.FULL, "SlidingWindowSpec": Kind.WINDOW,
    "ChunkedLocalAttentionSpec": Kind.CHUNKED, "MambaSpec": Kind.STATE, "CrossAttentionSpec": Kind.NONE,
}  # fmt: skip


def built(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the layers that vLLM builds, with the arguments that kvpilot-serve passes for our dtypes."""
    asked = {
        entry["model"]: (entry["config"], {"disable_sliding_window": read(entry["config"]).idle_window})
        for entry in entries
    }
    found: dict[str, Any] = ask("support.vllm_specs", asked)
    return found


def vllms(found: dict[str, Any]) -> tuple[Any, ...]:
    """Return groups as (kind, KV heads, key, value, window, bytes of a token, layers), states, and shared layers."""
    groups = [
        (SPECS[spec].value, *rest) for spec, *rest in found["groups"] if SPECS[spec] not in (Kind.STATE, Kind.NONE)
    ]
    states = sum(group[-1] for group in found["groups"] if SPECS[group[0]] is Kind.STATE)
    return sorted(groups, key=str), states, found["shared"]


def ours(facts: Architecture) -> tuple[Any, ...]:
    groups = [
        (group.kind.value, 1, facts.latent, facts.latent, 0, 2 * facts.latent, group.layers)
        if facts.latent
        else (group.kind.value, group.kv_heads, group.head_dim, group.value_dim, group.window,
              2 * group.kv_heads * (group.head_dim + group.value_dim), group.layers)
        for group in facts.groups
    ]  # fmt: skip
    return sorted(groups, key=str), facts.state_layers, facts.shared_layers


def differences(entries: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    facts = {entry["model"]: read(entry["config"]) for entry in entries}
    return {
        name: found[name] if "failed" in found[name] else (vllms(found[name]), ours(facts[name]))
        for name in facts
        if "failed" in found[name] or vllms(found[name]) != ours(facts[name])
    }


def test_our_reading_of_each_familys_layers_equals_vllms() -> None:
    assert len(ONE_OF_EACH) >= 20
    assert any(read(entry["config"]).idle_window for entry in ONE_OF_EACH)
    assert differences(ONE_OF_EACH, built(ONE_OF_EACH)) == {}


@pytest.mark.long
def test_our_reading_of_every_published_models_layers_equals_vllms() -> None:
    found = built(BUILT)
    assert sum(bool(answer.get("groups")) for answer in found.values()) >= 160
    assert differences(BUILT, found) == {}


def test_each_model_that_vllm_cannot_build_here_has_a_recorded_reason() -> None:
    assert len(BUILT) >= 160
    assert all(entry["vllm"].strip() for entry in CORPUS if "vllm" in entry)


@pytest.mark.long
def test_our_default_layers_of_every_class_equal_vllms() -> None:
    script = ROOT / "tests" / "support" / "config_classes.py"
    done = subprocess.run(
        [sys.executable, str(script), "defaults"], capture_output=True, text=True, check=True, timeout=900
    )
    known = installed.known_architectures()
    entries = [
        {"model": kind, "config": config}
        for kind, config in json.loads(done.stdout).items() if config["architectures"][0] in known
    ]  # fmt: skip
    found = built(entries)
    here = [entry for entry in entries if "failed" not in found[entry["model"]]]
    assert len(here) >= 60
    assert differences(here, found) == {}
