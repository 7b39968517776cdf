"""Residual pages for a scheduler of vLLM: extend it, check what it needs, and read the changes of the map."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from vllm import envs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpilot_formats import formats
from kvpilot_runtime.config import offload
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.metrics.worker_info import TOKENS_AT_8_BITS
from kvpilot_runtime.recent.claims import Claims
from kvpilot_runtime.recent.residual_pool import ARGUMENTS, HANDED_OUT, ResidualManager, ResidualPool
from kvpilot_runtime.recent.window import VARIABLE, keeps_all, window
from kvpilot_runtime.vllm_api import contract

RAY_V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
"""vLLM's variable for its second Ray executor. The first one gives a step to the model without the worker's hooks."""


def require() -> None:
    """Raise AttributeError if this vLLM lacks a function that this module overrides, or an argument that it reads."""
    contract.require(
        BlockPool, "get_num_free_blocks", "get_new_blocks", "free_blocks", "evict_blocks", "reset_prefix_cache"
    )
    contract.require(KVCacheManager, "free", "pop_blocks_for_free")
    contract.require(KVCacheManager.allocate_slots, *ARGUMENTS, "new_computed_blocks", "has_scheduled_reqs")


def extend(scheduler: Any) -> None:
    """Let a scheduler of vLLM give residual pages to blocks, if its engine has a recent window.

    Raises:
        UnsupportedModelError: the workers would not get the map of residual pages, or a KV connector could overwrite
            pages that nobody claims.
    """
    config = scheduler.vllm_config
    if config.cache_config.cache_dtype not in formats.own_names() or not (recent := window(config)):
        return
    if config.parallel_config.distributed_executor_backend == "ray" and not getattr(envs, RAY_V2, False):
        raise UnsupportedModelError(
            f"a recent window with vLLM's first Ray executor ({RAY_V2}=0) is not supported; set {RAY_V2}=1, or "
            "--recent-tokens=0"
        )
    if keeps_all() and config.kv_transfer_config is not None:
        raise UnsupportedModelError(
            f"{VARIABLE}={formats.ALL} is not supported with a KV connector, which may write to a page that a step "
            "still reads; leave out --kv-transfer-config and --kv-offloading-size, or set --recent-tokens to a number"
        )
    manager = scheduler.kv_cache_manager
    fmt = formats.parse(config.cache_config.cache_dtype)
    full = [m for m in manager.coordinator.single_type_managers if isinstance(m.kv_cache_spec, FullAttentionSpec)]
    # If layers differ, vLLM shows the scheduler the spec of one layer of a group, maybe of one in 16 bits.
    ours = [m for m in full if m.kv_cache_spec.dtype == torch.uint8] or full
    pool = manager.block_pool
    manager.__class__, pool.__class__ = ResidualManager, ResidualPool
    manager.refined = {m: fmt.recent_blocks(recent, m.block_size) for m in ours}
    defers = getattr(scheduler, "defer_block_free", False)
    manager.takes, manager.rewinds = not defers, defers and scheduler.num_spec_tokens > 0
    pool.claims, pool.held, pool.taking, pool.scheduler = Claims(), 0, False, scheduler if defers else None
    pool.offloading, pool.lends, pool.reported = _offloading(scheduler), keeps_all(), 0.0
    pool.count = max(fmt.residual_pages(dim, m.block_size) for dim in formats.HEAD_DIMS for m in ours)


def _offloading(scheduler: Any) -> Any | None:
    transfer = scheduler.vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != offload.CONNECTOR:
        return None
    with contract.needed(scheduler.vllm_config.cache_config.cache_dtype):
        found = scheduler.connector.connector_scheduler
        getattr(found, HANDED_OUT)  # Without this attribute, vLLM would copy residuals instead of offloaded blocks.
    return found


def changes(scheduler: Any) -> Mapping[int, tuple[int, ...]]:
    """Return the blocks whose residual pages have changed since the last call, with their residual pages.

    With `--recent-tokens=all`, also report the share of blocks with residual pages, at most once a second.
    """
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if not isinstance(pool, ResidualPool):
        return {}
    if pool.lends and time.monotonic() - pool.reported >= 1:
        pool.reported = time.monotonic()
        TOKENS_AT_8_BITS.write({}, round(manager.share(), 4))
    return pool.claims.changes()
