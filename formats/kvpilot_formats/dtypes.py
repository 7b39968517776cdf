"""All KV-cache dtypes: those of vLLM, ours, and ours for multi-head latent attention (MLA). Pure Python.

`DTYPES` joins the tables `formats.FORMATS` and `latent.LATENT_FORMATS`. The classes of both tables have the attributes
`ours`, `latent`, `has_residuals`, `calibrated_only`, `bits_per_element` and `recent_tokens`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from kvpilot_formats.formats import FORMATS, Format, named
from kvpilot_formats.latent import LATENT_FORMATS, LatentFormat

Dtype = Format | LatentFormat

DTYPES: Mapping[str, Dtype] = MappingProxyType({**FORMATS, **LATENT_FORMATS})
"""All dtypes by name."""


def parse(name: str) -> Dtype:
    """Return the dtype called `name`."""
    return named(DTYPES, name)


def names() -> tuple[str, ...]:
    """Return the names of all dtypes: those of vLLM, then ours for keys and values, then ours for latents."""
    return tuple(DTYPES)


def own_names(latent: bool) -> tuple[str, ...]:
    """Return the names of our dtypes, largest first: those for MLA if `latent`, else those for all other models."""
    return tuple(name for name, dtype in DTYPES.items() if dtype.ours and dtype.latent == latent)
