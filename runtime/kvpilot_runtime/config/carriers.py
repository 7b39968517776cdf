"""The connectors of vLLM that carry pages of ours between engines: in which forms, and beside what, all was right.

A page of ours is bytes that only the factors it was quantized with give their meaning back. So each of them is one of
ours behind vLLM's name, which lets pages travel only between engines that agree on their terms (`transfer.terms`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpilot_formats.arguments import rules
from kvpilot_runtime.vllm_api import compat


@dataclass(frozen=True)
class Carrier:
    """A connector, and the configurations of it that our dtypes take.

    Attributes:
        name: vLLM's. package: what it imports. release: the only one of it that was read and run; None for any.
        ours: the import path of the class that is made in its place.
        extra: what `kv_connector_extra_config` may have, and with which values; None for any.
        needed: what it must have. sends_alone: whether it loads nothing for a `kv_producer`.
        layouts: those of the KV cache that it was seen right with.
    """

    name: str
    package: str
    ours: str
    extra: Mapping[str, tuple[object, ...] | None]
    needed: Mapping[str, object] = field(default_factory=dict)
    release: tuple[int, int] | None = None
    sends_alone: bool = False
    layouts: tuple[str, ...] = (compat.LAYER_OUTERMOST,)


NIXL = Carrier(
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

LMCACHE = Carrier(
    "LMCacheMPConnector",
    package="lmcache",
    release=(0, 5),
    ours="kvpilot_runtime.transfer.lmcache_connector.PackedLMCacheConnector",
    extra={"lmcache.mp.host": None, "lmcache.mp.port": None, "lmcache.mp.mq_timeout": None,
           "lmcache.mp.heartbeat_interval": None},
    needed={"lmcache.mp.mp_transfer_mode": "engine_driven"},
)  # fmt: skip

SERVED = {one.name: one for one in (NIXL, LMCACHE)}
"""By name: those of `rules.CARRIERS`."""

LAYOUT = "VLLM_KV_CACHE_LAYOUT"
"""vLLM's variable that names the layout of the KV cache."""

_EXTRA = "kv_connector_extra_config"
_MISSING = object()


def unsupported(transfer: Mapping[str, Any], device: str) -> str | None:
    """What of a served connector's configuration does not go together with our dtypes; None for nothing.

    Args:
        transfer: fields of vLLM's `KVTransferConfig`. device: `cuda` or `cpu`.
    """
    carrier, extra = SERVED[transfer["kv_connector"]], transfer.get(_EXTRA) or {}
    for key, value in extra.items():
        allowed = (carrier.needed[key],) if key in carrier.needed else carrier.extra.get(key, ())
        if allowed is not None and value not in allowed:
            return f"{carrier.name} with {key} {value!r} in {_EXTRA}"
    for key, only in carrier.needed.items():
        if key not in extra:
            return f'{carrier.name} without "{key}": "{only}" in {_EXTRA}'
    sends = carrier.sends_alone and transfer.get("kv_role") == "kv_producer"
    if not sends and transfer.get("kv_load_failure_policy") != "recompute":
        return f'{carrier.name} without "kv_load_failure_policy": "recompute"'
    for key, only in (("kv_connector_module_path", None), ("enable_permute_local_kv", False),
                      ("kv_buffer_device", device)):  # fmt: skip
        if (value := transfer.get(key, _MISSING)) not in (_MISSING, None, only):
            return f"{carrier.name} with {key} {value!r}"
    return None


def beside(config: Any) -> str | None:
    """The part of an engine's vLLM configuration that was never seen right beside its connector and our dtypes."""
    carrier = SERVED[config.kv_transfer_config.kv_connector]
    if compat.vllm_version() != compat.CARRIES:
        return f"{carrier.name} of vllm {compat.version_text()}"
    if other := other_release(carrier):
        return f"{carrier.name} of {carrier.package} {other}"
    if apart := misplaced(carrier.name, getattr(config.cache_config, "kv_cache_layout", None)):
        return apart
    found = rules.first_set(config, rules.BESIDE_CARRIERS)
    if found is None and config.cache_config.kv_cache_dtype_skip_layers:
        return f"{carrier.name} beside layers that stay in 16 bits"
    return None if found is None else f"{carrier.name} beside {found[1]}"


def misplaced(connector: str, layout: str | None) -> str | None:
    """The layout in which a served connector was not seen right; None where it is another, or not known yet."""
    wrong = layout in compat.BLOCK_OUTERMOST and layout not in SERVED[connector].layouts
    return f"{connector} beside {LAYOUT}={layout}" if wrong else None


def other_release(carrier: Carrier) -> str | None:
    """The installed release of a connector's package where it is not the one that was seen right."""
    try:
        found = importlib.metadata.version(carrier.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = carrier.release and ".".join(map(str, carrier.release))
    return found if wanted and not f"{found}.".startswith(f"{wanted}.") else None
