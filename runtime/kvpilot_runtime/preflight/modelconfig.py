"""What a model's folder says about it, read without torch: config.json and the headers of its weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvpilot_kernels.models import Architecture, ConfigError, load, read
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight.elsewhere import overridden

_MAX_HEADER = 100 * 2**20  # the safetensors format's own limit on a header


def read_config(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Architecture:
    """Read `config.json` (the file itself, or the folder that holds it), with the fields of `--hf-overrides` changed.

    Raises:
        PreflightError: ModelNotFound when there is no such file; ModelUnsupported when it cannot be understood.
    """
    try:
        if not path.exists():
            raise ConfigError("there is no such folder", missing=True)
        return read(overridden(load(path / "config.json" if path.is_dir() else path), changes))
    except ConfigError as error:
        if error.missing:
            raise PreflightError("ModelNotFound", f"model {str(path)!r}: {error}; give a folder with config.json and weights, and check that its volume is mounted") from None  # fmt: skip  # noqa: E501
        raise PreflightError("ModelUnsupported", f"model {str(path)!r}: {error}") from error


def weight_bytes(folder: Path) -> int:
    """Bytes of the model's weights, summed over the tensors that the safetensors headers list.

    Raises:
        PreflightError: ModelNotFound, the folder has no weights, or a file is cut short.
    """
    total, files = 0, sorted(folder.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > _MAX_HEADER:
                    raise ValueError("its header is longer than the format allows")
                header = json.loads(stream.read(length))
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            raise PreflightError("ModelNotFound", f"model file {str(file)!r} is damaged ({error}); download it again") from error  # fmt: skip  # noqa: E501
        data = max(ends, default=0)
        if 8 + length + data > size:
            raise PreflightError(
                "ModelNotFound",
                f"model file {str(file)!r} holds {size} bytes of {8 + length + data}; the download was cut short",
            )
        total += data
    if files:
        return total
    total = sum(f.stat().st_size for pattern in ("*.bin", "*.pt", "*.gguf") for f in folder.glob(pattern))
    if not total:
        raise PreflightError(
            "ModelNotFound", f"model {str(folder)!r} holds no weights (*.safetensors); download the model again"
        )
    return total
