"""Hook into the offloading copies of a stepped engine: it records them, delays them and compares their bytes.

When a copy to the host is submitted, the hook keeps the bytes of the layers' caches. After a later load it compares the
loaded bytes with them. With `late`, a copy ends that many steps after its submission, or when vLLM waits for it. As on
a GPU, no byte moves earlier.
"""

from typing import Any

import torch

from kvpilot_runtime.transfer.host_copies import rows


class Transfers:
    """Transfers of one engine's connector.

    Args:
        connector: vLLM's `OffloadingConnectorWorker`.
        config: its `KVCacheConfig`.
        layers: the layers by name.
        pages: index of the KV-cache group whose blocks are recorded.
        late: number of steps by which copies are delayed.

    Attributes:
        moves: records of copies. `stored` or `loaded` holds pairs of a block and the number of the stored bytes.
        loaded, changed: as in `Told`.
    """

    def __init__(self, connector: Any, config: Any, layers: dict[str, Any], pages: int, late: int) -> None:
        self._worker, self._spec, self._late = connector.worker, connector.spec, late
        self._per_chunk = self._spec.blocks_per_chunk
        ids = [group.group_id for group in connector.spec.config.groups]
        self._names = [config.kv_cache_groups[i].layer_names for i in ids]
        self._layers, self._blocks, self._mine = layers, config.num_blocks, ids.index(pages)
        self._stored = 0
        self._kept: dict[tuple[int, int], tuple[int, list[torch.Tensor]]] = {}
        self._waiting: dict[int, tuple[list[int], tuple[Any, ...], list[tuple[int, int, list[torch.Tensor]]]]] = {}
        self.moves: list[dict[str, Any]] = []
        self.loaded = self.changed = 0
        self._copy, self._get_finished = self._worker._copy, self._worker.get_finished
        self._worker._copy, self._worker.get_finished, self._worker.wait = self._submit, self._finished, self._wait

    def taken(self) -> list[dict[str, Any]]:
        """Return the records of copies since the last call."""
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
            for block, place in pairs if stored else ():
                self._stored += 1
                self._kept[group, place] = self._stored, self._pages(group, block)
            if not stored:
                expected += [(group, block, self._kept[group, place][1]) for block, place in pairs]
            if group == self._mine:
                numbered = [(block, self._kept[group, place][0]) for block, place in pairs]
                self.moves.append({"stored" if stored else "loaded": numbered})
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
