"""Find the weight files that vLLM's default loader reads, and their size. Other copies in the folder do not count."""

import json
import struct
from fnmatch import fnmatch
from pathlib import Path

from kvpilot_formats.models.config import ConfigError

_MAX_HEADER = 100 * 2**20  # limit of the safetensors format on a header, in bytes
_INDEX = "model.safetensors.index.json"
_MISTRAL, _MISTRAL_INDEX = "consolidated*.safetensors", "consolidated.safetensors.index.json"
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_DAMAGED = "; download the model again"


def weight_files(folder: Path) -> list[Path]:
    """Return the files that vLLM loads with `--load-format auto`, or GGUF files if there are no others.

    Mistral's `consolidated*.safetensors` take precedence. If there is an index, it selects among safetensors files.
    """
    consolidated = any(fnmatch(file.name, _MISTRAL) for file in folder.rglob("*") if file.is_file())
    patterns = (_MISTRAL,) if consolidated else ("*.safetensors", "*.bin", "*.pt", "*.gguf")
    for pattern in patterns:
        found = sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))
        if not found:
            continue
        if pattern.endswith(".safetensors"):
            return _indexed(found, folder / (_MISTRAL_INDEX if consolidated else _INDEX))
        found = [file for file in found if not file.name.endswith(_NOT_WEIGHTS)]
        if found:
            return found
        break
    raise ConfigError("the folder contains no weights (*.safetensors)" + _DAMAGED, missing=True)


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's weights in bytes. For safetensors files, take the sizes from their headers."""
    return sum(
        _tensor_bytes(file) if file.suffix == ".safetensors" else file.stat().st_size for file in weight_files(folder)
    )


def _indexed(found: list[Path], index: Path) -> list[Path]:
    """Return the files that the index names, or all files if there is no index."""
    if not index.is_file():
        return found
    try:
        named = {str(file) for file in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index.name} cannot be read ({error}){_DAMAGED}") from error
    if missing := sorted(named - {file.name for file in found}):
        raise ConfigError(f"{index.name} names {missing[0]!r}, which the folder does not hold: the download was cut short{_DAMAGED}")  # fmt: skip  # noqa: E501
    return [file for file in found if file.name in named]


def _tensor_bytes(file: Path) -> int:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER:
                raise ValueError("its header is longer than the format allows")
            header = json.loads(stream.read(length))
        ends = [int(t["data_offsets"][1]) for name, t in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"file {file.name!r} is damaged ({error}); download it again") from error
    data = max(ends, default=0)
    if 8 + length + data > size:
        raise ConfigError(f"file {file.name!r} holds {size} bytes of {8 + length + data}; the download was cut short{_DAMAGED}")  # fmt: skip  # noqa: E501
    return data
