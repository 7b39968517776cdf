"""What the engine is told by spec.engine.extraArgs, as vLLM 0.32 reads it."""

from __future__ import annotations

import re

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.gpus import by_product
from kvpilot_operator.state.snapshot import NodeFacts

# vLLM's default budget of a step goes by the GPU's memory (EngineArgs.get_batch_defaults).
_LARGEST_MIB, _LARGE_MIB = 160 * 1024, 70 * 1024
# What vLLM takes for a number of tokens: 8192, 8k (8,000), 8K (8,192), 2.5k.
_TOKENS = re.compile(r"([0-9]{1,12})(\.[0-9]{1,6})?([kKmMgGtT]?)")
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_TOKENS = 2**31 - 1


def step_tokens(spec: Spec, node: NodeFacts) -> int:
    """The engine's max_num_batched_tokens: from spec.engine.extraArgs, else vLLM 0.32's default for a server there."""
    asked = [_tokens(value) for value in spec.engine.option("--max-num-batched-tokens", "--max-num-b")]
    if asked and asked[-1]:
        return asked[-1]
    gpu = by_product(node.gpu)
    memory = node.memory_mib or (gpu.memory_mib if gpu is not None else 0)
    if memory >= _LARGEST_MIB:
        return 16_384
    return 8192 if memory >= _LARGE_MIB and "a100" not in node.gpu.lower() else 2048


def _tokens(text: str) -> int | None:
    """A number of tokens as vLLM reads it; None for what it would refuse, or could not use."""
    found = _TOKENS.fullmatch(text.strip())
    if found is None or (found[2] and found[3] not in ("k", "m", "g", "t")):
        return None
    tokens = int(float(found[1] + (found[2] or "")) * _TIMES[found[3]])
    return tokens if 0 < tokens <= _MAX_TOKENS else None
