"""Run GPU kernels in Triton's interpreter: on a CPU, from the same source, with the same numbers.

Triton reads TRITON_INTERPRET when it defines a kernel, even a kernel of its own library. The variable is unset before
the first test, so that processes which a test starts do not inherit it.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    raise pytest.UsageError("triton is already there to compile: run tests/kernels in a process of its own")

# Use one thread: tensors are small, so more threads would mostly wait. Another number of threads would also change the
# order of sums.
torch.set_num_threads(1)

before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    from kvpilot_kernels.gpu.decode import kernel as decode
    from kvpilot_kernels.gpu.launch import pages
    from kvpilot_kernels.gpu.mla import decode as latent_decode
    from kvpilot_kernels.gpu.mla import pages as latent_pages
    from kvpilot_kernels.gpu.prefill import head512  # noqa: F401 - interpreted
    from support.gluon_eager import EagerKernel
    from support.interpreter import mend
finally:
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True, scope="session")
def on_cpu() -> Iterator[None]:
    """Make `GpuPages` and `GpuLatentPages` launch every kernel on the CPU, including Gluon kernels."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(pages, "decode_kernel", EagerKernel(decode, "decode_kernel"))
        patch.setattr(latent_pages, "latent_decode_kernel", EagerKernel(latent_decode, "latent_decode_kernel"))
        mend(patch.setattr)
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the CUDA backend's module, with stand-ins for GPU-only parts."""
    from cuda_engine import cuda_module

    return cuda_module(monkeypatch)
