"""What a model's config.json says of its KV cache: one reading for `kvpilot-serve`, `kvpilot plan` and the operator.

Pure Python: neither torch nor transformers, and no network. Fields that a config.json leaves out take the defaults of
transformers' own config classes, which `defaults.json` keeps (made by scripts/model_defaults.py).
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
