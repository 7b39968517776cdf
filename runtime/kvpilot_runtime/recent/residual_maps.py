"""Map of residual pages in a worker: a copy of the scheduler's map, on the device that reads it."""

from collections.abc import Mapping
from typing import Any

import torch

from kvpilot_kernels.residuals import Residuals


class ResidualMaps:
    """The maps of a worker's layers. Layers share a map if their blocks have as many tokens and residual pages."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], Residuals] = {}

    def of(self, blocks: int, count: int, newest: int, device: torch.device) -> Residuals:
        """Return the map of layers with this many blocks, residual pages of a block, and newest blocks to refine.

        The first call creates it. Captured CUDA graphs hold its address, so it changes only in place.
        """
        if any(len(found.pages) != blocks for found in self._maps.values()):  # vLLM has allocated another cache
            self._maps.clear()
        if (found := self._maps.get((count, newest))) is None:
            pages = torch.zeros(blocks, count, dtype=torch.int32, device=device)
            found = Residuals(pages, torch.full((1,), newest, dtype=torch.int32, device=device))
            self._maps[count, newest] = found
        return found

    @torch.inference_mode()
    def refine(self, changes: Mapping[int, tuple[int, ...]]) -> None:
        """Write the residual pages of blocks, or an empty tuple for none, before the engine step that reads them."""
        for (count, _), found in self._maps.items():
            device = found.pages.device
            rows = torch.tensor(
                [(block, *(pages[:count] or (0,) * count)) for block, pages in changes.items()], dtype=torch.int32,
                pin_memory=device.type == "cuda",
            ).to(device, non_blocking=True)  # fmt: skip
            found.pages.index_copy_(0, rows[:, 0].long(), rows[:, 1:])


def refine(vllm_config: Any, changes: Mapping[int, tuple[int, ...]]) -> None:
    """Write the residual pages of blocks to the maps of an engine's layers, which its first layer of ours holds."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if (maps := getattr(getattr(layer, "impl", None), "maps", None)) is not None:
            maps.refine(changes)
            return
