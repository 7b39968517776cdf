"""Print a model's KV-cache specs, as vLLM's layers report them. The layers are built without weights on a meta device.

`python -m kvpilot_runtime.vllm_api.cache_specs --model MODEL ARGUMENT...` takes the arguments of `vllm serve`. It
prints the result of `specs` as JSON on the last line of stdout.
"""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvpilot_runtime.vllm_api.wrap import wrap


def main() -> None:
    """Print the KV-cache specs that vLLM makes for the model of the command line."""
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        known, _ = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(sys.argv[1:])
        found = specs(EngineArgs.from_cli_args(known))
    print(json.dumps(found))


def specs(arguments: Any) -> dict[str, Any]:
    """Return the `groups` of layers with equal specs, the number of `shared` layers, and the KV-cache `dtype`.

    `arguments` are vLLM's EngineArgs; settings for several devices are ignored. A shared layer reads another layer's
    cache. Each group is a list: class of the spec, number of KV heads, elements of a key, elements of a value, tokens
    of the window or chunk, bytes of a token, number of layers.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    wrap("vllm.model_executor.models.registry:_run_in_subprocess", _at_once)
    alone = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "nnodes": 1}
    arguments = replace(
        arguments, **alone, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True,
        max_model_len=256, kv_transfer_config=None, speculative_config=None, enable_lora=False,
    )  # fmt: skip
    config = arguments.create_engine_config()
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
    parallel_state.destroy_model_parallel()  # make the groups again, because models with experts need more of them
    parallel_state.initialize_model_parallel(1, 1)


if __name__ == "__main__":
    main()
