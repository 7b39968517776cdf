"""Check at engine start that attention layers read back what they have stored in pages.

A later vLLM may keep shapes and names but change their meaning: swap blocks and heads, exchange keys and values, or
count slots differently. So a worker runs this check once it has its KV cache. One layer of each shape stores up to
three test requests of different lengths, and attends to all of them in one engine step. With a recent window, their
newest blocks have residual pages. The result must agree with a computation in float64 (`kvpilot_kernels.reference`).
"""

import logging
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch

from kvpilot_kernels.reference.attention import decode_reference
from kvpilot_kernels.residuals import Residuals
from kvpilot_runtime.backends.packed import our_layers
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import compat

WORST = 0.05
"""Largest allowed error, relative to the float64 result. Rounding causes about 0.01, and a misread page about 1."""

LONGEST = 4096
"""Length limit of a test request, in tokens. In models with states, a page may have thousands of tokens."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def check(worker: Any) -> None:
    """Raise UnsupportedEngineError if one of vLLM's layers misreads stored pages. Restore the cache afterwards."""
    layers = [layer for layer in our_layers(worker.vllm_config).values() if layer.kv_sharing_target_layer_name is None]
    for layer in {(x.head_size, x.num_kv_heads, x.num_heads): x for x in layers}.values():
        try:
            off = _off(worker.vllm_config, layer)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            # This version of vLLM is tested on this kind of device, so only warn.
            if compat.was_run_on(worker.device.type):
                log.warning("The check of pages at start could not run: %s", why)
                return
            raise _refusal(layer, why) from error
        if not off <= WORST:
            raise _refusal(layer, f"the output is off by {off:.0%}, and at most {WORST:.0%} is allowed")


def _refusal(layer: Any, why: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"kv-cache dtype {layer.kv_cache_dtype!r} cannot be served by vllm {compat.version_text()}: a page that is "
        f"written and read back through {type(layer).__module__}.{type(layer).__name__} is not what was stored "
        f"({why}); use --kv-cache-dtype auto, or a runtime image with vllm {compat.ADVISED}"
    )


