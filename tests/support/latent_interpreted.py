"""The CUDA backend of latent attention on a CPU: its own metadata and buffers, its kernels in Triton's interpreter.

The process must start with TRITON_INTERPRET=1.
"""

from typing import Any, ClassVar

import torch

from kvpilot_formats.latent import names, parse
from kvpilot_kernels.gpu.mla import decode as latent_decode
from kvpilot_kernels.gpu.mla import pages as latent_pages
from kvpilot_runtime.backends import latent_cpu
from kvpilot_runtime.backends.latent_cuda import CudaLatentBackend
from kvpilot_runtime.backends.packed import classes_of
from support.gluon_eager import EagerKernel
from support.interpreter import mend


class InterpretedBackend(CudaLatentBackend):
    """Backend with vLLM's CPU blocks of 16 tokens. It accepts a machine without a GPU."""

    block_step = 16
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True


def install() -> None:
    """Make vLLM's CPU platform use this backend for kvpilot's latent dtypes."""
    vars(latent_pages)["latent_decode_kernel"] = EagerKernel(latent_decode, "latent_decode_kernel")
    mend(setattr)
    vars(latent_cpu)["__getattr__"] = classes_of(InterpretedBackend, names, parse)
