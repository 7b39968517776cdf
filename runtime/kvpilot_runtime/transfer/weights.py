"""Which weights an engine serves, told by a hash of some of each tensor: reading all of them would take seconds."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import Any

import torch

from kvpilot_runtime.ranks import of_all_ranks

_SAMPLES = 64


def weights_hash(worker: Any) -> str:
    """A hash of the model of all ranks, by up to 64 elements of each parameter and buffer; every rank has to ask.

    Two models that differ in one element only may have the same; trained further, merged with an adapter or quantized,
    a model has another one.
    """
    return hashlib.sha256("".join(of_all_ranks(digest(worker.get_model()))).encode()).hexdigest()[:16]


def digest(model: torch.nn.Module) -> str:
    """Of one rank's share of the model."""
    found = hashlib.sha256()
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda one: one[0]):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.numel():
            found.update(_some(tensor.detach()).cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Up to 64 elements, evenly over the tensor's memory, whatever its strides are; nothing else is copied."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(_SAMPLES, last + 1)
    step = max(last // max(count - 1, 1), 1)
    return tensor.as_strided((count,), (step,)).contiguous()
