"""What transformers' own classes make of configs, in a process without torch, which they would load first::

    python config_classes.py < '{"NAME": CONFIG, ...}' > '{"NAME": {"kinds": [...], "heads": 32, ...}, ...}'

Configs of a model_type that transformers does not have are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
sys.modules["torch"] = None  # type: ignore[assignment]


def main() -> None:
    """Read configs from stdin and write what their classes say to stdout."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError
    from transformers import CONFIG_MAPPING

    configs: dict[str, Any] = json.load(sys.stdin)
    found = {}
    for name, config in configs.items():
        if config["model_type"] in CONFIG_MAPPING:
            with contextlib.suppress(StrictDataclassFieldValidationError):  # a config older than the class
                found[name] = facts(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    json.dump(found, sys.stdout)


def facts(config: Any) -> dict[str, Any]:
    """Return facts of the text part. If layers differ, return only their kinds."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    found: dict[str, Any] = {"kinds": kinds, "window": getattr(text, "sliding_window", None)}
    # Falcon's: older ones have either one KV head or one for each query head
    by_groups = getattr(text, "new_decoder_architecture", False)
    if not getattr(text, "is_heterogeneous", False):
        found |= {
            "heads": getattr(text, "num_attention_heads", None),
            "kv_heads": getattr(text, "num_kv_heads" if by_groups else "num_key_value_heads", None),
            "head_dim": getattr(text, "head_dim", None),
        }
    return found


if __name__ == "__main__":
    main()
