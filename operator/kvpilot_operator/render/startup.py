"""How long may an engine take to start? By the size of its weights, as far as the model's name tells it.

The limit is a part of the pod template, so it is made of the spec alone: a size that an engine told later would change
the template and restart every engine.
"""

from __future__ import annotations

import re

from kvpilot_operator.api.spec import Spec

# Imports, compilation and CUDA graphs.
_START_SECONDS = 600
# 16-bit weights of 10^9 parameters, 2 GB, at 0.1 GB/s: the rate of a slow shared volume.
_SECONDS_PER_BILLION = 20
# 300 GB of weights for each GPU, more than the largest one holds: where the name does not tell.
_UNKNOWN_BILLIONS = 150
# Weights of 4 TB.
_MAX_BILLIONS = 2000
# Below this a number of millions may also be a context length (-1M).
_MIN_MILLIONS = 10

# 8b, 0.6B, 8x22B, llama405b, A22B. A run of letters may come first, and nothing but a separator before those.
_SIZE = re.compile(r"(?<![a-z0-9.])([a-z]*?)(?:([0-9]{1,3})x)?([0-9]{1,5}(?:\.[0-9]{1,3})?)([bmt])(?![a-z0-9])")
# -16E: so many experts of the size that stands before.
_EXPERTS = re.compile(r"(?<![a-z0-9.])([0-9]{1,3})e(?![a-z0-9])")
# A22B are the parameters that are active, E4B those that count: the weights are more than that.
_PARTS = ("a", "e")


def startup_budget_seconds(spec: Spec) -> int:
    """How long an engine may take to answer before its kubelet gives up on it: 600 to 40,600 s.

    Where the model's name tells no size, the weights are taken to fill the GPUs of a replica.
    """
    scheme, _, name = spec.model.source.lower().partition("://")
    # Before what a registry or a claim is called goes what it holds.
    inner = name.partition("/")[2] if scheme in ("pvc", "oci") else name
    billions = _billions(inner) or _billions(name) or _UNKNOWN_BILLIONS * spec.engine.gpus
    return _START_SECONDS + int(min(billions, _MAX_BILLIONS) * _SECONDS_PER_BILLION)


def _billions(name: str) -> float:
    """The most parameters that the name can be read to tell, in 10^9; 0 where it tells none."""
    found: dict[str, list[float]] = {"b": [], "m": [], "t": []}
    for before, times, number, unit in _SIZE.findall(name):
        if before not in _PARTS:
            found[unit].append(float(number) * int(times or 1))
    if found["b"]:
        experts = [int(count) for count in _EXPERTS.findall(name)]
        return max(found["b"]) * max([1, *experts])
    if found["t"]:  # beside a size in billions it tells how many tokens the model was trained on
        return 1000 * max(found["t"])
    millions = max(found["m"], default=0.0)
    return millions / 1000 if millions >= _MIN_MILLIONS else 0.0
