"""kvpilot's own formats as codecs for the accuracy table: what `PackedPages` stores, read back."""

from __future__ import annotations

import torch

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.formats import Format
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_kernels.reference.codec import Codec


def own(fmt: Format, factors: Factors | None = None) -> Codec:
    """One layer's cache in `fmt`, with its calibration or without."""
    return Codec(
        fmt.name + ("+calibrated" if factors else ""),
        lambda x: _read_back(x, fmt, "key", factors),
        lambda x: _read_back(x, fmt, "value", factors),
        lambda dim: fmt.key.bits + 16 / fmt.group_size(dim),
        lambda dim: fmt.value.bits + 16 / fmt.group_size(dim),
    )


def _read_back(x: torch.Tensor, fmt: Format, side: str, factors: Factors | None) -> torch.Tensor:
    return round_trip(x, fmt, side, factors).float()
