"""The calibration of the engine that this process belongs to: this rank's share of the file, read once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from kvpilot_runtime import calibration


def calibration_of(vllm_config: Any) -> calibration.Calibration | None:
    """What `KVPILOT_CALIBRATION` names for the model being loaded, or None when it names nothing.

    Raises:
        CalibrationError: the file is damaged or belongs to another model.
        ValueError: the KV heads cannot be shared by the ranks.
    """
    if not calibration.asked() or calibration.turned_off():
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return _read(
        model.model, model.revision, parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size
    )


@cache
def _read(model: str, revision: str | None, rank: int, size: int) -> calibration.Calibration | None:
    folder = Path(model)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(cached_file(model, "config.json", revision=revision)).parent
    found = calibration.from_environment(calibration.ModelFacts.read(folder))
    return found.shard(rank, size) if found else None
