"""Load this rank's share of a calibration file, and hash the factors of all ranks of this engine."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvpilot_runtime.calibration import factors_file
from kvpilot_runtime.ranks import of_all_ranks


def calibration_of(vllm_config: Any) -> factors_file.Calibration | None:
    """Load the file that `KVPILOT_CALIBRATION` names, for the engine's model. Return None if it names none.

    Raises:
        CalibrationError: the file is missing, damaged or of another model.
        ValueError: the ranks cannot share the KV heads.
    """
    if not factors_file.asked() or factors_file.turned_off():
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return _read(
        model.model, model.revision, parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size
    )


@cache
def _read(model: str, revision: str | None, rank: int, size: int) -> factors_file.Calibration:
    folder = Path(model)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(cached_file(model, "config.json", revision=revision)).parent
    found = factors_file.load(Path(os.environ[factors_file.VARIABLE]), factors_file.ModelFacts.read(folder))
    return found.shard(rank, size)


def factors_hash(layers: dict[str, Any], device: torch.device) -> str:
    """Return a hash of the factors of all layers and ranks; every rank must call this."""
    # Leave draft models out, because their factors do not change answers.
    own = (layer for layer in layers.values() if not layer.impl.drafting)
    every = of_all_ranks(factors_file.digest([layer.impl.factors(layer, device) for layer in own]))
    return every[0] if len(every) == 1 else factors_file.join_digests(every)
