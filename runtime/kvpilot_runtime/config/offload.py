"""vLLM's offloading of the KV cache to host memory (`--kv-offloading-size`): what of KV transfer our dtypes take.

A page of ours is bytes that only the factors it was quantized with give their meaning back. vLLM's tier in host memory
belongs to one engine and ends with it, and an engine settles its factors before its KV cache is made: pages that
return always find the factors that they left with. Of the connectors that bring pages of other engines those of
`carriers` are served, on terms of ours; all others name pages by what says nothing of factors, and are refused.
"""

from __future__ import annotations

from typing import Any

from kvpilot_runtime.config import carriers

CONNECTOR, TIER = "OffloadingConnector", "CPUOffloadingSpec"

DISK, DISK_MODULE, DISK_TIER = "DiskOffloadingSpec", "kvpilot_runtime.transfer.disk_spec", "disk"
"""vLLM's names for host memory with our file below it, and for that file: they stand in the labels of its metrics."""

FROM_HOST = "kvpilot_from_host"
"""A key of a request's `kv_transfer_params`: true leaves aside what the GPU holds of its prompt, so that the tier is
asked for all of it. The operator's probes set it, to judge pages that came back."""


def unsupported(transfer: Any, device: str) -> str | None:
    """What of a vLLM `KVTransferConfig` does not go together with our dtypes; None where nothing is in the way.

    Args:
        device: `cuda` or `cpu`.
    """
    if transfer.kv_connector in carriers.SERVED:
        return carriers.unsupported(vars(transfer), device)
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
