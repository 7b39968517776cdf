"""Look up GPUs by name in the operator's table, for `kvpilot plan`."""

import difflib
from typing import Any

from kvpilot_cli.plan.facts import PlanError
from kvpilot_operator.gpus import GPUS, Gpu, by_product
from kvpilot_operator.observe.nodes import node_facts


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name, or with this value of the node label nvidia.com/gpu.product."""
    known = {gpu.name.lower(): gpu for gpu in GPUS}
    gpu = known.get(name.lower()) or by_product(name)
    if gpu is not None:
        return gpu
    # A short name such as H100 matches several GPUs, so suggest all of them.
    close = [key for key in known if key.startswith(name.lower())] or difflib.get_close_matches(name.lower(), known)
    names = [known[key].name for key in close] or [gpu.name for gpu in GPUS]
    raise PlanError(f"--gpu {name!r} is not in the table; use one of {', '.join(names)}, or a node's nvidia.com/gpu.product label")  # fmt: skip  # noqa: E501


def gpu_of_labels(labels: Any) -> str:
    """Return the operator's name of a node's GPU from the node's labels; `cpu` without one."""
    return node_facts({"metadata": {"labels": labels}}).gpu
