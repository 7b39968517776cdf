"""From a node's labels, allocatable resources and instance type to what is known of its accelerator. Pure.

The first of these that is there names an NVIDIA GPU, as GPU feature discovery would:

1. `nvidia.com/gpu.product`, which GPU feature discovery sets (a part of the GPU operator), or an administrator;
2. `cloud.google.com/gke-accelerator`, which GKE sets (values: "GPU platforms" of Compute Engine's documentation);
3. `node.kubernetes.io/instance-type` on EKS ("Amazon EC2 instance types", accelerated computing) and on AKS ("GPU
   accelerated virtual machine sizes" of Azure's documentation).

AMD's GPUs are named by AMD's node labeller, Intel's by the rules of Intel's device plugin, TPUs by GKE. Names that are
not in these tables rule nothing out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpilot_operator.gpus import GPUS, by_product
from kvpilot_operator.numbers import whole
from kvpilot_operator.state.snapshot import NodeFacts

_PRODUCT = "nvidia.com/gpu.product"
_INSTANCE_TYPES = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")

# By what a cloud calls it, the GPU's name in the table of GPUs. A family of EC2 has one kind of GPU in every size; of
# Azure's sizes only those with whole GPUs are here.
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
_EC2 = {
    "p6-b200": "B200",
    "p5en": "H200",
    "p5e": "H200",
    "p5": "H100-80GB",
    "p4de": "A100-80GB",
    "p4d": "A100-40GB",
    "g7e": "RTX-PRO-6000",
    "g6e": "L40S",
    "g6": "L4",
    "gr6": "L4",
    "g5": "A10G",
    "g4dn": "T4",
}
_AZURE = (
    ("nd[0-9]+isr?f?_h200_v5", "H200"),
    ("nd[0-9]+isr?f?_h100_v5", "H100-80GB"),
    ("ncc?[0-9]+adi?s_h100_v5", "H100-NVL"),
    ("nd[0-9]+amsr?_a100_v4", "A100-80GB"),
    ("nd[0-9]+asr(_a100)?_v4", "A100-40GB"),
    ("nc[0-9]+ads_a100_v4", "A100-80GB-PCIe"),
    ("nv(36|72)adm?s_a10_v5", "A10"),
    ("nc[0-9]+as_t4_v3", "T4"),
)
_PRODUCTS = {gpu.name: gpu.products[0] for gpu in GPUS}

_SLICE_RESOURCE = re.compile(r"nvidia\.com/mig-([0-9]+g\.[0-9]+gb[a-z0-9.]*)")
_SLICE_MEMORY = re.compile(r"[0-9]+g\.([0-9]+)gb")
_MAX_MIB = 2**30  # of one GPU: a petabyte
_MAX_GB = 10**6
_MAX_NAME = 128  # of status.history[].gpu and its likes


@dataclass(frozen=True, slots=True)
class _Vendor:
    """Accelerators that have no CUDA: the resources that are asked for, and the labels that name them."""

    name: str
    resources: tuple[str, ...]
    labels: tuple[str, ...]
    memory: str = ""
    """The label of one accelerator's memory, such as 192G."""


_OTHER_VENDORS = (
    _Vendor("AMD", ("amd.com/gpu",), ("amd.com/gpu.product-name", "beta.amd.com/gpu.product-name"), "amd.com/gpu.vram"),
    _Vendor("Intel", ("gpu.intel.com/i915", "gpu.intel.com/xe"), ("gpu.intel.com/product", "gpu.intel.com/family")),
    _Vendor("Google", ("google.com/tpu",), ("cloud.google.com/gke-tpu-accelerator",)),
)


def node_facts(node: Mapping[str, Any]) -> NodeFacts:
    """What a Node, as the API server gives it, says of its accelerator; NodeFacts() where it shows none.

    Never raises: whatever is not text where Kubernetes has text counts as not there.
    """
    labels, allocatable = _texts(node, "metadata", "labels"), _texts(node, "status", "allocatable")
    return _nvidia(labels, allocatable) or _of_other_vendor(labels, allocatable) or NodeFacts()


