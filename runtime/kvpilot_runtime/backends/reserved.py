"""Step buffers that are reserved while vLLM measures memory, until the engine's builder makes its own.

vLLM counts the memory that is allocated while it loads weights, so the first layer reserves the buffers at that time.
Captured graphs read the buffers that the builder makes once the block size is known. The reservation is released then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BLOCK = 64
"""Tokens of a page, assumed for reserved buffers. The size of the buffers does not depend on it."""


class Reserving:
    """Attention implementation that may reserve its engine's step buffers.

    Attributes:
        reserved: the buffers, or None.
    """

    reserved: Any = None
    _reserves = True

    def reserve(self, vllm_config: Any, make: Callable[[Any], Any]) -> None:
        """Reserve the buffers that `make` returns, on the engine's device, in the first layer of this kind only."""
        if self._reserves and next(iter(_holders(vllm_config)), None) is self:
            self.reserved, self._reserves = make(vllm_config.device_config.device), False


def release(vllm_config: Any) -> None:
    """Release the buffers that an engine's layers reserve."""
    for impl in _holders(vllm_config):
        impl.reserved = None


def _holders(vllm_config: Any) -> list[Reserving]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), Reserving)]
