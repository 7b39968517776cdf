"""Find values that Triton's cache key of a compiled kernel does not cover, and print them as JSON.

The key covers functions and constexpr globals. It covers neither attributes of a module that a function reads, nor
plain globals in a `constexpr_function`. If a kernel read such a value, a cache that outlives a kvpilot version would
return an old kernel. Run this in a process that compiles kernels.
"""

import ast
import importlib
import json
import pkgutil
import sys
from types import ModuleType
from typing import Any

from triton.language.core import constexpr
from triton.runtime.jit import JITCallable

CHANGED = {
    "ZERO_STEPS": ("kvpilot_formats.layouts", 29),
    "ZERO_BITS": ("kvpilot_formats.layouts", 6),
    "RANK": ("kvpilot_formats.latent", 256),
}
"""Constants of other modules that kernels read, each with a different value."""


def functions() -> dict[str, JITCallable]:
    """Return every function of the package that Triton compiles or runs during compilation, by module and name."""
    gpu = importlib.import_module("kvpilot_kernels.gpu")
    found = pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}.")
    modules = [importlib.import_module(one.name) for one in found]
    return {
        f"{module.__name__.removeprefix('kvpilot_kernels.gpu.')}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITCallable) and value.__module__ == module.__name__
    }


def unseen(function: JITCallable) -> list[str]:
    """Return the names that a function reads, but whose values are not part of its cache key."""
    nodes, scope = list(ast.walk(function.parse())), function.get_capture_scope()
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    read = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    by_place = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call) and node.args}
    return sorted(
        name for name in read & set(scope) if not _seen(scope[name]) and (name in by_place or not _record(scope[name]))
    )


def _record(value: Any) -> bool:
    """Return True for a NamedTuple without defaults. Its fields are given where it is made, in the function's text."""
    return isinstance(value, type) and issubclass(value, tuple) and getattr(value, "_field_defaults", None) == {}


def _seen(value: Any) -> bool:
    if isinstance(value, (JITCallable, constexpr)):
        return True
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return home.partition(".")[0] == "triton"


def keys(constant: str = "") -> dict[str, str]:
    """Import the package again, with one of the constants in `CHANGED` changed. Return each function's cache key."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kvpilot_formats", "kvpilot_kernels")]:
        del sys.modules[name]
    if constant:
        module, value = CHANGED[constant]
        setattr(importlib.import_module(module), constant, value)
    return {name: one.cache_key for name, one in functions().items()}


if __name__ == "__main__":
    before = keys()
    print(json.dumps({
        "functions": len(before),
        "unseen": {name: found for name, one in functions().items() if (found := unseen(one))},
        "changed": {one: [name for name, key in keys(one).items() if key != before[name]] for one in CHANGED},
        "same": keys() == before,
    }))  # fmt: skip
