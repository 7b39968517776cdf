"""The token budget of an engine's step, from spec.engine.extraArgs or vLLM 0.32's defaults."""

from contextlib import suppress

from kvpilot_formats.arguments import whole_number
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.gpus import by_product
from kvpilot_operator.state.snapshot import NodeFacts

# vLLM's default token budget of a step depends on the GPU's memory (EngineArgs.get_batch_defaults).
_LARGEST_MIB, _LARGE_MIB = 160 * 1024, 70 * 1024
_MAX_TOKENS = 2**31 - 1


def step_tokens(spec: Spec, node: NodeFacts) -> int:
    """Return max_num_batched_tokens: from spec.engine.extraArgs, else vLLM 0.32's default for a server."""
    with suppress(ValueError):  # vLLM itself refuses such a value.
        asked = whole_number(spec.engine.arguments.value("--max-num-batched-tokens") or "")
        if 0 < asked <= _MAX_TOKENS:
            return asked
    gpu = by_product(node.gpu)
    memory = node.memory_mib or (gpu.memory_mib if gpu is not None else 0)
    if memory >= _LARGEST_MIB:
        return 16_384
    return 8192 if memory >= _LARGE_MIB and "a100" not in node.gpu.lower() else 2048
