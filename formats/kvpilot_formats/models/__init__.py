"""Size and kind of a model's KV cache, read from config.json for `kvpilot-serve`, `kvpilot plan` and the operator.

Pure Python: it imports neither torch nor transformers and uses no network. Missing fields take the defaults of
transformers' config classes, from `defaults.json` (written by scripts/model_defaults.py).
"""

from kvpilot_formats.models.architecture import (
    Architecture,
    Group,
    Kind,
    unsupported,
    unsupported_latent,
)
from kvpilot_formats.models.config import ConfigError, known, load
from kvpilot_formats.models.read import auto_dtype, read

__all__ = [
    "Architecture", "ConfigError", "Group", "Kind", "auto_dtype", "known", "load", "read", "unsupported",
    "unsupported_latent",
]  # fmt: skip
