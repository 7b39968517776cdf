"""Bounded cache in vLLM's scheduler: free the pages of a sequence between its sinks and its window.

vLLM treats a `BoundedSpec` as a sliding window when it admits requests and computes capacity. Our manager also keeps
the sinks' pages. In workers, vLLM 0.33 would clear block-table entries below the window, so `num_retained_tokens` tells
it to keep them. Unpickling a `BoundedSpec` imports this module, which registers the spec with vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpilot_runtime.config.retention import SinksAndWindow

EVERY_TOKEN = 2**30
"""Number larger than the token count of any sequence."""


@dataclass(frozen=True, kw_only=True)
class BoundedSpec(SlidingWindowSpec):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Spec of a layer whose sequences keep their first `sinks` and their last `sliding_window` tokens."""

    sinks: int

    @property
    def bound(self) -> SinksAndWindow:
        """The spec's bound."""
        return SinksAndWindow(self.sinks, self.sliding_window)

    @property
    def num_retained_tokens(self) -> int:
        """Number of first tokens whose block-table entries vLLM 0.33 keeps in workers: all, and so the sinks."""
        return EVERY_TOKEN

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the largest number of blocks of a request: those of the window, of tokens in flight, and of sinks."""
        window = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        whole = -(-max_model_len // self.block_size)
        return int(min(window + self.bound.sink_pages(self.block_size), whole))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Return True if all layers of a group have the same bound."""
        return all(isinstance(spec, BoundedSpec) and spec.bound == self.bound for spec in kv_cache_specs.values())


class BoundedManager(SingleTypeKVCacheManager):  # type: ignore[misc]
    """Manager that frees pages that no later token attends to. A prefix hit does not need these pages either."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        *_: Any, **__: Any,
    ) -> tuple[tuple[list[Any], ...], int]:  # fmt: skip
        """Return the longest prefix whose sinks and window are cached."""
        size, bound = kv_cache_spec.block_size, kv_cache_spec.bound
        sinks = bound.sink_pages(size)
        cached: list[Any] = []
        best = run = 0  # run: consecutive cached blocks up to the current one
        for blocks in range(1, max_length // size + 1):
            cached.append(block_pool.get_cached_block(block_hashes[blocks - 1], kv_cache_group_ids))
            run = run + 1 if cached[-1] else 0
            if blocks <= sinks and run < blocks:
                break
            if run >= blocks - min(bound.first_page(blocks * size, size), blocks):
                best = blocks
        needed = {*range(min(sinks, best)), *range(bound.first_page(best * size, size), best)}
        null = block_pool.null_block
        hit = tuple(
            [cached[i][group] if i in needed else null for i in range(best)] for group in range(len(kv_cache_group_ids))
        )
        return hit, best * size

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], *args: Any,
        apply_admission_cap: bool = False, **kwargs: Any,
    ) -> int:  # fmt: skip
        """Return how many blocks to allocate for a request of `num_tokens` tokens.

        With `apply_admission_cap`, count at most the blocks that the request can hold at once, because pages are freed
        as it grows.
        """
        if not apply_admission_cap or self.max_admission_blocks_per_request is None:
            return int(super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *args, **kwargs))
        most = min(-(-num_tokens // self.block_size), self.max_admission_blocks_per_request)
        held = [block for block in (*self.req_to_blocks.get(request_id, ()), *new_computed_blocks) if not block.is_null]
        return max(int(most) - len(held), 0) + int(self._get_num_evictable_blocks(new_computed_blocks))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free pages between sinks and window that the next token does not attend to."""
        bound, size = self.kv_cache_spec.bound, self.block_size
        first = bound.first_page(processed_computed_tokens, size)
        self._remove_blocks_in_range(request_id, bound.sink_pages(size), first)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return 0: vLLM can skip tokens only at a sequence's beginning, where the sinks are, which must stay."""
        return 0


# Let vLLM register its own specs first, because it adds them only to an empty registry.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(BoundedSpec, BoundedManager, uniform_type_base_spec=BoundedSpec)
