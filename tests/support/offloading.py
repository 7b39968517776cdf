"""Stands before the copies of offloading in a stepped engine: writes them down, holds them back, compares bytes.

What is stored is kept from the layers' own caches when its copy is submitted, and held against what is there when a
load of it has ended. With `late`, a copy ends so many steps after it was submitted, or when vLLM waits for it, and
moves nothing before: as a GPU may.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpilot_runtime.host_copies import rows


class Transfers:
    """Of one engine's connector.

    Args:
        connector: vLLM's `OffloadingConnectorWorker`. config: its `KVCacheConfig`. layers: by name.
        pages: the group whose blocks are written down. late: steps.

    Attributes:
        moves: `stored` or `loaded`, with pairs of a block and its place in host memory. loaded, changed: as in `Told`.
    """

    def __init__(self, connector: Any, config: Any, layers: dict[str, Any], pages: int, late: int) -> None:
        self._worker, self._per_chunk, self._late = connector.worker, connector.spec.blocks_per_chunk, late
        ids = [group.group_id for group in connector.spec.config.groups]
        self._names = [config.kv_cache_groups[i].layer_names for i in ids]
        self._layers, self._blocks, self._mine = layers, config.num_blocks, ids.index(pages)
        self._kept: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._waiting: dict[int, tuple[list[int], tuple[Any, ...], list[tuple[int, int, list[torch.Tensor]]]]] = {}
        self.moves: list[dict[str, Any]] = []
        self.loaded = self.changed = 0
        self._copy, self._get_finished = self._worker._copy, self._worker.get_finished
        self._worker._copy, self._worker.get_finished, self._worker.wait = self._submit, self._finished, self._wait

    def taken(self) -> list[dict[str, Any]]:
        """What was written down since the last call."""
        moves, self.moves = self.moves, []
        return moves

    def _pages(self, group: int, block: int) -> list[torch.Tensor]:
        caches = [self._layers[name].kv_cache for name in self._names[group]]
        return [cache.reshape(self._blocks, -1)[block].clone() for cache in caches]

    def _submit(self, job: int, blocks: Any, chunks: Any, source: Any, target: Any) -> bool:
        stored = source is self._worker._cache
        expected = []
        for group, (at_cache, at_host) in enumerate(rows(blocks, chunks, self._per_chunk)):
            pairs = list(zip(at_cache.tolist(), at_host.tolist(), strict=True))
            if stored:
                self._kept |= {(group, place): self._pages(group, block) for block, place in pairs}
            else:
                expected += [(group, block, self._kept[group, place]) for block, place in pairs]
            if group == self._mine:
                self.moves.append({"stored" if stored else "loaded": pairs})
        self._waiting[job] = [self._late], (job, blocks, chunks, source, target), expected
        if not self._late:
            self._end(job)
        return True

    def _end(self, job: int) -> None:
        _, transfer, expected = self._waiting.pop(job)
        self._copy(*transfer)
        for group, block, wanted in expected:
            self.loaded += 1
            found = zip(wanted, self._pages(group, block), strict=True)
            self.changed += any(not torch.equal(a, b) for a, b in found)

    def _finished(self) -> list[Any]:
        for job, (steps, _, _) in list(self._waiting.items()):
            steps[0] -= 1
            if steps[0] <= 0:
                self._end(job)
        return list(self._get_finished())

    def _wait(self, jobs: set[int]) -> None:
        for job in jobs & self._waiting.keys():
            self._end(job)
