"""What engines that pages travel between agree on, and what vLLM is told of it.

A page of ours is bytes that only the factors it was quantized with give their meaning back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpilot_formats import formats
from kvpilot_runtime.calibration.of_engine import factors_hash
from kvpilot_runtime.config.carriers import NIXL, SERVED
from kvpilot_runtime.vllm_api import compat


@dataclass(frozen=True)
class Terms:
    """What engines that pages travel between must have alike.

    Attributes:
        dtype: of the KV cache. page: bytes of a block in all layers of a rank. block: tokens of it.
        window: recent tokens. ring: pages of a request's ring at most. ranks: of tensor parallelism.
        layout: vLLM's name of the order in which a block's pages lie.
        factors: the hash of all layers' and ranks' factors.
    """

    dtype: str
    page: int
    block: int
    window: int
    ring: int
    ranks: int
    layout: str
    factors: str

    def __str__(self) -> str:
        return (
            f"kv-cache dtype {self.dtype}, {self.page} bytes for {self.block} tokens, recent window {self.window} in "
            f"{self.ring} pages, tensor parallel {self.ranks}, layout {self.layout}, factors {self.factors}"
        )


def agree(worker: Any, layers: dict[str, Any]) -> None:
    """Tell a worker's connector its engine's terms. Every rank has to; without effect for another connector.

    Args:
        worker: vLLM's, which has its KV cache. layers: those of ours, by name.
    """
    transfer = worker.vllm_config.kv_transfer_config
    if not layers or transfer is None or transfer.kv_connector not in SERVED:
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    config, first = worker.vllm_config, next(iter(layers.values()))
    impl, block = first.impl, first.kv_cache.shape[2]
    terms = Terms(
        dtype=first.kv_cache_dtype,
        page=sum(layer.kv_cache[0].nbytes for layer in layers.values()),
        block=block,
        window=impl.recent or 0,
        ring=0 if impl.ring is None else impl.fmt.ring_blocks(impl.recent + impl.drafts, first.head_size, block),
        ranks=config.parallel_config.tensor_parallel_size,
        layout=config.cache_config.kv_cache_layout,
        factors=factors_hash(layers, worker.device),
    )
    get_kv_transfer_group().agree(terms, worker)


def connector_class(config: Any) -> type[Any] | None:
    """The class of an engine's connector, where it is not vLLM's own."""
    carrier = SERVED.get(config.kv_transfer_config.kv_connector)
    if carrier is None or config.cache_config.cache_dtype not in formats.own_names():
        return None
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found: type[Any] = resolve_obj_by_qualname(carrier.ours)
    return found


def layout(config: Any) -> str | None:
    """The layout of the KV cache that vLLM is to be asked for; None where it is what vLLM's own connector wants.

    A block whose layers lie in a row is one copy. Of a rank with one head vLLM copies each layer by itself
    nevertheless, and NIXL joins a layer's blocks where these lie in a row.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != NIXL.name:
        return None
    ours = config.cache_config.cache_dtype in formats.own_names()
    several = ours and config.model_config.get_num_kv_heads(config.parallel_config) > 1
    return compat.BLOCK_OUTERMOST[0] if several else None
