"""vLLM, and what is wrapped in it, get import paths of ours as text: each leads to a module that has what it names."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from kvpilot_kernels import formats
from kvpilot_kernels.latent import formats as latent
from kvpilot_runtime import plugin
from kvpilot_runtime.config import carriers, offload, retention
from kvpilot_runtime.engine import compat, contract, hooks


def names_in(module: str) -> set[str]:
    """What a module's file defines at its top; nothing of it is imported, since some need a GPU's packages."""
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    found: set[str] = set()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that the plugin gives, in place of giving them to vLLM."""
    told: list[str] = []
    for name in ("around_attention", "around_scheduler", "around_kv_cache", "around_connectors", "around_layout"):
        monkeypatch.setattr(hooks, name, lambda *paths: told.extend(paths))
    for name in ("route_cpu_backends", "route_cuda_backends"):
        monkeypatch.setattr(hooks, name, lambda paths, _judge: told.extend(paths.values()))
    monkeypatch.setattr(type(retention.INFO), "publish", lambda _self: None)
    monkeypatch.setattr(contract, "broken", lambda _platform: ())
    monkeypatch.setenv(retention.VARIABLE, "HeavyHitters:4:64:256")
    return told


@pytest.mark.parametrize("on_cuda", [False, True])
def test_every_path_that_the_plugin_gives_vllm_leads_somewhere(
    on_cuda: bool, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _self: on_cuda)
    plugin.register()
    for path in given:
        module, _, name = path.rpartition(".")
        found = names_in(module)
        assert name in found or "__getattr__" in found, path  # backends make their classes when they are asked for
    platform = "cuda" if on_cuda else "cpu"
    own = {f"kvpilot_runtime.backends.{platform}.{compat.backend_class(dtype)}" for dtype in formats.own_names()}
    own |= {f"kvpilot_runtime.backends.latent_{platform}.{compat.backend_class(one)}" for one in latent.names()}
    assert own <= set(given)
    assert len(given) >= len(own) + 7  # attention and scheduler two each, the cache two, connectors


@pytest.mark.parametrize("path", [one.ours for one in carriers.SERVED.values()])
def test_a_connector_of_ours_is_where_its_carrier_says(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert name in names_in(module)


def test_the_disk_below_host_memory_is_where_its_configuration_says() -> None:
    assert offload.DISK in names_in(offload.DISK_MODULE)
