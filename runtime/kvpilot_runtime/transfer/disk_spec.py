"""Offloading spec for vLLM 0.32 with two tiers: vLLM's host memory, and below it our own file (`disk_tier`)."""

import contextlib
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpilot_runtime.config import offload
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.transfer.host_copies import HostCopies
from kvpilot_runtime.vllm_api import compat

with contextlib.suppress(ValueError):  # raised if the tier is registered already
    SecondaryTierFactory.register_tier(offload.DISK_TIER, "kvpilot_runtime.transfer.disk_tier", "DiskTier")


class DiskOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """vLLM's spec for tiers with two changes: an engine leaves no file in /dev/shm, and CPUs get a worker."""

    _worker: Any

    def __init__(self, config: Any) -> None:
        if lacks := compat.lacks(compat.PINNED):
            raise UnsupportedEngineError(f"a disk below offloaded pages needs {lacks}; use it, or leave the disk out")
        super().__init__(config)

    def get_manager(self) -> Any:
        """Return vLLM's offloading manager. Unlink its shared-memory file, because all workers have mapped it."""
        if self._manager is None:
            super().get_manager()
            self._scheduler_mmap._creator = False
            Path(self._scheduler_mmap.mmap_path).unlink(missing_ok=True)
        return self._manager

    def create_worker(self, kv_caches: Any) -> Any:
        """Return a worker's side for a GPU. It must not unlink the file of the shared memory."""
        worker = super().create_worker(kv_caches)
        worker._mmap_region._creator = False  # the scheduler unlinks the file, so the worker must not
        return worker

    def get_worker(self, kv_caches: Any) -> Any:
        """Return vLLM's worker on a GPU. On a CPU, where vLLM has none, return ours over the same memory."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            region._creator = False
            self._worker = HostCopies(kv_caches, self.num_chunks, self.blocks_per_chunk, region)
        return self._worker
