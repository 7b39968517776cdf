"""All KV-cache dtypes of a service: vLLM's, ours, and ours for multi-head latent attention. Pure Python.

The tables are `formats.FORMATS` and `latent.LATENT_FORMATS`. Callers that need no layout look a dtype up here. Dtypes
of both tables have `ours`, `latent`, `has_ring`, `calibrated_only`, `bits_per_element` and `recent_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvpilot_formats.formats import FORMATS, Format, named
from kvpilot_formats.latent import LATENT_FORMATS, LatentFormat

Dtype = Format | LatentFormat

DTYPES: Mapping[str, Dtype] = MappingProxyType({**FORMATS, **LATENT_FORMATS})
"""Dtypes by name."""


def parse(name: str) -> Dtype:
    """Return the dtype called `name`."""
    return named(DTYPES, name)


def names() -> tuple[str, ...]:
    """Return every dtype: vLLM's, then those of keys and values, then those of latents."""
    return tuple(DTYPES)


def own_names(latent: bool) -> tuple[str, ...]:
    """Return our dtypes, the widest first: those for multi-head latent attention, or those for all other models."""
    return tuple(name for name, dtype in DTYPES.items() if dtype.ours and dtype.latent == latent)
