"""The import paths that we give vLLM as text name modules with the right classes."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from kvpilot_formats import formats, latent
from kvpilot_runtime import plugin
from kvpilot_runtime.config import connectors
from kvpilot_runtime.vllm_api import compat, hooks


def names_in(module: str) -> set[str]:
    """Return the top-level names in a module's file. Do not import it, because some modules need packages for GPUs."""
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


@pytest.mark.parametrize("on_cuda", [False, True])
def test_every_import_path_of_a_backend_exists(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(hooks, "route_backends", lambda _platform, paths: told.update(paths))
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _self: on_cuda)
    plugin.serve_dtype("k4v4")
    for path in told.values():
        module, _, name = path.rpartition(".")
        found = names_in(module)
        assert name in found or "__getattr__" in found, path  # Backends create their classes on first access.
    platform = "cuda" if on_cuda else "cpu"
    own = {f"kvpilot_runtime.backends.{platform}.{compat.backend_class(dtype)}" for dtype in formats.own_names()}
    own |= {f"kvpilot_runtime.backends.latent_{platform}.{compat.backend_class(one)}" for one in latent.names()}
    assert own == set(told.values())


@pytest.mark.parametrize("path", [one.ours for one in connectors.SERVED.values()])
def test_every_import_path_of_a_connector_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert name in names_in(module)
