"""vLLM's offloading of the KV cache to host memory (`--kv-offloading-size`): what of KV transfer our dtypes take.

A page of ours is bytes that only the factors it was quantized with give their meaning back. vLLM's tier in host memory
belongs to one engine and ends with it, and an engine settles its factors before its KV cache is made: pages that
return always find the factors that they left with. Of the connectors that bring pages of other engines those of
`carriers` are served, on terms of ours; all others name pages by what says nothing of factors, and are refused.
"""

from __future__ import annotations

from typing import Any

from kvpilot_runtime import carriers, compat

CONNECTOR, TIER = "OffloadingConnector", "CPUOffloadingSpec"

FROM_HOST = "kvpilot_from_host"
"""A key of a request's `kv_transfer_params`: true leaves aside what the GPU holds of its prompt, so that the tier is
asked for all of it. The operator's probes set it, to judge pages that came back."""


def unsupported(transfer: Any) -> str | None:
    """What of a vLLM `KVTransferConfig` does not go together with our dtypes; None where nothing is in the way."""
    if transfer.kv_connector in carriers.SERVED:
        from vllm.platforms import current_platform

        return carriers.unsupported(vars(transfer), current_platform.device_type)
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector != CONNECTOR:
        return f"the connector {transfer.kv_connector!r}"
    if (tier := extra.get("spec_name", TIER)) != TIER:
        return f"the tier {tier!r}"
    if extra.get("canonical_layout"):
        return "canonical_layout"
    return None


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

    from kvpilot_runtime.host_copies import HostCopies

    def get_worker(self: Any, kv_caches: Any) -> HostCopies:
        return HostCopies(kv_caches, compat.chunks_in_host_memory(self), self.blocks_per_chunk)

    CPUOffloadingSpec.get_worker = get_worker
