"""Folders of weights: safetensors files with a real header, and the index beside them."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path


def write_safetensors(file: Path, size: int) -> None:
    """Write a file with one tensor of `size` bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size)


def write_index(file: Path, names: Iterable[str]) -> None:
    """Write an index that names the file of each tensor of a model."""
    file.write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}))
