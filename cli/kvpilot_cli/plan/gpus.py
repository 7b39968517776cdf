"""GPUs for `kvpilot plan`: the operator's table by name, and the GPUs' bfloat16 throughput."""

import difflib
from typing import Any

from kvpilot_cli.plan.facts import PlanError
from kvpilot_operator.gpus import GPUS, Gpu, by_product
from kvpilot_operator.observe.nodes import node_facts

# Dense bfloat16 throughput of tensor cores with float32 sums, in 10^12 operations per second (NVIDIA's data sheets).
# The T4 has no bfloat16, so its value is for float16.
BF16_TFLOPS: dict[str, int] = {
    "B200": 2_250,
    "H200": 989,
    "H200-NVL": 835,
    "GH200-96GB": 989,
    "H20": 148,
    "H100-80GB": 989,
    "H100-NVL": 835,
    "H100-PCIe": 756,
    "A100-80GB": 312,
    "A100-80GB-PCIe": 312,
    "A100-40GB": 312,
    "A30": 165,
    "A40": 150,
    "A10": 125,
    "A10G": 70,
    "RTX-A6000": 155,
    "RTX-3090": 71,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "RTX-6000-Ada": 364,
    "RTX-4090": 165,
    "RTX-PRO-6000": 504,
    "RTX-5090": 210,
    "T4": 65,
}


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


def gpu_of_labels(labels: Any, allocatable: Any = None) -> str:
    """Return the operator's name of a node's GPU, from labels and allocatable resources; `cpu` without one."""
    return node_facts({"metadata": {"labels": labels}, "status": {"allocatable": allocatable}}).gpu
