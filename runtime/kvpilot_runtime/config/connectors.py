"""KV connectors of vLLM that may send our pages between engines, and their supported configurations.

A page can be read only with the calibration factors with which it was quantized. So a class of ours replaces each
connector, and sends pages only between engines with equal dtype, layout and factors (`transfer.terms`).
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpilot_formats.arguments import rules
from kvpilot_runtime.vllm_api import compat


@dataclass(frozen=True)
class Connector:
    """KV connector of vLLM, with the configurations that our dtypes support.

    Attributes:
        name: vLLM's name of the connector.
        package: package that vLLM's class imports.
        ours: import path of our class that replaces vLLM's class.
        extra: allowed keys of `kv_connector_extra_config`, with the allowed values of each; None allows any value.
        needed: required keys of `kv_connector_extra_config`, with their values.
        release: required release of the package; None for any.
        sends_alone: True if an engine with the role `kv_producer` only sends pages, and so needs no policy for failed
            loads.
        layouts: supported layouts of the KV cache.
    """

    name: str
    package: str
    ours: str
    extra: Mapping[str, tuple[object, ...] | None]
    needed: Mapping[str, object] = field(default_factory=dict)
    release: tuple[int, int] | None = None
    sends_alone: bool = False
    layouts: tuple[str, ...] = (compat.LAYER_OUTERMOST,)


NIXL = Connector(
    "NixlConnector",
    package="nixl",
    ours="kvpilot_runtime.transfer.nixl_connector.PackedNixlConnector",
    extra={
        "backends": (["UCX"],), "bidirectional_kv_xfer": (False,), "enforce_handshake_compat": (True,),
        "kv_lease_duration": None, "engine_ttl": None, "num_threads": None,
    },
    sends_alone=True,
    layouts=(compat.LAYER_OUTERMOST, *compat.BLOCK_OUTERMOST),
)  # fmt: skip

LMCACHE = Connector(
    "LMCacheMPConnector",
    package="lmcache",
    release=(0, 5),
    ours="kvpilot_runtime.transfer.lmcache_connector.PackedLMCacheConnector",
    extra={"lmcache.mp.host": None, "lmcache.mp.port": None, "lmcache.mp.mq_timeout": None,
           "lmcache.mp.heartbeat_interval": None},
    needed={"lmcache.mp.mp_transfer_mode": "engine_driven"},
)  # fmt: skip

SERVED = {one.name: one for one in (NIXL, LMCACHE)}
"""Supported connectors by name. `rules.CONNECTORS` has the same names."""

LAYOUT = "VLLM_KV_CACHE_LAYOUT"
"""Environment variable of vLLM that sets the layout of the KV cache."""

_EXTRA = "kv_connector_extra_config"
_MISSING = object()


def unsupported(transfer: Mapping[str, Any], device: str) -> str | None:
    """Name the part of a connector's configuration that our dtypes do not support, or return None.

    Args:
        transfer: fields of vLLM's `KVTransferConfig`.
        device: `cuda` or `cpu`.
    """
    connector, extra = SERVED[transfer["kv_connector"]], transfer.get(_EXTRA) or {}
    for key, value in extra.items():
        allowed = (connector.needed[key],) if key in connector.needed else connector.extra.get(key, ())
        if allowed is not None and value not in allowed:
            return f"{connector.name} with {key} {value!r} in {_EXTRA}"
    for key, only in connector.needed.items():
        if key not in extra:
            return f'{connector.name} without "{key}": "{only}" in {_EXTRA}'
    sends = connector.sends_alone and transfer.get("kv_role") == "kv_producer"
    if not sends and transfer.get("kv_load_failure_policy") != "recompute":
        return f'{connector.name} without "kv_load_failure_policy": "recompute"'
    for key, only in (("kv_connector_module_path", None), ("enable_permute_local_kv", False),
                      ("kv_buffer_device", device)):  # fmt: skip
        if (value := transfer.get(key, _MISSING)) not in (_MISSING, None, only):
            return f"{connector.name} with {key} {value!r}"
    return None


def beside(config: Any) -> str | None:
    """Name a version or an option of the engine that its KV connector does not support, or return None.

    `config` is vLLM's `VllmConfig`.
    """
    connector = SERVED[config.kv_transfer_config.kv_connector]
    if compat.lacks(pinned=True):
        return f"{connector.name} of vllm {compat.version_text()}"
    if other := other_release(connector):
        return f"{connector.name} of {connector.package} {other}"
    if apart := misplaced(connector.name, getattr(config.cache_config, "kv_cache_layout", None)):
        return apart
    found = rules.first_set(config, rules.BESIDE_CONNECTORS)
    if found is None and config.cache_config.kv_cache_dtype_skip_layers:
        return f"{connector.name} beside layers that stay in 16 bits"
    return None if found is None else f"{connector.name} beside {found[1]}"


def misplaced(connector: str, layout: str | None) -> str | None:
    """Name the layout of the KV cache if the connector does not support it, or return None."""
    wrong = layout in compat.BLOCK_OUTERMOST and layout not in SERVED[connector].layouts
    return f"{connector} beside {LAYOUT}={layout}" if wrong else None


def other_release(connector: Connector) -> str | None:
    """Return the installed release of a connector's package if it is not the required one, or None."""
    try:
        found = importlib.metadata.version(connector.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = connector.release and compat.shown(connector.release)
    return found if wanted and not f"{found}.".startswith(f"{wanted}.") else None
