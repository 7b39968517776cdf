"""Let a request ask to load its prefix through the KV connector, and give CPUs a worker for offloading."""

from typing import Any

from kvpilot_runtime.config.offload import FROM_CONNECTOR
from kvpilot_runtime.vllm_api.wrap import wrap


def heed_from_connector() -> None:
    """Let a request with `FROM_CONNECTOR` load its prefix through the connector, even if the GPU has the pages.

    vLLM's option `skip_reading_prefix_cache` would skip the connector, too. So this hook sets the option only while
    vLLM looks up pages on the GPU.
    """

    def get_computed_blocks(stock: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if (request.kv_transfer_params or {}).get(FROM_CONNECTOR) is not True:
            return stock(self, request, *args, **kwargs)
        asked, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, True
        try:
            return stock(self, request, *args, **kwargs)
        finally:
            request.skip_reading_prefix_cache = asked

    wrap("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", get_computed_blocks)


def serve_on_cpu() -> None:
    """Give vLLM's offloading a worker on the CPU platform, where vLLM has none."""

    def get_worker(stock: Any, self: Any, kv_caches: Any, *args: Any, **kwargs: Any) -> Any:
        from kvpilot_runtime.transfer.host_copies import HostCopies

        return HostCopies(kv_caches, self.num_chunks, self.blocks_per_chunk)

    wrap("vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.get_worker", get_worker)
