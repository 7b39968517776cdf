"""Hook into the offloading copies of a stepped engine: it records them, delays them and compares their bytes.

When a copy to the host is submitted, the hook keeps the bytes of the layers' caches. After a later load it compares
them. With `late`, a copy ends that many steps after its submission, or when vLLM waits for it. As on a GPU, no byte
moves earlier. By their keys, the hook recognizes chunks that went to a disk and return to another block.
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
        loaded, changed, read, unread, unwritten: as in `Told`.
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
        self.loaded = self.changed = self.read = self.unread = self.unwritten = 0
        self._copy, self._get_finished = self._worker._copy, self._worker.get_finished
        self._worker._copy, self._worker.get_finished, self._worker.wait = self._submit, self._finished, self._wait

    def follow(self, tier: Any) -> None:
        """Follow the chunks that a `DiskTier` loads, and count those that it returned and those that it did not."""
        from vllm.v1.kv_offload.base import get_offload_group_idx

        ids = [group.group_id for group in self._spec.config.groups]
        by_key: dict[bytes, tuple[int, list[torch.Tensor]]] = {}
        promised: dict[int, list[tuple[bytes, tuple[int, int], Any]]] = {}
        move, load, finished = tier._move, tier.submit_load, tier.get_finished_jobs

        def place(key: Any, at: Any) -> tuple[int, int]:
            """Return the group and the block of a chunk."""
            return ids.index(get_offload_group_idx(key)), int(at)

        def moved(job: int, held: Any, at: Any, *, load: bool) -> None:
            # Keep the bytes that the disk keeps, because a chunk that is computed again may differ in a quantized
            # element.
            if held is not None and not load:
                by_key[held.key] = self._kept[place(held.key, at)]
            move(job, held, at, load=load)

        def submit_load(job: Any) -> None:
            promised[job.job_id] = [
                (key, place(key, at), by_key.get(key)) for key, at in zip(job.keys, job.chunk_ids, strict=True)
            ]
            load(job)

        def get_finished_jobs() -> list[Any]:
            ended: list[Any] = finished()
            for result in ended:
                wanted = promised.pop(result.job_id, None)
                if wanted is None:
                    self.unwritten += not result.success
                    continue
                good = {key for key, *_ in wanted} if result.success else set(result.successful_keys or ())
                self.read += len(good)
                self.unread += len(wanted) - len(good)
                self._kept.update({at: stored for key, at, stored in wanted if key in good})
            return ended

        tier._move, tier.submit_load, tier.get_finished_jobs = moved, submit_load, get_finished_jobs

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
