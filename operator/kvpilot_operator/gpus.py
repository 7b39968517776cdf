"""Memory, bandwidth, throughput and compute capability of GPUs, by the name that GPU feature discovery gives them.

The table omits names of partial GPUs: those with `-SHARED` (time slicing), or with `-MIG-1g.10gb` (a slice).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. `kvpilot plan --gpu` accepts its `name`."""

    name: str
    products: tuple[str, ...]
    """Values of the node label nvidia.com/gpu.product: the driver's name with dashes for spaces."""
    memory_mib: int
    """`memory.total` of `nvidia-smi`, with the factory setting of ECC."""
    bandwidth_gb_s: int
    """Peak memory bandwidth by the data sheet. Forecasts multiply it by a measured efficiency (latency.py)."""
    bf16_tflops: int
    """Dense bfloat16 throughput of tensor cores with float32 sums, by the data sheet. For the T4, which has no
    bfloat16, the value is for float16."""
    compute_capability: tuple[int, int]


GPUS: tuple[Gpu, ...] = (
    Gpu("B200", ("NVIDIA-B200",), 183_359, 7_700, 2_250, (10, 0)),
    Gpu("H200", ("NVIDIA-H200",), 143_771, 4_800, 989, (9, 0)),
    Gpu("H200-NVL", ("NVIDIA-H200-NVL",), 143_771, 4_800, 835, (9, 0)),
    Gpu("GH200-96GB", ("NVIDIA-GH200-480GB",), 97_871, 4_000, 989, (9, 0)),
    Gpu("H20", ("NVIDIA-H20",), 97_871, 4_000, 148, (9, 0)),
    Gpu("H100-80GB", ("NVIDIA-H100-80GB-HBM3",), 81_559, 3_350, 989, (9, 0)),
    Gpu("H100-NVL", ("NVIDIA-H100-NVL",), 95_830, 3_938, 835, (9, 0)),
    Gpu("H100-PCIe", ("NVIDIA-H100-PCIe",), 81_559, 2_000, 756, (9, 0)),
    Gpu("A100-80GB", ("NVIDIA-A100-SXM4-80GB",), 81_920, 2_039, 312, (8, 0)),
    Gpu("A100-80GB-PCIe", ("NVIDIA-A100-80GB-PCIe",), 81_920, 1_935, 312, (8, 0)),
    Gpu("A100-40GB", ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"), 40_960, 1_555, 312, (8, 0)),
    Gpu("A30", ("NVIDIA-A30",), 24_576, 933, 165, (8, 0)),
    Gpu("A40", ("NVIDIA-A40",), 46_068, 696, 150, (8, 6)),
    Gpu("A10", ("NVIDIA-A10",), 23_028, 600, 125, (8, 6)),
    Gpu("A10G", ("NVIDIA-A10G",), 23_028, 600, 70, (8, 6)),
    Gpu("RTX-A6000", ("NVIDIA-RTX-A6000",), 49_140, 768, 155, (8, 6)),
    Gpu("RTX-3090", ("NVIDIA-GeForce-RTX-3090",), 24_576, 936, 71, (8, 6)),
    Gpu("L4", ("NVIDIA-L4",), 23_034, 300, 121, (8, 9)),
    Gpu("L40", ("NVIDIA-L40",), 46_068, 864, 181, (8, 9)),
    Gpu("L40S", ("NVIDIA-L40S",), 46_068, 864, 362, (8, 9)),
    Gpu("RTX-6000-Ada", ("NVIDIA-RTX-6000-Ada-Generation",), 49_140, 960, 364, (8, 9)),
    Gpu("RTX-4090", ("NVIDIA-GeForce-RTX-4090",), 24_564, 1_008, 165, (8, 9)),
    Gpu("RTX-PRO-6000", ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",), 97_887, 1_597, 504, (12, 0)),
    Gpu("RTX-5090", ("NVIDIA-GeForce-RTX-5090",), 32_607, 1_792, 210, (12, 0)),
    Gpu("T4", ("Tesla-T4",), 15_360, 320, 65, (7, 5)),
)
"""All known GPUs, the newest and largest first."""

_BY_PRODUCT = {product: gpu for gpu in GPUS for product in gpu.products}


def by_product(label: str) -> Gpu | None:
    """Return the GPU behind a value of nvidia.com/gpu.product, or None if the table does not know it."""
    return _BY_PRODUCT.get(label)
