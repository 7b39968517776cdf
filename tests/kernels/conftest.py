"""The GPU kernels run in Triton's interpreter here: a CPU, the same source, the same numbers.

Whether Triton interprets is settled when a kernel is defined, its own library's among them. The variable is gone again
before any test runs, so that processes which tests start are not touched.
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

# Small tensors: threads would wait for each other more than they compute, and sum in an order of the machine's own.
torch.set_num_threads(1)

before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    from kvpilot_kernels.gpu import (  # noqa: F401 - interpreted
        decode,
        latent_decode,
        latent_pages,
        pages,
        prefill,
        ring,
        weigh,
    )
    from support.gluon_eager import EagerKernel
    from support.interpreter import mend
finally:
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True, scope="session")
def on_cpu() -> Iterator[None]:
    """`GpuPages` and `GpuLatentPages` launch every kernel on the CPU, the Gluon ones too."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(pages, "decode_kernel", EagerKernel(decode, "decode_kernel"))
        patch.setattr(latent_pages, "latent_decode_kernel", EagerKernel(latent_decode, "latent_decode_kernel"))
        mend(patch.setattr)
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA backend's module, with stand-ins for what only a GPU has."""
    from support.cuda_engine import cuda_module

    return cuda_module(monkeypatch)
