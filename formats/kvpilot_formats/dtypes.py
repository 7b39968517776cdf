"""Every KV-cache dtype that a service may ask for: vLLM's, ours, and ours of multi-head latent attention. Pure Python.

The tables are `formats.FORMATS` and `latent.formats.LATENT_FORMATS`; who needs no layout takes a dtype from here and
asks either kind the same: `ours`, `latent`, `has_ring`, `calibrated_only`, `bits_per_element`, `recent_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvpilot_formats.formats import FORMATS, Format, named
from kvpilot_formats.latent import LATENT_FORMATS, LatentFormat

Dtype = Format | LatentFormat

DTYPES: Mapping[str, Dtype] = MappingProxyType({**FORMATS, **LATENT_FORMATS})
"""Every dtype by name."""


def parse(name: str) -> Dtype:
    """The dtype called `name`.

    Raises:
        UnknownFormatError: no dtype has this name; the message lists those that exist.
    """
    return named(DTYPES, name)


def names() -> tuple[str, ...]:
    """Every dtype: vLLM's, those of keys and values, those of latents."""
    return tuple(DTYPES)


def own_names(latent: bool) -> tuple[str, ...]:
    """The dtypes of ours for models with multi-head latent attention, or for all others, the widest first."""
    return tuple(name for name, dtype in DTYPES.items() if dtype.ours and dtype.latent == latent)
