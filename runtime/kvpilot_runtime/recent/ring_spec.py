"""What vLLM's scheduler knows of the recent window: a ring of pages a request, never shared and never cached.

Whoever unpickles a `RingSpec` imports this module, and so registers it. vLLM 0.30 and later only: older versions have
no group that stays out of prefix caching (`contract.has_rings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpilot_formats import formats


@dataclass(frozen=True, kw_only=True)
class RingSpec(CircularBufferSpec):  # type: ignore[misc]  # vLLM has no types for us
    """Pages of the bytes and the block size of the layer's own, so that one pool holds both and prefix hits keep their
    granularity.

    Attributes:
        kept: tokens that a ring keeps, those of the window and as many more as a step may have drafts.
        fmt: name of the layer's format.
    """

    kept: int
    fmt: str

    # Of the block size that vLLM settles on: it makes ours larger where other layers' pages are.
    @property
    def ring_tokens(self) -> int:
        """Of a page."""
        return _ring(self.fmt, self.kept, self.head_size, self.block_size)[0]

    @property
    def ring_blocks(self) -> int:
        """Pages of a request at most."""
        return _ring(self.fmt, self.kept, self.head_size, self.block_size)[1]

    @property
    def block_table_token_alignment(self) -> int | None:
        """As the layer's own, and so the same stride in both tables."""
        return 128

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of one request."""
        return int(self.ring_blocks * self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """As wide as the layer's own table: the first model runner looks up a slot for every position in it."""
        return max(int(AttentionSpec.max_num_blocks_per_req(self, vllm_config, max_len)), self.ring_blocks)


@cache
def _ring(name: str, kept: int, head_dim: int, block_size: int) -> tuple[int, int]:
    """Tokens of a ring's page, and pages that hold `kept` tokens."""
    fmt = formats.parse(name)
    return fmt.ring_layout(head_dim, block_size).tokens, fmt.ring_blocks(kept, head_dim, block_size)


class RingManager(CircularBufferManager):  # type: ignore[misc]
    """Gives a request the ring's pages as its tokens come to them, and keeps them until it ends or is preempted."""

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> int:
        """Pages that the ring lacks for this many tokens."""
        spec = self.kv_cache_spec
        wanted = min(-(-num_tokens // spec.ring_tokens), spec.ring_blocks)
        return max(int(wanted) - len(self.req_to_blocks.get(request_id, ())), 0)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> Sequence[Any]:
        """Take them from the pool. What stands in them stays: rows that do not fit their token are not used."""
        missing = self.get_num_blocks_to_allocate(request_id, num_tokens)
        new: list[Any] = self.block_pool.get_new_blocks(missing) if missing else []
        self.req_to_blocks[request_id].extend(new)
        return new

    def allocate_external_computed_blocks(self, *_: Any, **__: Any) -> None:
        """Nothing: pages that come from elsewhere bring no rows, and `allocate_new_blocks` gives the ring its pages."""


# Registered after vLLM's own, which are only looked for while the registry is empty.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(RingSpec, RingManager, uniform_type_base_spec=RingSpec)