@dataclass(frozen=True)
class _Request:
    """Test request with random content, which the check stores and attends to.

    Attributes:
        new: queries, keys and values, [tokens, heads, head_dim] each.
        pages: int64 [pages], the request's blocks in the cache.
    """

    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    pages: torch.Tensor

    @property
    def tokens(self) -> int:
        return len(self.new[0])

    def slots(self, begin: int, end: int, size: int) -> torch.Tensor:
        """Return the cache slots of tokens [begin, end), in pages of `size` tokens."""
        at = torch.arange(begin, end, device=self.pages.device)
        return self.pages[at // size] * size + at % size


def lengths(blocks: int, size: int, longest: int) -> list[int]:
    """Return the lengths of test requests, in tokens: two pages, less than one page, and three pages.

    Leave out a request for which the cache has no blocks left.

    Args:
        blocks: number of blocks of the cache. It includes block 0, which vLLM gives to no request.
        size: tokens of a block.
        longest: largest number of tokens of a request.
    """
    found, left = [], blocks - 1
    for tokens in (size + 3, min(5, size), 2 * size + 1):
        if (pages := -(-tokens // size)) <= left and tokens <= min(longest, LONGEST):
            found.append(tokens)
            left -= pages
    return found or [min(size, longest)]


@torch.inference_mode()
def _off(config: Any, layer: Any) -> float:
    """Return the largest error of the layer's outputs for requests' last tokens, relative to the float64 result."""
    cache = layer.kv_cache
    size = cache.shape[2]  # the configured block size may differ, if KV-cache groups share pages
    scheduler = config.scheduler_config
    wanted = lengths(cache.shape[0], size, config.model_config.max_model_len)[: scheduler.max_num_seqs]
    requests = _requests(config, layer, wanted)
    residuals = layer.impl.residuals(cache)
    refined = _residual_pages(requests, residuals) if residuals is not None else {}
    spare = torch.tensor([page for pages in refined.values() for page in pages], device=cache.device).long()
    used = torch.cat([spare, *(request.pages for request in requests)])
    table = torch.nn.utils.rnn.pad_sequence([request.pages.int() for request in requests], batch_first=True)
    saved = cache[used]
    try:
        if residuals is not None:
            _write(residuals, refined)
        for row, request in enumerate(requests):  # each of these steps stores a part of a prompt
            for begin in range(0, request.tokens - 1, scheduler.max_num_batched_tokens):
                end = min(begin + scheduler.max_num_batched_tokens, request.tokens - 1)
                _step(config, layer, [(request, begin, end)], table[row : row + 1])
        out = _step(config, layer, [(x, x.tokens - 1, x.tokens) for x in requests], table)
    finally:
        cache[used] = saved
        if residuals is not None:
            residuals.pages.zero_()  # no request has blocks yet
    answers = out.view(len(requests), layer.num_heads, layer.head_size)
    return max(_differs(layer, request, refined, found) for request, found in zip(requests, answers, strict=True))


def _requests(config: Any, layer: Any, wanted: list[int]) -> list[_Request]:
    """Make random requests of the `wanted` lengths. They use the last pages of the cache, in descending order."""
    cache, found = layer.kv_cache, []
    random, last = torch.Generator().manual_seed(0), cache.shape[0] - 1
    for tokens in wanted:
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        drawn = (torch.randn(tokens, count, layer.head_size, generator=random) for count in heads)
        query, key, value = (x.to(cache.device, config.model_config.dtype) for x in drawn)
        pages = torch.arange(last, last - -(-tokens // cache.shape[2]), -1, device=cache.device)
        found.append(_Request((query, key, value), pages))
        last -= len(pages)
    return found


def _residual_pages(requests: list[_Request], residuals: Residuals) -> dict[int, tuple[int, ...]]:
    """Choose residual pages for the requests' newest blocks, by block. If blocks run out, the last ones get none."""
    count, newest = residuals.pages.shape[1], int(residuals.newest)
    blocks = [int(block) for request in requests for block in request.pages[-newest:].flip(0)]
    free = range(1, min(int(request.pages.min()) for request in requests))
    return {block: tuple(free[i * count : (i + 1) * count]) for i, block in enumerate(blocks[: len(free) // count])}


def _write(residuals: Residuals, refined: dict[int, tuple[int, ...]]) -> None:
    if refined:
        rows = torch.tensor(list(refined.values()), dtype=torch.int32, device=residuals.pages.device)
        residuals.pages[list(refined)] = rows


def _differs(layer: Any, request: _Request, refined: Collection[int], found: torch.Tensor) -> float:
    """Return the error of `found`, the layer's output for a request's last token, relative to the float64 result.

    The blocks in `refined` are read with residuals.
    """
    cpu, impl = torch.device("cpu"), layer.impl
    fine = torch.tensor([block in refined for block in request.pages.tolist()])
    fine = fine.repeat_interleave(layer.kv_cache.shape[2])[: request.tokens]
    query, key, value = (x.to(cpu) for x in request.new)
    wanted = decode_reference(
        query[-1], key, value, impl.fmt, impl.scale, impl.factors(layer, layer.kv_cache.device).to(cpu), fine,
        softcap=impl.softcap, sinks=None if impl.sinks is None else impl.sinks.to(cpu),
    )  # fmt: skip
    return float((found.to(cpu, torch.float64) - wanted).norm() / wanted.norm())


def _step(config: Any, layer: Any, asked: list[tuple[_Request, int, int]], table: torch.Tensor) -> torch.Tensor:
    """Run vLLM's layer on one engine step with the new tokens in `asked`, and return the layer's output.

    Args:
        asked: (request, begin, end), for new tokens [begin, end) of each request.
        table: int32 [requests, pages].
    """
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device, size = table.device, layer.kv_cache.shape[2]
    new = [end - begin for _, begin, end in asked]
    count = sum(new)
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor([end for *_, end in asked], dtype=torch.int32)
    slots = torch.cat([request.slots(begin, end, size) for request, begin, end in asked])
    known = {
        "query_start_loc": starts.to(device), "query_start_loc_cpu": starts, "num_reqs": len(asked),
        "num_actual_tokens": count, "seq_lens": lens.to(device), "max_query_len": max(new),
        "max_seq_len": int(lens.max()), "block_table_tensor": table, "slot_mapping": slots, "causal": True,
    }  # fmt: skip
    every = fields(CommonAttentionMetadata)
    missing = {f.name: None for f in every if f.default is MISSING and f.default_factory is MISSING and f.init}
    common = CommonAttentionMetadata(**missing | {f.name: known[f.name] for f in every if f.name in known})
    backend = layer.get_attn_backend()
    spec = replace(backend.customize_spec(layer.get_kv_cache_spec(config)), block_size=size)
    metadata = {layer.layer_name: backend.get_builder_cls()(spec, [layer.layer_name], config, device).build(0, common)}
    mapping = {layer.layer_name: slots}
    given = zip(*(tuple(x[begin:end] for x in request.new) for request, begin, end in asked), strict=True)
    query, key, value = (torch.cat(parts).flatten(1) for parts in given)
    with set_forward_context(metadata, config, num_tokens=count, slot_mapping=mapping, skip_compiled=True):
        out: torch.Tensor = layer(query, key, value)
    return out
