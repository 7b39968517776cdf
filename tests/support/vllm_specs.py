"""vLLM's own KV-cache specs of models that are only a config.json: built without weights, on torch's meta device.

`support.own_process` runs this module, because vLLM cannot discard the models that it built. It reads `{"NAME":
[CONFIG, {"disable_sliding_window": true}], ...}` from stdin, and writes `{"NAME": {"groups": [...], "shared": 0},
...}`. The value is `{"failed": "why"}` for a model whose specs vLLM does not build.
"""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpilot_runtime.vllm_api.wrap import wrap


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
"""For each model_type of a config's text part, the model_type and the class of a model that reads only text. vLLM's
classes for images or sound would need torchvision."""

CLASSES = {"internlm2": "llama", "mimo": "qwen2", "minicpm": "llama", "orion": "llama"}
"""model_type of a class in transformers with equal fields, for each model_type whose class transformers lacks."""


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
    """Return the `groups` of layers with equal specs, the number of `shared` layers, and the KV-cache `dtype`.

    A shared layer reads another layer's cache. Each group is a list: class of the spec, number of KV heads, elements of
    a key, elements of a value, tokens of the window or chunk, bytes of a token, number of layers.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    wrap("vllm.model_executor.models.registry:_run_in_subprocess", _at_once)
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True,
        max_model_len=256, **options,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        _ranks()
        with torch.device("meta"):
            initialize_model(config)
    counted: Counter[tuple[Any, ...]] = Counter()
    shared = 0
    for layer in config.compilation_config.static_forward_context.values():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        if getattr(layer, "kv_sharing_target_layer_name", None):
            shared += 1
            continue
        spec = layer.get_kv_cache_spec(config)
        if spec is not None:
            counted[_described(spec)] += 1
    groups = [[*what, count] for what, count in sorted(counted.items(), key=str)]
    return {"groups": groups, "shared": shared, "dtype": config.cache_config.cache_dtype}


def _at_once(stock: Any, function: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function in this process, which ends soon, instead of starting another process as vLLM does."""
    return function()


def _described(spec: Any) -> tuple[Any, ...]:
    name = type(spec).__name__
    if not hasattr(spec, "num_kv_heads"):
        return name, 0, 0, 0, 0, 0
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    value = getattr(spec, "head_size_v", None) or spec.head_size
    return name, spec.num_kv_heads, spec.head_size, value, window, spec.page_size_bytes // spec.block_size


def _ranks() -> None:
    """Initialize a distributed group of one rank, which vLLM's layers need."""
    import torch
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - torch needs the file until the process ends
        parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
    parallel_state.destroy_model_parallel()  # create the groups again, because MoE models need more of them
    parallel_state.initialize_model_parallel(1, 1)


if __name__ == "__main__":
    main()
