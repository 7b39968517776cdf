"""Read the accelerator of a node from its labels and resources.

The name of an NVIDIA GPU comes from GPU feature discovery or GKE. Other accelerators are named by their resource. A GPU
name that is missing from kvpilot's tables does not rule out any dtype.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvpilot_formats.untrusted import whole
from kvpilot_operator.gpus import GPUS, by_product
from kvpilot_operator.state.snapshot import NodeFacts

_PRODUCT = "nvidia.com/gpu.product"
# Map GKE's name of a GPU to the name in our table.
_GKE = {
    "nvidia-b200": "B200",
    "nvidia-h200-141gb": "H200",
    "nvidia-h100-80gb": "H100-80GB",
    "nvidia-h100-mega-80gb": "H100-80GB",
    "nvidia-a100-80gb": "A100-80GB",
    "nvidia-tesla-a100": "A100-40GB",
    "nvidia-rtx-pro-6000": "RTX-PRO-6000",
    "nvidia-l4": "L4",
    "nvidia-tesla-t4": "T4",
}
_PRODUCTS = {gpu.name: gpu.products[0] for gpu in GPUS}
_WITHOUT_CUDA = ("amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "google.com/tpu")

_SLICE_RESOURCE = re.compile(r"nvidia\.com/mig-([0-9]+g\.[0-9]+gb[a-z0-9.]*)")
_MAX_MIB = 2**30  # a petabyte, far above any GPU's memory
_MAX_NAME = 128  # limit of GPU names in the API, such as status.history[].gpu


def node_facts(node: Mapping[str, Any]) -> NodeFacts:
    """Return a Node's accelerator, or NodeFacts() without one. Labels and quantities that are not text are ignored."""
    labels, allocatable = _texts(node, "metadata", "labels"), _texts(node, "status", "allocatable")
    if (nvidia := _nvidia(labels, allocatable)) is not None:
        return nvidia
    other = next((resource for resource in _WITHOUT_CUDA if _has(allocatable, resource)), None)
    return NodeFacts(other, cuda=False) if other is not None else NodeFacts()


def _nvidia(labels: Mapping[str, str], allocatable: Mapping[str, str]) -> NodeFacts | None:
    shared, slices = _has(allocatable, "nvidia.com/gpu.shared"), _slices(allocatable)
    whole_gpus = shared or _has(allocatable, "nvidia.com/gpu")
    product = labels.get(_PRODUCT) or _product_of_gke(labels) or ("unlabelled-gpu" if whole_gpus or slices else "")
    if not product:
        return None
    kind = product.removesuffix("-SHARED").partition("-MIG-")[0]
    # Under the MIG strategy `single`, this label has the memory of one slice.
    memory = whole(labels.get("nvidia.com/gpu.memory"), _MAX_MIB)
    if slices and (whole_gpus or len(slices) > 1):
        # The node does not say which kind of slice a pod has, so its memory is unknown.
        product, memory = f"{kind}-MIG", None
    elif slices:
        (profile,) = slices
        product = labels.get(f"nvidia.com/mig-{profile}.product") or f"{kind}-MIG-{profile}"
        kind = product.removesuffix("-SHARED").partition("-MIG-")[0]
        memory = whole(labels.get(f"nvidia.com/mig-{profile}.memory"), _MAX_MIB)
    elif shared and not product.endswith("-SHARED"):
        product = f"{product}-SHARED"
    of_kind = by_product(kind)
    major, minor = (whole(labels.get(f"nvidia.com/gpu.compute.{part}"), 99) for part in ("major", "minor"))
    capability = of_kind.compute_capability if of_kind is not None else None
    if major is not None and minor is not None:
        capability = major, minor
    return NodeFacts(product[:_MAX_NAME], capability, memory or None)


def _product_of_gke(labels: Mapping[str, str]) -> str:
    """Return the name that GPU feature discovery would give the GPU, from GKE's labels. Empty without them."""
    accelerator = labels.get("cloud.google.com/gke-accelerator", "")
    if not accelerator.startswith("nvidia-"):
        return ""
    product = _PRODUCTS[_GKE[accelerator]] if accelerator in _GKE else accelerator
    partition = labels.get("cloud.google.com/gke-gpu-partition-size")
    shared = labels.get("cloud.google.com/gke-gpu-sharing-strategy") in ("time-sharing", "mps")
    return f"{product}{f'-MIG-{partition}' if partition else ''}{'-SHARED' if shared else ''}"


def _slices(allocatable: Mapping[str, str]) -> tuple[str, ...]:
    """Return the profiles of MIG slices that pods can request (strategy `mixed`), such as 3g.40gb."""
    found = (_SLICE_RESOURCE.fullmatch(resource) for resource in allocatable if _has(allocatable, resource))
    return tuple(sorted(one[1] for one in found if one is not None))


def _has(allocatable: Mapping[str, str], resource: str) -> bool:
    return allocatable.get(resource, "0") not in ("", "0")


def _texts(value: object, *path: str) -> Mapping[str, str]:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    entries = value.items() if isinstance(value, Mapping) else ()
    return {key: text for key, text in entries if isinstance(key, str) and isinstance(text, str)}
