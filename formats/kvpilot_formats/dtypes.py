"""All KV-cache dtypes: vLLM's, ours, and ours for multi-head latent attention (MLA). Pure Python.

`DTYPES` joins the tables `formats.FORMATS` and `latent.LATENT_FORMATS`. Both classes of formats have `ours`, `latent`,
`has_ring`, `calibrated_only`, `bits_per_element` and `recent_tokens`.
"""

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
    """Return every dtype's name: vLLM's, then ours for keys and values, then ours for latents."""
    return tuple(DTYPES)


def own_names(latent: bool) -> tuple[str, ...]:
    """Return the names of our dtypes, the widest first: for MLA if `latent`, else for all other models."""
    return tuple(name for name, dtype in DTYPES.items() if dtype.ours and dtype.latent == latent)
