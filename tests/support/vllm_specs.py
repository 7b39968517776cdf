"""vLLM's own KV-cache specs of models that are only a config.json: built without weights, on torch's meta device.

`support.own_process` runs this module, because vLLM cannot discard the models that it built. It reads `{"NAME":
[CONFIG, {"disable_sliding_window": true}], ...}` from stdin, and writes `{"NAME": {"groups": [...], "shared": 0},
...}`. The value is `{"failed": "why"}` for a model whose specs vLLM does not build.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvpilot_runtime.vllm_api import cache_specs


def main() -> None:
    """Read configs from stdin and write vLLM's specs to stdout."""
    models: dict[str, Any] = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = {name: attempt(config, options) for name, (config, options) in models.items()}
    json.dump(found, sys.stdout)


TEXT = {
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "exaone4_5_text": ("exaone4", "Exaone4ForCausalLM"),
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma3n": ("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4_text": ("gemma4_text", "Gemma4ForCausalLM"),
    "iquestloopcoder": ("llama", "IQuestLoopCoderForCausalLM"),
    "kimi_k2": ("kimi_k2", "DeepseekV3ForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "llama4_text": ("llama4_text", "Llama4ForCausalLM"),
    "ministral3": ("ministral3", "MistralForCausalLM"),
    "phi3_v": ("phi3", "Phi3ForCausalLM"),
    "qwen2_5_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
}
"""Text model by the model_type of a text part. vLLM's classes for images or sound would need torchvision."""

CLASSES = {"internlm2": "llama", "mimo": "qwen2", "minicpm": "llama", "orion": "llama"}
"""Class of transformers with the same fields, by the model_type of a config class that only a repository has."""


def text_alone(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model's text part alone, with a model class that vLLM loads and with 16-bit weights."""
    text = config.get("text_config", config)
    if text.get("model_type") in TEXT:
        kind, architecture = TEXT[text["model_type"]]
        config = {"dtype": "bfloat16", **text, "model_type": kind, "architectures": [architecture]}
    if config.get("model_type") in CLASSES:
        config = {**config, "model_type": CLASSES[config["model_type"]]}
    if (config.get("quantization_config") or {}).get("config_groups") == {}:  # this quantizes only the cache
        return config
    return {field: value for field, value in config.items() if field != "quantization_config"}


def attempt(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the KV-cache specs that vLLM makes for a model's config, or vLLM's error."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(text_alone(config)))
            return specs(folder, options)
    except Exception as error:  # report any error of vLLM as the result
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def specs(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a model's layers grouped by their KV-cache specs, as preflight reads them."""
    from vllm.engine.arg_utils import EngineArgs

    return cache_specs.specs(EngineArgs(model=folder, **options))


if __name__ == "__main__":
    main()
