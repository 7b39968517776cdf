"""kvpilot's own formats as codecs for the accuracy table, with the round trip of `PackedPages`."""

from __future__ import annotations

import torch

from kvpilot_formats.formats import Format
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_kernels.reference.codec import Codec


def own(fmt: Format, factors: Factors | None = None, recent: bool = False) -> Codec:
    """Return the codec of one layer in `fmt`, with or without factors. With `recent`, include the ring."""
    return Codec(
        fmt.name + ("+calibrated" if factors else ""),
        lambda x: _read_back(x, fmt, "key", factors, recent),
        lambda x: _read_back(x, fmt, "value", factors, recent),
        lambda dim: (fmt.key.bits * fmt.row_dim(dim) + 16 * fmt.groups(dim)) / dim,
        lambda dim: (fmt.value.bits * fmt.row_dim(dim) + 16 * fmt.groups(dim)) / dim,
    )


def _read_back(x: torch.Tensor, fmt: Format, side: str, factors: Factors | None, recent: bool) -> torch.Tensor:
    return round_trip(x, fmt, side, factors, recent).float()
