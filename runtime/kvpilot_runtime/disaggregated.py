"""Prefill and decode in engines of their own (vLLM's `NixlConnector`): what of it our dtypes take, and on which terms.

A page of ours is bytes that only the factors it was quantized with give their meaning back. So what two engines must
have alike stands in what they tell each other before the first page travels, and in words: whoever is refused reads in
its log in what the other one differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpilot_kernels import formats
from kvpilot_runtime import compat

CONNECTOR = "NixlConnector"

_EXTRA = {
    "backends": (["UCX"],), "bidirectional_kv_xfer": (False,), "enforce_handshake_compat": (True,),
    "kv_lease_duration": None, "engine_ttl": None, "num_threads": None,
}  # fmt: skip
"""What the connector's `kv_connector_extra_config` may have, and with which values; None for any."""

_MISSING = object()


def unsupported(transfer: Mapping[str, Any], device: str) -> str | None:
    """What of a `NixlConnector`'s configuration does not go together with our dtypes; None where nothing is in the way.

    Args:
        transfer: fields of vLLM's `KVTransferConfig`. device: `cuda` or `cpu`.
    """
    extra = transfer.get("kv_connector_extra_config") or {}
    for key, value in extra.items():
        if key not in _EXTRA or (_EXTRA[key] is not None and value not in (_EXTRA[key] or ())):
            return f"{CONNECTOR} with {key} {value!r} in kv_connector_extra_config"
    if transfer.get("kv_role") != "kv_producer" and transfer.get("kv_load_failure_policy") != "recompute":
        return f'{CONNECTOR} without "kv_load_failure_policy": "recompute"'
    for key, only in (("kv_connector_module_path", None), ("enable_permute_local_kv", False),
                      ("kv_buffer_device", device)):  # fmt: skip
        if (value := transfer.get(key, _MISSING)) not in (_MISSING, None, only):
            return f"{CONNECTOR} with {key} {value!r}"
    return None


@dataclass(frozen=True)
class Terms:
    """What an engine that sends pages and one that gets them must have alike.

    Attributes:
        dtype: of the KV cache. page: bytes of a block in all layers of a rank. block: tokens of it.
        window: recent tokens. ring: pages of a request's ring at most. ranks: of tensor parallelism.
        factors: the hash of all layers' and ranks' factors.
    """

    dtype: str
    page: int
    block: int
    window: int
    ring: int
    ranks: int
    factors: str

    def __str__(self) -> str:
        return (
            f"kv-cache dtype {self.dtype}, {self.page} bytes for {self.block} tokens, recent window {self.window} in "
            f"{self.ring} pages, tensor parallel {self.ranks}, factors {self.factors}"
        )


def short(params: Mapping[str, Any], prompt: int, wanted: Sequence[int]) -> str | None:
    """How another engine's word on its blocks is not that of a prompt; None where it is.

    vLLM takes the last blocks of what it is told of, however many these are.

    Args:
        params: a request's `kv_transfer_params`. prompt: its tokens. wanted: its blocks in each group of layers.
    """
    if (tokens := params.get("remote_num_tokens") or 0) < prompt:
        return f"{tokens} of {prompt} tokens (remote_num_tokens)"
    found = [len(blocks) for blocks in params.get("remote_block_ids") or []]
    if found != list(wanted):
        return f"{found} blocks in its groups of layers and not {list(wanted)} (remote_block_ids)"
    if params.get("remote_blocks_expiry_time") is None:
        return "no time until which blocks are kept (remote_blocks_expiry_time)"
    return None


def beside(config: Any) -> str | None:
    """What of an engine's vLLM configuration was never seen right beside `NixlConnector` and our dtypes."""
    parallel = config.parallel_config
    if compat.vllm_version() != compat.NIXL:
        return f"{CONNECTOR} of vllm {compat.version_text()}"
    asked = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "adapters": config.lora_config is not None,
        "layers that stay in 16 bits": bool(config.cache_config.kv_cache_dtype_skip_layers),
    }
    return next((f"{CONNECTOR} beside {name}" for name, is_so in asked.items() if is_so), None)


def connector_class(config: Any) -> type[Any] | None:
    """The class of an engine's connector, where it is not vLLM's own."""
    transfer = config.kv_transfer_config
    if transfer.kv_connector != CONNECTOR or config.cache_config.cache_dtype not in formats.own_names():
        return None
    from kvpilot_runtime.nixl_connector import PackedNixlConnector

    return PackedNixlConnector


def agree(worker: Any, layers: dict[str, Any]) -> None:
    """Tell a worker's connector its engine's terms. Every rank has to; without effect for another connector.

    Args:
        worker: vLLM's, which has its KV cache. layers: those of ours, by name.
    """
    transfer = worker.vllm_config.kv_transfer_config
    if not layers or transfer is None or transfer.kv_connector != CONNECTOR:
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvpilot_runtime.self_calibration import factors_hash

    config, first = worker.vllm_config, next(iter(layers.values()))
    impl, block = first.impl, first.kv_cache.shape[2]
    terms = Terms(
        dtype=first.kv_cache_dtype,
        page=sum(layer.kv_cache[0].nbytes for layer in layers.values()),
        block=block,
        window=impl.recent or 0,
        ring=0 if impl.ring is None else impl.fmt.ring_blocks(impl.recent + impl.drafts, first.head_size, block),
        ranks=config.parallel_config.tensor_parallel_size,
        factors=factors_hash(layers, worker.device),
    )
    get_kv_transfer_group().connector_worker.agree(terms)