def _nvidia(labels: Mapping[str, str], allocatable: Mapping[str, str]) -> NodeFacts | None:
    shared, slices = _has(allocatable, "nvidia.com/gpu.shared"), _slices(allocatable)
    whole_gpus = shared or _has(allocatable, "nvidia.com/gpu")
    product = labels.get(_PRODUCT) or _product_of_cloud(labels) or ("unlabelled-gpu" if whole_gpus or slices else "")
    if not product:
        return None
    kind, _, profile = product.removesuffix("-SHARED").partition("-MIG-")
    # Under the MIG strategy `single` it is a slice's.
    memory = whole(labels.get("nvidia.com/gpu.memory"), _MAX_MIB)
    if slices and (whole_gpus or len(slices) > 1):
        # Which of them a pod has, the node does not say.
        product, profile, memory = f"{kind}-MIG", "", None
    elif slices:
        (profile,) = slices
        product = labels.get(f"nvidia.com/mig-{profile}.product") or f"{kind}-MIG-{profile}"
        kind = product.removesuffix("-SHARED").partition("-MIG-")[0]
        memory = whole(labels.get(f"nvidia.com/mig-{profile}.memory"), _MAX_MIB)
    elif shared and not product.endswith("-SHARED"):
        product = f"{product}-SHARED"
    of_kind = by_product(kind)
    if not memory:
        memory = (
            of_kind.memory_mib if of_kind is not None and product == kind and not profile else _nominal_mib(profile)
        )
    major, minor = (whole(labels.get(f"nvidia.com/gpu.compute.{part}"), 99) for part in ("major", "minor"))
    capability = of_kind.compute_capability if of_kind is not None else None
    if major is not None and minor is not None:
        capability = major, minor
    return NodeFacts(product[:_MAX_NAME], capability, memory)


def _of_other_vendor(labels: Mapping[str, str], allocatable: Mapping[str, str]) -> NodeFacts | None:
    for vendor in _OTHER_VENDORS:
        label = next((labels[label] for label in vendor.labels if labels.get(label)), "")
        if label or any(_has(allocatable, resource) for resource in vendor.resources):
            named = label if label.lower().startswith(vendor.name.lower()) else f"{vendor.name}_{label}"
            gpu = named[:_MAX_NAME] if label else f"unlabelled-{vendor.name.lower()}-accelerator"
            return NodeFacts(gpu, memory_mib=_vram_mib(labels.get(vendor.memory, "")), cuda=False)
    return None


def _product_of_cloud(labels: Mapping[str, str]) -> str:
    """What GPU feature discovery would call the GPU, by what a cloud says of the node; empty where nothing does."""
    accelerator = labels.get("cloud.google.com/gke-accelerator", "")
    if accelerator.startswith("nvidia-"):
        product = _PRODUCTS[_GKE[accelerator]] if accelerator in _GKE else accelerator
        partition = labels.get("cloud.google.com/gke-gpu-partition-size")
        shared = labels.get("cloud.google.com/gke-gpu-sharing-strategy") in ("time-sharing", "mps")
        return f"{product}{f'-MIG-{partition}' if partition else ''}{'-SHARED' if shared else ''}"
    for label in _INSTANCE_TYPES:
        kind = labels.get(label, "").lower()
        # SageMaker's nodes in EKS have EC2's types behind a prefix.
        family, _, size = kind.removeprefix("ml.").partition(".")
        if size and family in _EC2:
            return _PRODUCTS[_EC2[family]]
        azure = kind.removeprefix("standard_")
        name = next((name for pattern, name in _AZURE if re.fullmatch(pattern, azure)), None)
        if name is not None:
            return _PRODUCTS[name]
    return ""


def _slices(allocatable: Mapping[str, str]) -> tuple[str, ...]:
    """Profiles of the MIG slices that can be asked for (strategy `mixed`), such as 3g.40gb."""
    found = (_SLICE_RESOURCE.fullmatch(resource) for resource in allocatable if _has(allocatable, resource))
    return tuple(sorted(one[1] for one in found if one is not None))


def _nominal_mib(profile: str) -> int | None:
    """The memory that a MIG profile has in its name, which is within some percent of what it has."""
    found = _SLICE_MEMORY.match(profile)
    gigabytes = whole(found[1], _MAX_GB) if found is not None else None
    return gigabytes * 10**9 // 2**20 if gigabytes else None


def _vram_mib(text: str) -> int | None:
    gibibytes = whole(text.removesuffix("G"), _MAX_GB) if text.endswith("G") else None
    return gibibytes * 2**10 if gibibytes else None


def _has(allocatable: Mapping[str, str], resource: str) -> bool:
    return allocatable.get(resource, "0") not in ("", "0")


def _texts(value: object, *path: str) -> Mapping[str, str]:
    """The texts by name that stand at this path."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    entries = value.items() if isinstance(value, Mapping) else ()
    return {key: text for key, text in entries if isinstance(key, str) and isinstance(text, str)}
