"""All KV-cache dtypes of a service: vLLM's, ours, and ours for multi-head latent attention. Pure Python.

The tables are `formats.FORMATS` and `latent.formats.LATENT_FORMATS`. Callers that need no layout take a dtype from
here, and both kinds have `ours`, `latent`, `has_ring`, `calibrated_only`, `bits_per_element` and `recent_tokens`.
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
    """Return the dtype called `name`.

    Raises:
        UnknownFormatError: no dtype has this name; the message lists those that exist.
    """
    return named(DTYPES, name)


def names() -> tuple[str, ...]:
    """Return every dtype: vLLM's, those of keys and values, those of latents."""
    return tuple(DTYPES)


def own_names(latent: bool) -> tuple[str, ...]:
    """Return our dtypes for models with multi-head latent attention, or for all others, the widest first."""
    return tuple(name for name, dtype in DTYPES.items() if dtype.ours and dtype.latent == latent)
