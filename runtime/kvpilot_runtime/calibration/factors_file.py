"""Calibration files: the static factors of every layer of one model, written by `kvpilot calibrate`.

A file is in safetensors format, with the float32 tensors `layers.{i}.key_mean`, `.key_scale`, `.value_mean`,
`.value_scale` and `.key_first`, each [kv_heads, head_dim]. Statistics of keys are taken after RoPE, as the cache stores
keys. The metadata identifies the model. `load` refuses a file of another model, because its factors would make answers
wrong without an error.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvpilot_formats import models
from kvpilot_formats.models.config import Fields
from kvpilot_formats.models.layers import kinds
from kvpilot_kernels.factors import Factors
from kvpilot_runtime.errors import EngineRefusedError

VARIABLE = "KVPILOT_CALIBRATION"
"""Environment variable with the path of the calibration file, or `off`. If it is unset, an engine calibrates itself."""

OFF = "off"

_KIND, _VERSION = "kvpilot-calibration", "2"
_NAMES = tuple(f.name for f in fields(Factors))
_NOT_IDENTITY = {
    "_name_or_path", "architectures", "attn_implementation", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "quantization_config",
}  # fmt: skip
"""Fields of config.json that do not affect keys and values, so that copies of a model may differ in them."""


class CalibrationError(EngineRefusedError):
    """Refusal of the calibration file at `path`. The message names field, value and remedy."""

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        self.path = path
        super().__init__(f"calibration file {str(path)!r}: {what}; {remedy}")


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model by which a calibration file recognizes it.

    Attributes:
        layers: number of layers.
        kv_heads: KV heads of a layer.
        head_dim: elements of a head.
        config_sha256: hash of config.json without the fields that do not affect the KV cache.
    """

    layers: int
    kv_heads: int
    head_dim: int
    config_sha256: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelFacts":
        """Read the facts from a config.json, or from the text config in it if there is one.

        Raises:
            ValueError: the config does not describe a decoder.
        """
        found = models.read(config)  # This fills in missing sizes with the defaults of the model's class.
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        kept = {key: value for key, value in text.items() if key not in _NOT_IDENTITY}
        return cls(
            layers=len(kinds(Fields(config))),
            kv_heads=found.kv_heads,
            head_dim=found.head_dim,
            config_sha256=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        )

    @classmethod
    def read(cls, folder: Path) -> "ModelFacts":
        """Read the facts of the model in `folder`.

        Raises:
            OSError, ValueError: config.json cannot be read, or does not describe a decoder.
        """
        return cls.of(json.loads((folder / "config.json").read_text()))


@dataclass(frozen=True)
class Calibration:
    """Calibration factors of all layers of a model, in the order of the layers."""

    layers: tuple[Factors, ...]

    def for_layer(self, layer_name: str) -> Factors:
        """Return the factors of vLLM's layer `layer_name`, such as ``model.layers.12.self_attn.attn``.

        Raises:
            ValueError: the name does not contain the number of a calibrated layer.
        """
        found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", layer_name)
        if found is None or int(found[1]) >= len(self.layers):
            raise ValueError(f"layer {layer_name!r} is none of the {len(self.layers)} calibrated ones; serve without "
                             f"{VARIABLE}")  # fmt: skip
        return self.layers[int(found[1])]

    def shard(self, rank: int, size: int) -> "Calibration":
        """Return the factors of one tensor-parallel rank's KV heads. Ranks share heads if they outnumber the heads.

        Raises:
            ValueError: `size` and the number of heads are not multiples of each other, or the rank does not exist.
        """
        heads = self.layers[0].key_mean.shape[0]
        if not 0 <= rank < size or (heads % size and size % heads):
            raise ValueError(f"rank {rank} of {size} has no share of {heads} KV heads; use a tensor-parallel size that "
                             "divides them or is a multiple of them")  # fmt: skip
        count = max(1, heads // size)
        first = rank * count if heads >= size else rank // (size // heads)
        cut = slice(first, first + count)
        return Calibration(tuple(Factors(*(getattr(f, name)[cut] for name in _NAMES)) for f in self.layers))


def save(path: Path, layers: list[Factors], facts: ModelFacts) -> None:
    """Write the factors and facts of a model to a calibration file, atomically."""
    tensors = {
        f"layers.{i}.{name}": getattr(factors, name).float().cpu().contiguous().clone()
        for i, factors in enumerate(layers)
        for name in _NAMES
    }
    metadata = {f.name: str(getattr(facts, f.name)) for f in fields(facts)}
    scratch = path.with_name(path.name + ".part")
    save_file(tensors, scratch, {"format": _KIND, "version": _VERSION, **metadata})
    scratch.replace(path)


def asked() -> bool:
    """Return True if `KVPILOT_CALIBRATION` names a file, or is `off`."""
    return bool(os.environ.get(VARIABLE))


def turned_off() -> bool:
    """Return True if `KVPILOT_CALIBRATION` is `off`."""
    return os.environ.get(VARIABLE) == OFF


def digest(layers: Sequence[Factors]) -> str:
    """Return a hash of the calibration factors of all layers, as 16 hexadecimal digits."""
    found = hashlib.sha256()
    for factors in layers:
        for name in _NAMES:
            found.update(getattr(factors, name).float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def join_digests(digests: Sequence[str]) -> str:
    """Return one hash of the hashes of all ranks' factors, in the order of the ranks."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def load(path: Path, facts: ModelFacts) -> Calibration:
    """Read a calibration file for the model of `facts`.

    Raises:
        CalibrationError: the file does not exist, is for another model or version, or is damaged: a tensor is missing,
            or its shape, its dtype or a number in it is invalid. Scales must be positive.
    """
    again = "run `kvpilot calibrate` with the model that is served"
    if not path.is_file():
        raise CalibrationError(
            path, "there is no such file", f"check {VARIABLE}, or leave it out: the engine then calibrates itself"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, OSError) as error:
        raise CalibrationError(path, f"it is not a safetensors file ({error})", again) from error
    if (metadata.get("format"), metadata.get("version")) != (_KIND, _VERSION):
        got = f"format {metadata.get('format')!r} version {metadata.get('version')!r}"
        raise CalibrationError(path, f"{got} is not {_KIND!r} version {_VERSION!r}", again)
    for f in fields(facts):
        wanted, held = str(getattr(facts, f.name)), metadata.get(f.name)
        if held != wanted:
            raise CalibrationError(path, f"{f.name} is {held!r}, but the model's is {wanted!r}", again)
    shape = (facts.kv_heads, facts.head_dim)
    return Calibration(tuple(Factors(*_checked(path, tensors, i, shape)) for i in range(facts.layers)))


def _checked(path: Path, tensors: dict[str, torch.Tensor], layer: int, shape: tuple[int, int]) -> list[torch.Tensor]:
    """Return the tensors of one layer; raise CalibrationError if one is missing or wrong."""
    found = []
    for name in _NAMES:
        key = f"layers.{layer}.{name}"
        tensor = tensors.get(key)
        problem = None
        if tensor is None:
            problem = "is missing"
        elif tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            problem = f"is {tensor.dtype} {tuple(tensor.shape)} and should be torch.float32 {shape}"
        elif not tensor.isfinite().all():
            problem = f"holds {int((~tensor.isfinite()).sum())} numbers that are not finite"
        elif name.endswith("_scale") and not (tensor > 0).all():
            problem = f"holds the scale {float(tensor.min())}, and scales are positive"
        if problem or tensor is None:
            raise CalibrationError(path, f"{key} {problem}", "the file is damaged: run `kvpilot calibrate` again")
        found.append(tensor)
    return found
