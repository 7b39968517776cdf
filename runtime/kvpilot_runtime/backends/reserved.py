"""Step buffers, reserved while vLLM measures memory, until an engine's builder makes its own.

vLLM counts memory that is allocated while it loads weights. So the first layer reserves such buffers then. It releases
them when the builder makes the buffers that captured graphs read, after the block size is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BLOCK = 64
"""Tokens of a page in the shape of reserved buffers; their size does not depend on it."""


class Reserving:
    """Attention implementation that may reserve its engine's step buffers.

    Attributes:
        reserved: the buffers, or None.
    """

    reserved: Any = None
    _reserves = True

    def reserve(self, vllm_config: Any, make: Callable[[Any], Any]) -> None:
        """Reserve the buffers that `make` makes on the engine's device, once, in the first layer of this kind."""
        if self._reserves and next(iter(_holders(vllm_config)), None) is self:
            self.reserved, self._reserves = make(vllm_config.device_config.device), False


def release(vllm_config: Any) -> None:
    """Release the buffers that an engine's layers reserve."""
    for impl in _holders(vllm_config):
        impl.reserved = None


def _holders(vllm_config: Any) -> list[Reserving]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), Reserving)]
