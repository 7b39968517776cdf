"""Residual pages in vLLM's scheduler. They come from vLLM's block pool, and refine the newest blocks of each request.

A request *claims* residual pages for its newest blocks. A block that is no longer among them keeps its pages, but they
count as free: the pool takes them back, oldest first, before it evicts a cached prefix. A prefix hit claims them again.
So a block has residual pages only if the residuals of all its tokens are in them. With `--recent-tokens=all`, a
prompt's older blocks get residual pages, too, without a claim and without evicting a cached prefix.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

from kvpilot_runtime.recent.claims import Claims

ARGUMENTS = ("num_new_computed_tokens", "num_external_computed_tokens")
"""Arguments of vLLM's `allocate_slots` with the tokens that a prefix hit or a KV connector has computed."""

HANDED_OUT = "_current_batch_allocated_block_ids"
"""Attribute of vLLM's offloading with the blocks that a step hands out. Copies of them to host memory end first."""


class ResidualPool(BlockPool):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Block pool whose blocks may be residual pages of other blocks.

    Attributes:
        claims: the blocks with residual pages.
        count: residual pages of a block.
        held: free blocks that are not given out, because the request under admission will claim them.
        taking: True while claimed residual pages count as free, too.
        lends: True if blocks get residual pages that no request claims.
        reported: when the share of blocks with residual pages was last reported, in seconds of a monotonic clock.
        scheduler: vLLM's scheduler if a connector may write to a free page before the steps in flight have ended;
            otherwise None.
        offloading: part of vLLM's `OffloadingConnector` in the scheduler, or None. It also copies free blocks.
    """

    claims: Claims
    count: int
    held: int
    taking: bool
    lends: bool
    reported: float
    scheduler: Any | None
    offloading: Any | None

    @property
    def idle(self) -> dict[int, None]:
        """Blocks whose residual pages the pool may take back."""
        if self.scheduler is not None:
            self.claims.settle(self.scheduler.processed_step_seq)
        return self.claims.idle

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks, with the residual pages that the pool may take back."""
        refined = len(self.idle) + (len(self.claims.claimed) if self.taking else 0)
        return int(super().get_num_free_blocks()) + self.count * refined - self.held

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Return new blocks. To get them, take back residual pages before a cached prefix is evicted."""
        queue, claims, idle = self.free_block_queue, self.claims, self.idle
        unhashed = self._unhashed(num_blocks) if idle else 0
        while idle and unhashed < num_blocks:
            self._drop(next(iter(idle)))
            unhashed += self.count
        while self.taking and claims.claimed and queue.num_free_blocks < num_blocks:
            self._drop(next(iter(claims.claimed)))
        found: list[Any] = super().get_new_blocks(num_blocks)
        self._forget(found)
        return found

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Free blocks. Those in the prefix cache keep their residual pages, which then count as free."""
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        free = [block for block in blocks if block.ref_cnt == 0]
        self._forget(block for block in free if block.block_hash is None or not self.enable_caching)
        for block in free:
            self.claims.release(block.block_id)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove blocks from the prefix cache. Those that no request uses lose their residual pages."""
        super().evict_blocks(block_ids)
        self._forget(block for block in map(self.blocks.__getitem__, block_ids) if block.ref_cnt == 0)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, unless vLLM refuses. Then take back all residual pages that no request claims."""
        if done := bool(super().reset_prefix_cache()):
            for block in list(self.idle):
                self._drop(block)
        return done

    def refine(self, block: int, request: str) -> None:
        """Let a request claim residual pages for a block without any. Do nothing if there are not enough free pages."""
        if self.get_num_free_blocks() >= self.count:
            pages = tuple(page.block_id for page in self.get_new_blocks(self.count))
            self.claims.give(block, pages, request)
            if self.offloading is not None:
                getattr(self.offloading, HANDED_OUT).update(pages)

    def lend(self, blocks: Sequence[int], kept: int) -> None:
        """Give idle residual pages to blocks without any, the last blocks first, and evict no cached prefix for them.

        They may take back the pages of other blocks, but not of the `kept` ones that would lose theirs last.
        """
        count = self.count
        free = self._unhashed(len(blocks) * count) + (len(self.idle) - kept) * count
        blocks = blocks[max(len(blocks) - free // count, 0) :]
        pages = [page.block_id for page in self.get_new_blocks(len(blocks) * count)] if blocks else []
        for i, block in enumerate(blocks):
            self.claims.lend(block, tuple(pages[i * count : (i + 1) * count]))

    def _unhashed(self, most: int) -> int:
        """Return how many of the first `most` free blocks are not in the prefix cache. These blocks come first."""
        queue = self.free_block_queue
        first = queue.popleft_n(min(most, queue.num_free_blocks))
        queue.prepend_n(first)
        return next((i for i, block in enumerate(first) if block.block_hash is not None), len(first))

    def leave(self, request: str, kept: Set[int] = frozenset()) -> None:
        """End the claims of a request on all blocks but those in `kept`. Steps in flight may still use their pages."""
        steps = self.scheduler
        last = steps.sched_step_seq if steps and steps.sched_step_seq > steps.processed_step_seq else 0
        for block in self.claims.claims_of(request) - kept:
            self.claims.release(block, request, last=last)

    def _forget(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            if block.block_id in self.claims.pages:
                self._drop(block.block_id)

    def _drop(self, block: int) -> None:
        super().free_blocks([self.blocks[page] for page in self.claims.drop(block)])


class ResidualManager(KVCacheManager):  # type: ignore[misc]
    """KV-cache manager that lets requests claim residual pages.

    Attributes:
        refined: vLLM's managers of the KV-cache groups whose blocks have residual pages, and for how many of a
            request's newest blocks.
        takes: True if a running request may take claimed residual pages before vLLM preempts another request.
        rewinds: True if a sequence may become shorter, because drafts are rejected, while a connector may write to a
            free page at once.
    """

    refined: dict[Any, int]
    takes: bool
    rewinds: bool

    def share(self) -> float:
        """Return the share of the requests' blocks that have residual pages; 1 if there is no request."""
        pages = self.block_pool.claims.pages
        tables = (table for manager in self.refined for table in manager.req_to_blocks.values())
        refined = [block.block_id in pages for table in tables for block in table]
        return sum(refined) / len(refined) if refined else 1.0

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Allocate slots as vLLM does. Then let the request claim residual pages for its newest blocks.

        A new request must find pages for its claims, too, unless it would be the only running request. A running
        request does without.
        """
        if request.status is RequestStatus.RUNNING:
            found = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
            if found is None and self.takes:
                found = self._allocate(0, True, request, num_new_tokens, *args, **kwargs)
            if found is self.empty_kv_cache_blocks:  # most steps need no new block
                return found
        else:
            if self.block_pool.lends:
                for manager in self.refined:
                    self._refresh(_hits(kwargs, manager))
            held = self._wanted(request, num_new_tokens, kwargs) if kwargs.get("has_scheduled_reqs", True) else 0
            found = self._allocate(held, False, request, num_new_tokens, *args, **kwargs)
        if found is not None:
            self._claim(request, num_new_tokens, kwargs, found.blocks)
        return found

    def free(self, request: Any) -> None:
        """Free a request's blocks and end its claims."""
        self.block_pool.leave(request.request_id)
        super().free(request)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Return a request's blocks, which are freed later, and end its claims."""
        self.block_pool.leave(request.request_id)
        found: list[Any] = super().pop_blocks_for_free(request)
        return found

    def _allocate(self, held: int, taking: bool, *args: Any, **kwargs: Any) -> Any:
        self.block_pool.held, self.block_pool.taking = held, taking
        try:
            return super().allocate_slots(*args, **kwargs)
        finally:
            self.block_pool.held, self.block_pool.taking = 0, False

    def _refresh(self, blocks: Iterable[Any]) -> None:
        """Let blocks of a request lose their idle residual pages last, and among them the first block first."""
        for block in blocks:
            self.block_pool.claims.refresh(block.block_id)

    def _wanted(self, request: Any, new: int, asked: Mapping[str, Any]) -> int:
        """Return how many free blocks the claims of a request under admission will take.

        `asked` has the other arguments of `allocate_slots`.
        """
        claims, idle, found, stored = self.block_pool.claims, self.block_pool.idle, 0, _stored(request, asked)
        for manager, newest in self.refined.items():
            size, had = manager.block_size, len(manager.req_to_blocks.get(request.request_id, ()))
            blocks = -(-max(stored + new, request.num_tokens) // size)
            for block in _hits(asked, manager)[max(blocks - newest, 0) :]:
                claims.refresh(block.block_id)
                found += block.block_id in idle
            found += max(min(newest, blocks - max(-(-stored // size), had)), 0)
        return found * int(self.block_pool.count)

    def _claim(self, request: Any, new: int, asked: Mapping[str, Any], added: Any) -> None:
        """Let a request claim residual pages for its newest blocks, and release its claims on older ones.

        Args:
            new: number of tokens of the step.
            asked: the other arguments of `allocate_slots`.
            added: the blocks that the request got, by KV-cache group.
        """
        pool, name, stored = self.block_pool, request.request_id, _stored(request, asked)
        end = request.num_tokens if self.rewinds else max(stored + new, request.num_tokens)
        kept, plain, fresh, older, had = set[int](), list[Any](), list[Any](), list[Any](), list[Any]()
        for manager, newest in self.refined.items():
            size, blocks = manager.block_size, manager.req_to_blocks[name]
            first = max(-(-end // size) - newest, 0)
            # Only the blocks that the request has just got, and that have no token, get all residuals of their tokens.
            begin = max(len(blocks) - len(added[manager.kv_cache_group_id]), -(-stored // size))
            kept |= {block.block_id for block in blocks[first:]}
            plain += blocks[first:begin]
            fresh += blocks[max(first, begin) :]
            older += blocks[begin:first]
            had += blocks[:begin]
        pool.leave(name, kept)
        for block in plain:
            if block.block_id in pool.claims.pages:
                pool.claims.claim(block.block_id, name)
        for block in reversed(fresh):
            pool.refine(block.block_id, name)
        if pool.lends:
            self._refresh(had)
            pool.lend([block.block_id for block in older], sum(block.block_id in pool.claims.idle for block in had))


def _hits(asked: Mapping[str, Any], manager: Any) -> Sequence[Any]:
    """Return the blocks of a prefix hit, of a manager's KV-cache group, from the arguments of `allocate_slots`."""
    found = asked.get("new_computed_blocks")
    return found.blocks[manager.kv_cache_group_id] if found is not None else ()


def _stored(request: Any, asked: Mapping[str, Any]) -> int:
    """Return how many tokens of a request are stored already, with those of a prefix hit or of a KV connector."""
    return int(request.num_computed_tokens + sum(asked.get(name, 0) for name in ARGUMENTS))
