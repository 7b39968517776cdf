"""vLLM's offloading to host memory, as our runtime has it: requests that ask for the tier, and a worker on a CPU."""

from __future__ import annotations

from typing import Any

from kvpilot_runtime.config.offload import CONNECTOR, FROM_HOST
from kvpilot_runtime.engine import compat


def heed_from_host() -> None:
    """Let a request say that its prefix is to come from the tier. Repeating it changes nothing.

    vLLM's own `skip_reading_prefix_cache` leaves both places aside; this sets it for the GPU's lookup alone.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    stock = KVCacheManager.get_computed_blocks
    if getattr(stock, "_kvpilot_heeds", False):
        return

    def get_computed_blocks(self: Any, request: Any) -> Any:
        if (request.kv_transfer_params or {}).get(FROM_HOST) is not True:
            return stock(self, request)
        asked, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, True
        try:
            return stock(self, request)
        finally:
            request.skip_reading_prefix_cache = asked

    get_computed_blocks._kvpilot_heeds = True  # type: ignore[attr-defined]
    KVCacheManager.get_computed_blocks = get_computed_blocks


def serve_on_cpu(config: Any) -> None:
    """Give vLLM's offloading a worker on the CPU platform, for which it has none; without effect where it is off."""
    from vllm.platforms import current_platform

    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR or not current_platform.is_cpu():
        return
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    from kvpilot_runtime.transfer.host_copies import HostCopies

    def get_worker(self: Any, kv_caches: Any) -> HostCopies:
        return HostCopies(kv_caches, compat.chunks_in_host_memory(self), self.blocks_per_chunk)

    CPUOffloadingSpec.get_worker = get_worker
