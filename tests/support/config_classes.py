"""Layers and heads as transformers' own config classes report them.

The process runs without torch, which these classes would otherwise load::

    python config_classes.py < '{"NAME": CONFIG, ...}' > '{"NAME": {"kinds": [...], "heads": 32, ...}, ...}'
    python config_classes.py defaults > '{"MODEL_TYPE": CONFIG, ...}'

The first command skips configs with a model_type that transformers does not know. The second prints the default config
of each decoder class, with the name of its model class.
"""

import contextlib
import json
import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
sys.modules["torch"] = None  # type: ignore[assignment]


def main() -> None:
    """Write the default configs, or the facts of the configs on stdin, to stdout."""
    json.dump(defaults() if sys.argv[1:] == ["defaults"] else facts_of_all(json.load(sys.stdin)), sys.stdout)


def defaults() -> dict[str, Any]:
    """Return the default config of each class that has one."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    found = {}
    for kind, names in CLASSES.items():
        with contextlib.suppress(Exception):  # some classes have no defaults
            config = json.loads(CONFIG_MAPPING[kind]().to_json_string())
            name = names if isinstance(names, str) else names[0]
            found[kind] = {**config, "architectures": [name], "dtype": "bfloat16"}
    return found


def facts_of_all(configs: dict[str, Any]) -> dict[str, Any]:
    """Return the `facts` of each config by name. Skip configs that their own class refuses."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError
    from transformers import CONFIG_MAPPING

    found = {}
    for name, config in configs.items():
        if config["model_type"] in CONFIG_MAPPING:
            with contextlib.suppress(StrictDataclassFieldValidationError):  # config of an older version
                found[name] = facts(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    return found


def facts(config: Any) -> dict[str, Any]:
    """Return the kinds of layers, the window and the heads of a model's text part.

    If heads differ between layers, leave them out.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    found: dict[str, Any] = {"kinds": kinds, "window": getattr(text, "sliding_window", None)}
    # Old Falcon configs have either one KV head or one for each query head.
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
