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

DISK, DISK_MODULE, DISK_TIER = "DiskOffloadingSpec", "kvpilot_runtime.disk_spec", "disk"
"""vLLM's names for host memory with our file below it, and for that file: they stand in the labels of its metrics."""

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
    if (tier := extra.get("spec_name", TIER)) == DISK and extra.get("spec_module_path") == DISK_MODULE:
        others = [one.get("type") for one in extra.get("secondary_tiers", ()) if one.get("type") != DISK_TIER]
        if others:
            return f"the tier {others[0]!r} below host memory"
    elif tier != TIER:
        return f"the tier {tier!r}"
    if extra.get("canonical_layout"):
        return "canonical_layout"
    return None


def below_host(path: str, size: int) -> dict[str, Any]:
    """vLLM's `KVTransferConfig` of a file in the folder `path` below host memory, of `size` bytes at most.

    It goes with `--kv-offloading-size`, which says how much host memory there is.
    """
    file = {"type": DISK_TIER, "path": path, "size_bytes": size}
    extra = {"spec_name": DISK, "spec_module_path": DISK_MODULE, "secondary_tiers": [file]}
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra}


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
