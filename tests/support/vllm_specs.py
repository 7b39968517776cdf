"""vLLM's own KV-cache specs of models that are a config.json alone: built without weights, on torch's meta device.

Asked by `support.own_process`, for vLLM keeps what it builds: `{"NAME": [CONFIG, {"disable_sliding_window": true}],
...}`, which is answered by `{"NAME": {"groups": [...], "shared": 0} or {"failed": "why"}, ...}`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any


def main() -> None:
    """Read configs from stdin and write what vLLM makes of them to stdout."""
    models: dict[str, Any] = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = {name: attempt(config, options) for name, (config, options) in models.items()}
    json.dump(found, sys.stdout)


TEXT = {
    "gemma3_text": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma3n": ("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4_text": ("gemma4_text", "Gemma4ForCausalLM"),
    "kimi_k2": ("kimi_k2", "DeepseekV3ForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "llama4_text": ("llama4_text", "Llama4ForCausalLM"),
    "ministral3": ("ministral3", "MistralForCausalLM"),
    "qwen2_5_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
}
"""By the model_type of a text part, the text model that it is: models with images or sound need torchvision."""


def text_alone(config: dict[str, Any]) -> dict[str, Any]:
    """The text part of such a model as a model of its own, its weights in 16 bits."""
    text = config.get("text_config", config)
    if text.get("model_type") in TEXT:
        kind, architecture = TEXT[text["model_type"]]
        config = {"dtype": "bfloat16", **text, "model_type": kind, "architectures": [architecture]}
    return {field: value for field, value in config.items() if field != "quantization_config"}


def attempt(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The specs of one model, or why vLLM builds none here."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(text_alone(config)))
            return specs(folder, options)
    except Exception as error:  # whatever keeps vLLM from it is the answer
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def specs(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Layers by what they keep, as vLLM's layers say it themselves."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry

    # Else each architecture is looked at in a process of its own.
    registry._run_in_subprocess = lambda function: function()
    arguments = EngineArgs(model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
                           enforce_eager=True, max_model_len=256, **options)  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        ranks()
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
            counted[described(spec)] += 1
    return {"groups": [[*what, count] for what, count in sorted(counted.items(), key=str)], "shared": shared}


def described(spec: Any) -> tuple[Any, ...]:
    """(class, KV heads, key elements, value elements, window or chunk, bytes of a token)."""
    name = type(spec).__name__
    if not hasattr(spec, "num_kv_heads"):
        return name, 0, 0, 0, 0, 0
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    value = getattr(spec, "head_size_v", None) or spec.head_size
    return name, spec.num_kv_heads, spec.head_size, value, window, spec.page_size_bytes // spec.block_size


def ranks() -> None:
    """One rank, as vLLM's layers ask for."""
    import torch
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - torch keeps it until the process ends
        parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
    parallel_state.destroy_model_parallel()  # a model with experts has groups that others do without
    parallel_state.initialize_model_parallel(1, 1)


if __name__ == "__main__":
    main()
