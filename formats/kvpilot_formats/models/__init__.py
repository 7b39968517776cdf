"""Facts about the KV cache from a model's config.json, for `kvpilot-serve`, `kvpilot plan` and the operator.

Pure Python, without torch, transformers and network. Missing fields take the defaults of transformers' own config
classes, which `defaults.json` has (made by scripts/model_defaults.py).
"""

from kvpilot_formats.models.architecture import Architecture, Group, Kind
from kvpilot_formats.models.auto import auto_dtype
from kvpilot_formats.models.config import ConfigError, known, load
from kvpilot_formats.models.read import read
from kvpilot_formats.models.verdict import unsupported, unsupported_latent

__all__ = [
    "Architecture", "ConfigError", "Group", "Kind", "auto_dtype", "known", "load", "read", "unsupported",
    "unsupported_latent",
]  # fmt: skip
