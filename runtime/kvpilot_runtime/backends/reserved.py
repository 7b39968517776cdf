"""Reservation of GPU memory for the buffers of an engine step, so that vLLM leaves room for them.

vLLM counts memory that is allocated while it loads weights, so the first layer reserves buffers at that time. The final
buffers depend on the block size, which becomes known later. Then the metadata builder releases the reservation, and
allocates the buffers that captured CUDA graphs read.
"""

from collections.abc import Callable
from typing import Any

BLOCK = 64
"""Assumed number of tokens in a page. The size of the reserved buffers does not depend on it."""


class Reserving:
    """Mixin for attention implementations that reserve buffers of an engine step (`reserved`)."""

    reserved: Any = None
    _reserves = True

    def reserve(self, vllm_config: Any, make: Callable[[Any], Any]) -> None:
        """Keep the result of `make(device)` in `reserved`, but only in the engine's first layer of this kind."""
        if self._reserves and next(iter(_holders(vllm_config)), None) is self:
            self.reserved, self._reserves = make(vllm_config.device_config.device), False


def release(vllm_config: Any) -> None:
    """Release the buffers that a layer of this engine has reserved."""
    for impl in _holders(vllm_config):
        impl.reserved = None


def _holders(vllm_config: Any) -> list[Reserving]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), Reserving)]
