"""Input and result of a preflight: the request to start an engine, and what preflight found out about it."""

from dataclasses import dataclass, field
from pathlib import Path

from kvpilot_formats import models
from kvpilot_formats.arguments import Arguments, read

CALIBRATION_OFF = "off"
"""Value of `KVPILOT_CALIBRATION` that turns calibration factors off."""


@dataclass(frozen=True)
class Request:
    """Request to `kvpilot-serve`. Sizes are in bytes, lengths in tokens.

    Attributes:
        dtype: KV-cache dtype.
        model_dtype: dtype of the weights.
        memory_fraction: `--gpu-memory-utilization`.
        kv_bytes: size of the KV cache; None if vLLM chooses it.
        skip_layers: layers that stay in 16 bits (`--kv-cache-dtype-skip-layers`); None if not given.
        calibration: `KVPILOT_CALIBRATION`, a calibration file or `off`; None if not given.
        others: arguments of `vllm serve` that are not fields here.
        recent: tokens of the recent window, or `formats.ALL`; None if not given.
        fit_length: True if vLLM chooses the longest context that fits.
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
    recent: int | str | None = None
    fit_length: bool = False

    @property
    def arguments(self) -> Arguments:
        """The arguments in `others`, parsed as vLLM parses them."""
        return read(self.others)


@dataclass
class Findings:
    """Facts that a preflight found about a request that it accepts.

    Attributes:
        config: the model's architecture; None if its config could not be read.
        skip_layers: layers that stay in 16 bits.
        disable_window: True if vLLM must ignore the sliding window, because no context is longer than the window.
        warnings: warnings as (reason, message).
    """

    config: models.Architecture | None = None
    skip_layers: tuple[str, ...] = ()
    disable_window: bool = False
    warnings: list[tuple[str, str]] = field(default_factory=list)


def model_folder(model: str) -> Path | None:
    """Return the folder that `model` names, or None for a hub id such as `Qwen/Qwen3-8B`."""
    path = Path(model)
    return path if path.is_absolute() or model.startswith(".") or path.exists() else None
