"""Rules for offloading the KV cache to host memory (`--kv-offloading-size`) with our dtypes.

A page can be read only with the calibration factors with which it was quantized. The host memory belongs to one engine,
and the engine's factors never change once it has a KV cache. So a page that returns from host memory is read with the
right factors. Connectors between engines are supported only if `connectors` lists them. Others would give pages to
engines with different factors.
"""

from typing import Any

from kvpilot_runtime.config import connectors

CONNECTOR, TIER = "OffloadingConnector", "CPUOffloadingSpec"

FROM_CONNECTOR = "kvpilot_from_connector"
"""Key of a request's `kv_transfer_params`. If true, the engine loads the prefix through its KV connector, not from GPU
pages.

The operator's probes set it to check pages that were offloaded, or that another engine has stored.
"""


def unsupported(transfer: Any, device: str) -> str | None:
    """Name the part of a vLLM `KVTransferConfig` that our dtypes do not support, or return None.

    Args:
        device: `cuda` or `cpu`.
    """
    if transfer.kv_connector in connectors.SERVED:
        return connectors.unsupported(vars(transfer), device)
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector != CONNECTOR:
        return f"the connector {transfer.kv_connector!r}"
    if (tier := extra.get("spec_name", TIER)) != TIER:
        return f"the tier {tier!r}"
    if extra.get("canonical_layout"):
        return "canonical_layout"
    return None
