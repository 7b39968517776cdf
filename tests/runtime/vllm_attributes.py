"""Find the attributes of vLLM's modules and classes that our plugin replaces, in a separate process.

The process imports vLLM and every module that the plugin may wrap. It registers the plugin, may configure an option,
and reports the attributes that have become other objects.
"""

import contextlib
import importlib
import json
import os
import pickle
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.own_process import ask

Attributes = dict[tuple[str, str], int]


@dataclass
class Asked:
    """Dtypes for which the process configures a cache after it has registered the plugin."""

    dtypes: tuple[str, ...] = ()


@dataclass
class Told:
    """Attributes of vLLM that the plugin replaced by registration, and by the end of all configurations.

    An attribute is written as `module.Class.name`. `environment` has our variables, which later processes inherit.
    """

    registered: list[str]
    configured: list[str]
    environment: dict[str, str]


def replaced(dtypes: tuple[str, ...] = (), **environment: str) -> Told:
    """Let a new process register the plugin and configure the dtypes, and return its report."""
    return Told(**ask("vllm_attributes", Asked(dtypes), **environment))


def attributes() -> dict[str, Any]:
    """Return each attribute of vLLM's modules, and of the classes that they define, by dotted name."""
    found: dict[str, Any] = {}
    for name, module in sorted(sys.modules.items()):
        if not (name == "vllm" or name.startswith("vllm.")):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{attribute}": held for attribute, held in list(vars(value).items())}
    return found


def others(before: dict[str, Any]) -> list[str]:
    """Return attributes that were replaced or removed. Attributes that imports add do not count."""
    now = attributes()
    return sorted(name for name, value in before.items() if now.get(name) is not value)


def look(asked: Asked) -> Told:
    """Register the plugin, configure the dtypes, and report the replaced attributes."""
    import kvpilot_runtime.plugin

    sources = (file.read_text() for file in Path(kvpilot_runtime.plugin.__file__).parent.rglob("*.py"))
    for module in {name for text in sources for name in re.findall(r'"(vllm\.[\w.]+):', text)}:
        with contextlib.suppress(ImportError):  # Modules of another platform cannot be imported.
            importlib.import_module(module)

    before = attributes()
    kvpilot_runtime.plugin.register()
    registered = others(before)
    from vllm.config.cache import CacheConfig

    for dtype in asked.dtypes:
        pickle.loads(pickle.dumps(CacheConfig(cache_dtype=dtype)))  # noqa: S301 - its own
    environment = {name: value for name, value in os.environ.items() if name.startswith("KVPILOT_")}
    return Told(registered, others(before), environment)


def main() -> None:
    """Answer the request on stdin."""
    print(json.dumps(asdict(look(Asked(**json.load(sys.stdin))))), flush=True)


if __name__ == "__main__":
    main()
