"""Configurations that transformers' classes of decoders have by default, in a process without torch::

python class_defaults.py > '{"MODEL_TYPE": CONFIG, ...}'
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
sys.modules["torch"] = None  # type: ignore[assignment]


def main() -> None:
    """Write them to stdout, each with the class of the model that it is for."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    found = {}
    for kind, names in CLASSES.items():
        with contextlib.suppress(Exception):  # some classes have no defaults
            config = json.loads(CONFIG_MAPPING[kind]().to_json_string())
            name = names if isinstance(names, str) else names[0]
            found[kind] = {**config, "architectures": [name], "dtype": "bfloat16"}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
