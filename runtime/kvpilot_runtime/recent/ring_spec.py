"""Recent window in vLLM's scheduler: each request gets a ring of pages, which is never shared and never cached.

Unpickling a `RingSpec` imports this module, which registers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpilot_formats import formats


@dataclass(frozen=True, kw_only=True)
class RingSpec(CircularBufferSpec):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """KV-cache spec of a ring layer.

    It has the page size and block size of the attention layer, so that pages of both come from one pool.

    Attributes:
        kept: number of tokens whose residuals a ring keeps: the window, plus the largest number of drafts in a step.
        fmt: name of the layer's format.
    """

    kept: int
    fmt: str

    # Compute these on demand, because vLLM may still enlarge the block size to fit other layers' pages.
    @property
    def ring_tokens(self) -> int:
        """Number of tokens whose residuals fit in one page."""
        return _ring(self.fmt, self.kept, self.head_size, self.block_size)[0]

    @property
    def ring_blocks(self) -> int:
        """Number of ring pages that a long request takes."""
        return _ring(self.fmt, self.kept, self.head_size, self.block_size)[1]

    @property
    def block_table_token_alignment(self) -> int | None:
        """Alignment of the block table: that of the attention layer's table, so that both have the same stride."""
        return 128

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the size of one request's ring in bytes."""
        return int(self.ring_blocks * self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Return the width of the ring layer's block table.

        It must be as wide as an attention layer's table, although a ring has few pages: vLLM's older runner looks up a
        slot for every position of a sequence.
        """
        return max(int(AttentionSpec.max_num_blocks_per_req(self, vllm_config, max_len)), self.ring_blocks)


@cache
def _ring(name: str, kept: int, head_dim: int, block_size: int) -> tuple[int, int]:
    """Return the number of tokens whose residuals fit in one page, and the number of pages for `kept` tokens."""
    fmt = formats.parse(name)
    return fmt.ring_layout(head_dim, block_size).tokens, fmt.ring_blocks(kept, head_dim, block_size)


class RingManager(CircularBufferManager):  # type: ignore[misc]
    """Manager that adds pages to a request's ring as the request grows, and frees them when it ends or is preempted."""

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> int:
        """Return how many pages the request's ring still needs for this number of tokens."""
        spec = self.kv_cache_spec
        wanted = min(-(-num_tokens // spec.ring_tokens), spec.ring_blocks)
        return max(int(wanted) - len(self.req_to_blocks.get(request_id, ())), 0)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> Sequence[Any]:
        """Take the missing pages from the pool, without clearing them: each row has a tag that identifies its token."""
        missing = self.get_num_blocks_to_allocate(request_id, num_tokens)
        new: list[Any] = self.block_pool.get_new_blocks(missing) if missing else []
        self.req_to_blocks[request_id].extend(new)
        return new

    def allocate_external_computed_blocks(self, *_: Any, **__: Any) -> None:
        """Do nothing for pages from another engine, because `allocate_new_blocks` also provides the ring for them."""


# Let vLLM register its own specs first, because it adds them only to an empty registry.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(RingSpec, RingManager, uniform_type_base_spec=RingSpec)
