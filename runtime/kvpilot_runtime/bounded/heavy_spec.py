"""Heavy hitters in vLLM's scheduler: free the pages of a request that got the least attention.

Scheduler and workers talk through attributes of vLLM's own messages, which works with every executor. In each engine
step, attribute `KEPT` of `SchedulerOutput` lists the pages that each request holds. Attribute `MASSES` of
`ModelRunnerOutput` returns the pages' masses: the attention that they got in the step. Only the scheduler frees pages.
A worker reads only pages that the step's message lists, so it never reads a freed page. Requests that end, restart or
are preempted need no message.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpilot_runtime.bounded.spec import BoundedManager, BoundedSpec
from kvpilot_runtime.config.retention import HeavyHitters

KEPT, MASSES = "kvpilot_kept", "kvpilot_masses"

EVERY = 32
"""Period of measurements of decoding sequences, in engine steps. Chunks of prompts are measured in every step."""

Kept = tuple[np.ndarray, int]
"""Pages that a request holds: a pair of those among its first n pages, int64 and ascending, and n.

The request also holds all pages after the first n.
"""
NOTHING: Kept = (np.zeros(0, np.int64), 0)
"""`Kept` of a request without freed pages."""
Masses = tuple[str, tuple[int, ...], list[float]]
"""Measurement of one request in one step: the request's id, its measured pages, and the mass of each page."""


def lightest(
    bound: HeavyHitters, page: int, held: Sequence[int], masses: Mapping[int, float], computed: int
) -> list[int]:  # fmt: skip
    """Return the pages to free before a sequence's next token: the lightest, as many as exceed the budget.

    Pages of sinks and window are never freed. Of pages with equal mass, free the earlier one first.

    Args:
        page: tokens of a page.
        held: pages that the sequence holds, ascending.
        masses: mass by page; a missing page has mass 0.
        computed: number of computed tokens of the sequence.
    """
    if (beyond := len(held) - bound.pages(page)) <= 0:
        return []
    sinks, window = bound.sink_pages(page), bound.first_page(computed, page)
    light = sorted((masses.get(at, 0.0), at) for at in held if sinks <= at < window)
    return [at for _, at in light[:beyond]]


@dataclass(frozen=True, kw_only=True)
class HeavySpec(BoundedSpec):
    """Spec of a layer whose sequences keep `budget` tokens: sinks, window, and the heaviest pages between them."""

    budget: int

    @property
    def bound(self) -> HeavyHitters:
        """The spec's bound, as a retention policy."""
        return HeavyHitters(self.sinks, self.sliding_window, self.budget)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the largest number of blocks of a request: those of its budget, and of tokens in flight."""
        step = -(-max_in_flight_tokens // self.block_size) + 1
        return int(min(self.bound.pages(self.block_size) + step, -(-max_model_len // self.block_size)))


class HeavyManager(BoundedManager):
    """Manager that frees the lightest pages of a request beyond its budget.

    Attributes:
        masses: masses so far, by request and page.
        steps: number of steps sent to workers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masses: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.steps = 0
        self._kept: dict[str, Kept] = {}

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        *_: Any, **__: Any,
    ) -> tuple[tuple[list[Any], ...], int]:  # fmt: skip
        """Return the longest cached prefix within the budget.

        A request computes these pages before it frees any page. So their content depends only on the tokens, and every
        request with the same tokens can use them.
        """
        size = kv_cache_spec.block_size
        cached: list[Any] = []
        for i in range(min(max_length // size, kv_cache_spec.bound.pages(size))):
            found = block_pool.get_cached_block(block_hashes[i], kv_cache_group_ids)
            if not found:
                break
            cached.append(found)
        return tuple([one[group] for one in cached] for group in range(len(kv_cache_group_ids))), len(cached) * size

    def weigh(self, masses: Masses) -> None:
        """Add a worker's measurement to the masses. Ignore it if the request has ended meanwhile."""
        request, pages, found = masses
        if request in self.req_to_blocks:
            for page, mass in zip(pages, found, strict=True):
                self.masses[request][page] += mass

    def kept(self, request_id: str) -> Kept:
        """Return the held pages of a request, as `Kept`. Do not write to them."""
        return self._kept.get(request_id, NOTHING)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the lightest pages beyond the budget. vLLM calls this before it allocates pages for a step."""
        blocks, size = self.req_to_blocks.get(request_id, ()), self.block_size
        whole = min(-(-processed_computed_tokens // size), len(blocks))
        pages, first = self.kept(request_id)
        if len(pages) + whole - first <= self.kv_cache_spec.bound.pages(size):
            return
        held = [*pages.tolist(), *range(first, whole)]
        masses: dict[int, float] = self.masses.get(request_id, {})
        light = lightest(self.kv_cache_spec.bound, size, held, masses, processed_computed_tokens)
        gone = set(light)
        self._kept[request_id] = np.array([page for page in held if page not in gone], np.int64), whole
        for page in light:
            masses.pop(page, None)
        freed = [blocks[page] for page in sorted(light, reverse=True)]
        for page in light:
            blocks[page] = self._null_block
        self.block_pool.free_blocks(freed)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Return the blocks to free of a request that ends or is preempted, and forget its masses and held pages."""
        self.masses.pop(request_id, None)
        self._kept.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))


def _manager(scheduler: Any) -> HeavyManager | None:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return next((one for one in managers if isinstance(one, HeavyManager)), None)


def tell(scheduler: Any, output: Any) -> None:
    """Attach to a step what workers need: held pages by request id, and True if it measures decoding sequences.

    All decoding sequences are measured in the same step, so that the steps in between do not wait for masses.
    """
    if (manager := _manager(scheduler)) is None:
        return
    kept = {request: manager.kept(request) for request in output.num_scheduled_tokens}
    manager.steps += bool(kept)
    setattr(output, KEPT, (kept, manager.steps % EVERY == 0))


def hear(scheduler: Any, output: Any) -> None:
    """Add the workers' measurements in a step's results to the masses."""
    if (manager := _manager(scheduler)) is not None:
        for masses in getattr(output, MASSES, ()):
            manager.weigh(masses)


KVCacheSpecRegistry.register(HeavySpec, HeavyManager, uniform_type_base_spec=HeavySpec)
