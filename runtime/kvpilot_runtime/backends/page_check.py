"""The last part of the contract: a page that is written and read back through vLLM's own attention layer.

Shapes and names may be as they were, and what they mean may have changed: another order of blocks or heads, keys where
values were, a slot that is counted otherwise. So once a worker has its KV cache, one layer of each shape stores a
sequence and attends to it, as in a step, and the reference says what should have come of it.
"""

from __future__ import annotations

import logging
from dataclasses import MISSING, fields, replace
from typing import Any

import torch

from kvpilot_kernels.reference.attention import decode_reference
from kvpilot_runtime.backends.packed import our_layers
from kvpilot_runtime.engine import compat
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.recent.ring_layers import Rings

WORST = 0.05
"""Of the reference's answer. Elements of 16 bits and other sums make it 0.01; a page that is misread, 1 or so."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


def check(worker: Any) -> None:
    """Refuse a vLLM whose layers do not give back what they were given; the cache is left as it was.

    On a GPU that is looked at where the version is not one that was run there.

    Raises:
        UnsupportedEngineError: a step's answer is not the reference's; or no step can be made, and the version is not
            one that was tested.
    """
    layers = [layer for layer in our_layers(worker.vllm_config).values() if layer.kv_sharing_target_layer_name is None]
    if not layers or (worker.device.type != "cpu" and compat.tested()):
        return
    for layer in {(x.head_size, x.num_kv_heads, x.num_heads): x for x in layers}.values():
        try:
            off = _off(worker.vllm_config, layer)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if compat.tested():  # by more than this
                log.warning("No page was written and read back at start: %s", why)
                return
            raise _refusal(layer, why) from error
        if not off <= WORST:
            raise _refusal(layer, f"the answer is off by {off:.0%} of its size, and {WORST:.0%} is the most")


def _refusal(layer: Any, why: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"kv-cache dtype {layer.kv_cache_dtype!r} cannot be served by vllm {compat.version_text()}: a page that is "
        f"written and read back through {type(layer).__module__}.{type(layer).__name__} is not what was stored "
        f"({why}); use --kv-cache-dtype auto, or a runtime image with vllm {compat.RANGE}"
    )


@torch.inference_mode()
def _off(config: Any, layer: Any) -> float:
    """By how much the layer's answer to the last token of a sequence differs from the reference's, relative to it."""
    cache, impl = layer.kv_cache, layer.impl
    blocks, size = cache.shape[0], cache.shape[2]
    # Two blocks, the later one first; the first block of a cache is nobody's.
    table = torch.tensor([[blocks - 1, 1]] if blocks > 2 else [[1]], dtype=torch.int32, device=cache.device)
    tokens = size + 3 if blocks > 2 else size
    at = torch.arange(tokens, device=cache.device)
    slots = table[0].long()[at // size] * size + at % size
    random = torch.Generator().manual_seed(0)
    dtype = config.model_config.dtype

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, layer.head_size, generator=random).to(cache.device, dtype)

    query, key, value = drawn(layer.num_heads), drawn(layer.num_kv_heads), drawn(layer.num_kv_heads)
    saved = cache[table[0].long()]
    try:
        for new in (slice(0, tokens - 1), slice(tokens - 1, tokens)):  # a prompt, and a step of one token
            out = _step(config, layer, (query[new], key[new], value[new]), table, slots[new], new.stop)
    finally:
        cache[table[0].long()] = saved
    cpu = torch.device("cpu")
    wanted = decode_reference(
        query[-1].to(cpu), key.to(cpu), value.to(cpu), impl.fmt, impl.scale, impl.factors(layer, cache.device).to(cpu),
        softcap=impl.softcap, sinks=None if impl.sinks is None else impl.sinks.to(cpu),
    )  # fmt: skip
    found = out.view(layer.num_heads, layer.head_size).to(cpu, torch.float64)
    return float((found - wanted).norm() / wanted.norm())


def _step(
    config: Any, layer: Any, new: tuple[torch.Tensor, torch.Tensor, torch.Tensor], table: torch.Tensor,
    slots: torch.Tensor, stored: int,
) -> torch.Tensor:  # fmt: skip
    """One step of vLLM's layer with queries, keys and values of one sequence, which has `stored` tokens afterwards."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    count, device = len(slots), slots.device
    starts = torch.tensor([0, count], dtype=torch.int32)
    known = {
        "query_start_loc": starts.to(device), "query_start_loc_cpu": starts, "num_reqs": 1, "num_actual_tokens": count,
        "seq_lens": torch.tensor([stored], dtype=torch.int32, device=device), "max_query_len": count,
        "max_seq_len": stored, "block_table_tensor": table, "slot_mapping": slots, "causal": True,
    }  # fmt: skip
    every = fields(CommonAttentionMetadata)
    asked = {f.name: None for f in every if f.default is MISSING and f.default_factory is MISSING and f.init}
    common = CommonAttentionMetadata(**asked | {f.name: known[f.name] for f in every if f.name in known})
    backend, impl = layer.get_attn_backend(), layer.impl
    size = layer.kv_cache.shape[2]  # the config has another one where groups of layers share pages
    spec = replace(backend.customize_spec(layer.get_kv_cache_spec(config)), block_size=size)
    metadata = {layer.layer_name: backend.get_builder_cls()(spec, [layer.layer_name], config, device).build(0, common)}
    mapping = {layer.layer_name: slots}
    if impl.ring is not None:  # which the window's own tests look at
        blocks = impl.fmt.ring_blocks(impl.recent + impl.drafts, layer.head_size, size)
        nobodys = torch.full((count, blocks), -1, dtype=torch.int32, device=device)
        metadata[impl.ring.layer_name] = Rings(torch.full((count,), -1, device=device), nobodys)
    with set_forward_context(metadata, config, num_tokens=count, slot_mapping=mapping, skip_compiled=True):
        query, key, value = (x.flatten(1) for x in new)
        out: torch.Tensor = layer(query, key, value)
    return out[-1]
