"""What a preflight is asked, and what it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvpilot_formats import models
from kvpilot_runtime.config.retention import SinksAndWindow

CALIBRATION_OFF = "off"
"""In the place of a calibration file: serve without factors."""


@dataclass(frozen=True)
class Request:
    """What `kvpilot-serve` was asked for; sizes in bytes, lengths in tokens.

    `dtype` is of the KV cache and `model_dtype` of the weights; `skip_layers` and `recent`, the tokens of the recent
    window, are None when the user said nothing. `retention` is None where all tokens are kept. `disk_path` is the
    folder, and `disk_bytes` the size, of each engine's file below offloaded pages in host memory. `fit_length`:
    vLLM settles the longest context that fits.
    """

    model: str
    dtype: str = "auto"
    model_dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel: int = 1
    memory_fraction: float = 0.9
    kv_bytes: int | None = None
    skip_layers: tuple[str, ...] | None = None
    calibration: str | None = None
    revision: str | None = None
    others: tuple[str, ...] = ()
    recent: int | None = None
    retention: SinksAndWindow | None = None
    disk_path: str | None = None
    disk_bytes: int | None = None
    fit_length: bool = False


@dataclass
class Findings:
    """What a preflight that passed has to say.

    Attributes:
        config: what the model says of itself; None where it could not be had.
        skip_layers: the layers that are to stay in 16 bits.
        disable_window: vLLM is to build layers without the window that no context of this model can leave.
        warnings: as (reason, message).
    """

    config: models.Architecture | None = None
    skip_layers: tuple[str, ...] = ()
    disable_window: bool = False
    warnings: list[tuple[str, str]] = field(default_factory=list)


def model_folder(model: str) -> Path | None:
    """The folder that `model` names, or None for a hub id such as `Qwen/Qwen3-8B`."""
    path = Path(model)
    return path if path.is_absolute() or model.startswith(".") or path.exists() else None
