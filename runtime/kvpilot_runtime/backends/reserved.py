"""Step buffers that an engine's builder makes once the KV cache is there, held before while vLLM measures memory.

vLLM counts as weights what is allocated while it loads them. So the first layer holds such buffers from then on, and
gives them back when the builder makes those that captured graphs read: the block size is settled by then, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BLOCK = 64
"""Tokens of a page in a shape that buffers are held for: their size does not depend on it."""


class Reserving:
    """An attention implementation that may hold its engine's step buffers.

    Attributes:
        reserved: what it holds; None before and after.
    """

    reserved: Any = None
    _reserves = True

    def reserve(self, vllm_config: Any, make: Callable[[Any], Any]) -> None:
        """Hold what `make` makes on the engine's device, if this is the first layer of its kind; once."""
        if self._reserves and next(iter(_holders(vllm_config)), None) is self:
            self.reserved, self._reserves = make(vllm_config.device_config.device), False


def release(vllm_config: Any) -> None:
    """Give back what an engine's layers hold."""
    for impl in _holders(vllm_config):
        impl.reserved = None


def _holders(vllm_config: Any) -> list[Reserving]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), Reserving)]
