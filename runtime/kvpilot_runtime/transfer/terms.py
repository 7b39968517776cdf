"""Terms: the properties of an engine that decide whether another engine can read its pages.

A page can be read only with the layout, dtype and calibration factors with which it was written. So engines exchange
pages only if their terms are equal.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from kvpilot_formats import formats
from kvpilot_runtime.calibration.of_engine import factors_hash
from kvpilot_runtime.config.connectors import NIXL, SERVED
from kvpilot_runtime.ranks import of_all_ranks
from kvpilot_runtime.vllm_api import compat

_SAMPLES = 64
"""Number of elements per tensor in a hash of weights. Hashing all of them would take seconds."""


@dataclass(frozen=True)
class Terms:
    """Properties that two engines must have in common to exchange KV pages.

    Attributes:
        dtype: KV-cache dtype.
        page: bytes of a block in all layers of a rank.
        block: tokens of a block.
        ranks: number of tensor-parallel ranks.
        layout: vLLM's name of the KV cache's layout.
        factors: hash of the factors of all layers and ranks.
    """

    dtype: str
    page: int
    block: int
    ranks: int
    layout: str
    factors: str

    def __str__(self) -> str:
        return (
            f"kv-cache dtype {self.dtype}, {self.page} bytes for {self.block} tokens, tensor parallel {self.ranks}, "
            f"layout {self.layout}, factors {self.factors}"
        )


def agree(worker: Any, layers: dict[str, Any]) -> None:
    """Pass the engine's `Terms` to a worker's KV connector if the connector is one of ours. Every rank must call this.

    Args:
        worker: vLLM's worker, which has its KV cache.
        layers: our layers, by name.
    """
    transfer = worker.vllm_config.kv_transfer_config
    if not layers or transfer is None or transfer.kv_connector not in SERVED:
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    config, first = worker.vllm_config, next(iter(layers.values()))
    terms = Terms(
        dtype=first.kv_cache_dtype,
        page=sum(layer.kv_cache[0].nbytes for layer in layers.values()),
        block=first.kv_cache.shape[2],
        ranks=config.parallel_config.tensor_parallel_size,
        layout=config.cache_config.kv_cache_layout,
        factors=factors_hash(layers, worker.device),
    )
    get_kv_transfer_group().agree(terms, worker)


def connector_class(config: Any) -> type[Any] | None:
    """Return our class that replaces an engine's KV connector, or None to keep vLLM's class."""
    connector = SERVED.get(config.kv_transfer_config.kv_connector)
    if connector is None or config.cache_config.cache_dtype not in formats.own_names():
        return None
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found: type[Any] = resolve_obj_by_qualname(connector.ours)
    return found


def layout(config: Any) -> str | None:
    """Return which layout of the KV cache to request from vLLM. Return None to let vLLM's own connector choose.

    Request the layout in which all layers of a block are contiguous, because one copy then transfers a block. For ranks
    with one KV head return None, because vLLM then copies each layer separately in any layout, and NIXL merges adjacent
    blocks of a layer.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != NIXL.name:
        return None
    ours = config.cache_config.cache_dtype in formats.own_names()
    several = ours and config.model_config.get_num_kv_heads(config.parallel_config) > 1
    return compat.BLOCK_OUTERMOST[0] if several else None


def short(params: Mapping[str, Any], prompt: int, wanted: Sequence[int]) -> str | None:
    """Describe the fault if the blocks that another engine announces do not fit a prompt; else return None.

    Without this check, vLLM would use the last of the announced blocks, even if their number is wrong.

    Args:
        params: a request's `kv_transfer_params`.
        prompt: number of tokens of the request's prompt.
        wanted: number of the prompt's blocks in each KV-cache group.
    """
    if (tokens := params.get("remote_num_tokens") or 0) < prompt:
        return f"{tokens} of {prompt} tokens (remote_num_tokens)"
    found = [len(blocks) for blocks in params.get("remote_block_ids") or []]
    if found != list(wanted):
        return f"{found} blocks in its KV-cache groups instead of {list(wanted)} (remote_block_ids)"
    if params.get("remote_blocks_expiry_time") is None:
        return "no time at which its blocks expire (remote_blocks_expiry_time)"
    return None


def weights_hash(worker: Any) -> str:
    """Return a hash of sampled elements of all ranks' weights. Every rank must call this.

    Training, merged adapters and quantization change the hash. A change of only a few elements may not change it.
    """
    return hashlib.sha256("".join(of_all_ranks(digest(worker.get_model()))).encode()).hexdigest()[:16]


def digest(model: torch.nn.Module) -> str:
    """Return a hash of sampled elements of one rank's weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda one: one[0]):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.numel():
            found.update(_some(tensor.detach()).cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return up to `_SAMPLES` elements, spread evenly over the tensor's memory. The tensor may have any strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(_SAMPLES, last + 1)
    step = max(last // max(count - 1, 1), 1)
    return tensor.as_strided((count,), (step,)).contiguous()
