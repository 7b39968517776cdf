"""Worker for vLLM's offloading on the CPU platform, which copies pages with torch.

vLLM's own worker copies only with CUDA. With our worker, an engine on a CPU offloads like an engine on a GPU, so
offloading can be tested without a GPU. On a CPU it saves no memory, because pages and their copies are in the same
memory.
"""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult


class HostCopies(OffloadingWorker):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Worker that copies between the KV cache and a tier in host memory. A copy ends before its `submit` returns.

    Args:
        kv_caches: vLLM's `CanonicalKVCaches`.
        chunks: number of chunks in the tier.
        blocks_per_chunk: blocks of a chunk.
    """

    def __init__(self, kv_caches: Any, chunks: int, blocks_per_chunk: int) -> None:
        self._per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._cache = [t.tensor.view(torch.int8) for t in kv_caches.tensors]
        self._host = [  # int8 [chunks, blocks of a chunk, bytes of a page] each
            torch.zeros(chunks, blocks_per_chunk, t.page_size_bytes, dtype=torch.int8) for t in kv_caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the cache to chunks of the tier."""
        return self._copy(job_id, src_spec, dst_spec, self._cache, self._host)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Copy chunks of the tier to blocks of the cache."""
        return self._copy(job_id, dst_spec, src_spec, self._host, self._cache)

    def get_finished(self) -> list[TransferResult]:
        """Return the results of copies since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: a copy has ended when `submit_store` or `submit_load` returns."""

    def _copy(self, job: int, blocks: Any, chunks: Any, source: list[torch.Tensor], target: list[torch.Tensor]) -> bool:
        began, size = time.perf_counter(), 0
        to_host = source is self._cache
        moved = rows(blocks, chunks, self._per_chunk)
        for refs, (at_cache, at_host) in zip(self._groups, moved, strict=True):
            chunk, place = at_host // self._per_chunk, at_host % self._per_chunk
            for ref in refs:
                at, to = ((at_cache,), (chunk, place)) if to_host else ((chunk, place), (at_cache,))
                width = ref.page_size_bytes
                target[ref.tensor_idx][(*to, slice(width))] = source[ref.tensor_idx][(*at, slice(width))]
                size += len(at_cache) * width
        self._done.append(TransferResult(job, True, size, time.perf_counter() - began))
        return True


def rows(blocks: Any, chunks: Any, per_chunk: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each KV-cache group of a transfer, return its block numbers in cache and tier, int64 [blocks] each.

    A group's blocks are consecutive blocks of a request. The first one may be in the middle of a chunk.

    Args:
        blocks: vLLM's `GPULoadStoreSpec`.
        chunks: vLLM's `BlockIDsLoadStoreSpec`.
        per_chunk: blocks of a chunk.
    """
    found, block, chunk = [], 0, 0
    for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
        places = torch.arange(size) + first % per_chunk if size else torch.arange(0)
        held = -(-(first % per_chunk + size) // per_chunk) if size else 0
        whole = torch.as_tensor(chunks.block_ids[chunk : chunk + held]).long()
        at_cache = torch.as_tensor(blocks.block_ids[block : block + size]).long()
        found.append((at_cache, whole[places // per_chunk] * per_chunk + places % per_chunk))
        block, chunk = block + size, chunk + held
    return found
