"""Read a model's config.json and the size of its weights from its folder, without torch."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvpilot_formats.models import Architecture, ConfigError, load, read, weights
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight.elsewhere import overridden


def read_config(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Architecture:
    """Read `config.json` (`path` is the file or its folder), and apply `changes`, the fields of `--hf-overrides`."""
    try:
        if not path.exists():
            raise ConfigError("there is no such folder", missing=True)
        return read(overridden(load(path / "config.json" if path.is_dir() else path), changes))
    except ConfigError as error:
        if error.missing:
            raise PreflightError("ModelNotFound", f"model {str(path)!r}: {error}; give a folder with config.json and weights, and check that its volume is mounted") from None  # fmt: skip  # noqa: E501
        raise PreflightError("ModelUnsupported", f"model {str(path)!r}: {error}") from error


def weight_bytes(folder: Path) -> int:
    """Return the size in bytes of the weights that vLLM's default loader reads."""
    try:
        return weights.weight_bytes(folder)
    except ConfigError as error:
        raise PreflightError("ModelNotFound", f"model {str(folder)!r}: {error}") from error
