"""What vLLM's scheduler knows of a cache of heavy hitters: it weighs pages by what workers measure, and frees some.

Scheduler and worker tell each other once a step, as attributes of what vLLM sends anyway, whatever executor is between:
`KEPT` of its `SchedulerOutput`, which pages each request holds, and `MASSES` of its `ModelRunnerOutput`, what pages
weighed. The scheduler alone decides, and a worker reads no page but those that it is told of in that very step. So a
page that was freed is never read, and what becomes of a request meanwhile (preempted, ended, begun anew) needs no word.
"""

from __future__ import annotations

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
"""One step in so many is measured of sequences that decode; chunks of prompts always are."""

Kept = tuple[np.ndarray, int]
"""Of one request: the pages that it holds among its first, int64 and ascending, and how many these first are; it has
all others."""
NOTHING: Kept = (np.zeros(0, np.int64), 0)
"""Of a request that nothing was freed of."""
Masses = tuple[str, tuple[int, ...], list[float]]
"""Of one request: its id, pages, and how much attention each had in a step."""


def lightest(
    bound: HeavyHitters, page: int, held: Sequence[int], masses: Mapping[int, float], computed: int
) -> list[int]:  # fmt: skip
    """Pages to free of a sequence before its next token: those between sinks and window with the least mass.

    Args:
        page: tokens of a page. held: pages of the sequence's `computed` tokens that are held, ascending. masses: by
            page; none is 0.

    Returns:
        As many as are held beyond the budget, the lightest first; of two alike the earlier one.
    """
    if (beyond := len(held) - bound.pages(page)) <= 0:
        return []
    sinks, window = bound.sink_pages(page), bound.first_page(computed, page)
    light = sorted((masses.get(at, 0.0), at) for at in held if sinks <= at < window)
    return [at for _, at in light[:beyond]]


@dataclass(frozen=True, kw_only=True)
class HeavySpec(BoundedSpec):
    """Pages of a layer whose sequences keep `budget` tokens, the heaviest between sinks and window."""

    budget: int

    @property
    def bound(self) -> HeavyHitters:
        """What is kept."""
        return HeavyHitters(self.sinks, self.sliding_window, self.budget)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks of a request at most: those of the budget, and of what is in flight wherever a page begins."""
        step = -(-max_in_flight_tokens // self.block_size) + 1
        return int(min(self.bound.pages(self.block_size) + step, -(-max_model_len // self.block_size)))


class HeavyManager(BoundedManager):
    """Frees the lightest pages of a request that is above its budget.

    Attributes:
        masses: of the pages of each request that were measured. steps: that workers were told of.
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
        """The longest prefix that is cached, of as many tokens as the budget at most.

        Up to there nothing was freed when a page was computed: it is what any request would compute.
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
        """Add what a worker measured; of no effect for a request that holds nothing."""
        request, pages, found = masses
        if request in self.req_to_blocks:
            for page, mass in zip(pages, found, strict=True):
                self.masses[request][page] += mass

    def kept(self, request_id: str) -> Kept:
        """Pages that a request holds among its first, and how many these first are; not to be written to."""
        return self._kept.get(request_id, NOTHING)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the lightest pages beyond the budget; called before a request is given pages for a step."""
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
        """Of a request that ends, or begins anew: nothing of it is remembered."""
        self.masses.pop(request_id, None)
        self._kept.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))


def _manager(scheduler: Any) -> HeavyManager | None:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return next((one for one in managers if isinstance(one, HeavyManager)), None)


def tell(scheduler: Any, output: Any) -> None:
    """Of a scheduler that has made a step: let workers know which pages its requests hold, by their ids, and whether
    single tokens are measured in it.

    All sequences that decode are measured in the same steps, so that the others wait for no masses.
    """
    if (manager := _manager(scheduler)) is None:
        return
    kept = {request: manager.kept(request) for request in output.num_scheduled_tokens}
    manager.steps += bool(kept)
    setattr(output, KEPT, (kept, manager.steps % EVERY == 0))


def hear(scheduler: Any, output: Any) -> None:
    """Of a scheduler that has a step's results: weigh pages by what workers measured."""
    if (manager := _manager(scheduler)) is not None:
        for masses in getattr(output, MASSES, ()):
            manager.weigh(masses)


KVCacheSpecRegistry.register(HeavySpec, HeavyManager, uniform_type_base_spec=HeavySpec)
