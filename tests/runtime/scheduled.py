"""vLLM's real scheduler with residual pages, and a stand-in for the workers that knows the content of every page.

The stand-in stores the identity of each token in place of its key and value. It checks that decode would find the right
residual of every token that it reads with residuals. Sampled tokens follow from the tokens before them.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpilot_formats import formats
from kvpilot_runtime import plugin
from kvpilot_runtime.recent import residual_scheduler
from kvpilot_runtime.recent.window import VARIABLE
from kvpilot_runtime.vllm_api import hooks
from kvpilot_smallmodels.models import tiny_llama

BLOCK, DIM, VOCABULARY = 16, 64, 7


@cache
def configured(dtype: str, drafts: int, caching: bool, chunk: int, offloads: bool) -> Any:
    """Return vLLM's configuration of an engine with a context of 1,024 tokens."""
    plugin.serve_dtype(dtype)
    speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return EngineArgs(
        model=str(tiny_llama()), kv_cache_dtype=dtype, skip_tokenizer_init=True, block_size=BLOCK, max_model_len=1024,
        max_num_batched_tokens=chunk, max_num_seqs=6, enable_prefix_caching=caching, async_scheduling=False,
        speculative_config=speculation if drafts else None, kv_offloading_size=0.125 if offloads else None,
    ).create_engine_config()  # fmt: skip


class Engine:
    """Scheduler with its requests, and the content of all pages.

    Attributes:
        pages: the worker's map, residual pages by block.
        base: identity of the token in each row of a block.
        residual: identity of the token whose residual is in each row of a residual page.
        copies: blocks that are being copied to host memory, by job. A job ends only if the scheduler waits for it.
        read, refined: blocks among the newest ones of a decoding request, and those with residual pages.
        preempted: number of preemptions.
        revived: number of blocks that got a claim from a prefix hit.
        awaited: number of copies to host memory that a step waited for.
    """

    def __init__(
        self, dtype: str, blocks: int, *, drafts: int = 0, caching: bool = True, flights: int = 1, defers: bool = False,
        sliding: bool = False, chunk: int = 64, offloads: bool = False, everything: bool = False,
    ) -> None:  # fmt: skip
        config = configured(dtype, drafts, caching, chunk, offloads)
        config.cache_config.num_gpu_blocks = blocks
        own = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=torch.uint8)
        window = SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=torch.bfloat16, sliding_window=48
        )
        specs = [window, own, own] if sliding else [own]
        groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
        self.own = [i for i, spec in enumerate(specs) if spec is own]
        kind = AsyncScheduler if flights > 1 else Scheduler
        self.scheduler = kind(
            vllm_config=config, kv_cache_config=KVCacheConfig(blocks, [], groups), block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config), log_stats=False,
        )  # fmt: skip
        self.scheduler.defer_block_free = defers
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, formats.ALL if everything else "")
            residual_scheduler.extend(self.scheduler)
        self.manager = self.scheduler.kv_cache_manager
        self.pool, self.claims = self.manager.block_pool, self.manager.block_pool.claims
        self.defers, self.drafts, self.flights = defers, drafts, flights
        fmt = formats.parse(dtype)
        self.rows = fmt.residual_layout(DIM, BLOCK).tokens
        self.floor = fmt.recent_blocks(fmt.window, BLOCK)
        self.newest = blocks if everything else self.floor
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.tokens: dict[str, list[int]] = {}
        self.stored: dict[str, int] = {}
        self.pages: dict[int, tuple[int, ...]] = {}
        self.base: dict[int, dict[int, int]] = {}
        self.residual: dict[int, dict[int, int]] = {}
        self.copies: dict[int, set[int]] = {}
        self.flying: deque[tuple[Any, Any, set[int], set[int]]] = deque()
        self.read = self.refined = self.preempted = self.revived = self.finished = self.awaited = 0
        if offloads:  # No copy ends, so a request would wait for them instead of computing its prompt.
            self.scheduler.connector.get_num_new_matched_tokens = lambda *_: (0, False)
        self._watch()

    def ask(self, name: str, prompt: list[int], count: int) -> None:
        """Add a request with `count` tokens to generate."""
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        params.update_from_generation_config({}, 0)
        self.tokens[name] = list(prompt)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))

    def abort(self, name: str) -> None:
        """End a request at its client's wish."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self, choose: random.Random) -> None:
        """Schedule and run a step. With several steps in flight, the scheduler learns of an older one."""
        step = self.scheduler.schedule()
        self.check_pool()
        changes = getattr(step, hooks.CHANGES, {})
        given = {page for block, pages in changes.items() for page in pages if self.pages.get(block) != pages}
        if (meta := step.kv_connector_metadata) is not None:
            self.copies |= {number: set(job.src_spec.block_ids.tolist()) for number, job in meta.store_jobs.items()}
            self.awaited += len(meta.jobs_to_flush)
            for number in meta.jobs_to_flush:
                self.copies.pop(number, None)
            assert not given & {block for blocks in self.copies.values() for block in blocks}
        if self.defers:  # a connector may already write to a page that it has got
            for *_, written, read in self.flying:
                assert not written & (given | self.blocks())
                assert not read & self.blocks()
        for block, pages in changes.items():
            self.pages.pop(block, None)
            if pages:
                self.pages[block] = pages
        assert self.pages == self.claims.pages
        self.flying.append((step, *self._run(step, choose)))
        if len(self.flying) == self.flights:
            self._finish(choose)

    def drain(self, choose: random.Random) -> None:
        """Run until all requests have ended."""
        while self.scheduler.has_unfinished_requests() or self.flying:
            if self.scheduler.has_unfinished_requests():
                self.step(choose)
            else:
                self._finish(choose)

    def blocks(self) -> set[int]:
        """Return the blocks of all requests."""
        managers = self.manager.coordinator.single_type_managers
        return {b.block_id for m in managers for blocks in m.req_to_blocks.values() for b in blocks if not b.is_null}

    def check_pool(self) -> None:
        """Check that each block is in one place: free, of requests, or a residual page of one live block."""
        pool, claims = self.pool, self.claims
        pages = [page for found in claims.pages.values() for page in found]
        assert len(set(pages)) == len(pages)
        assert all(len(found) == pool.count for found in claims.pages.values())
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        deferred = {block.block_id for _, blocks in self.scheduler.deferred_frees for block in blocks}
        owned = self.blocks() | deferred
        assert not free & owned
        assert not set(pages) & (free | owned | {0})
        assert len(free) + len(pages) + len(owned) == pool.num_gpu_blocks - 1
        assert all(pool.blocks[page].ref_cnt == 1 and pool.blocks[page].block_hash is None for page in pages)
        assert pool.get_num_free_blocks() == len(free) + pool.count * len(claims.idle)
        assert sorted(claims.pages) == sorted([*claims.claimed, *claims.busy, *claims.idle])
        for block in claims.pages:
            assert block in owned or pool.blocks[block].block_hash is not None
        assert set(claims.claimed) <= owned
        for name in {name for holders in claims.claimed.values() for name in holders}:
            tables = [self.manager.get_block_ids(name)[group] for group in self.own]
            newest = {block for table in tables for block in table[-self.floor - self.flights - self.drafts :]}
            assert claims.claims_of(name) <= newest

    def _run(self, step: Any, choose: random.Random) -> tuple[Any, set[int], set[int]]:
        """Store the step's tokens and check what decode reads.

        Return the sampled tokens, and the residual pages that were written and read.
        """
        cached = step.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for name, begin in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            # With several steps in flight, the scheduler does not know of rejected drafts yet.
            begins[name] = begin if name in cached.resumed_req_ids else self.stored[name]
        sampled: dict[str, list[int]] = {}
        reads, written, read = [], set[int](), set[int]()
        for name, count in step.num_scheduled_tokens.items():
            tokens, begin, table = self.tokens[name], begins[name], self.manager.get_block_ids(name)
            end, known = begin + count, len(tokens)
            drafts = [choose.randrange(VOCABULARY) for _ in range(max(end - known, 0))]
            for at, identity in enumerate(identities([*tokens, *drafts])[begin:end], begin):
                for group in self.own:
                    written |= self._store(table[group][at // BLOCK], at % BLOCK, identity)
            sampled[name] = []
            if end >= known:
                for draft in (*drafts, None):
                    right = identities(tokens)[-1] % VOCABULARY
                    tokens.append(right)
                    sampled[name].append(right)
                    if draft != right:
                        break
            self.stored[name] = min(end, begin + max(known - begin, 0) + max(len(sampled[name]) - 1, 0))
            reads.append((table, end, known - begin == 1))
        for table, end, decodes in reads:
            for group in self.own:
                read |= self._read(table[group], end, decodes)
        names = list(step.num_scheduled_tokens)
        found = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [sampled[name] for name in names])
        return found, written, read

    def _store(self, block: int, row: int, identity: int) -> set[int]:
        self.residual.pop(block, None)
        self.base.setdefault(block, {})[row] = identity
        if (pages := self.pages.get(block)) is None:
            return set()
        page = pages[row // self.rows]
        self.base.pop(page, None)
        self.residual.setdefault(page, {})[row % self.rows] = identity
        return {page}

    def _read(self, table: list[int], end: int, decodes: bool) -> set[int]:
        last, used = -(-end // BLOCK), set[int]()
        for i in range(max(last - self.newest, 0), last):
            pages = self.pages.get(table[i])
            self.read += decodes
            self.refined += decodes and pages is not None
            used |= set(pages or ()) if decodes else set()
            for row in range(min(end - i * BLOCK, BLOCK)):
                stored = self.base[table[i]][row]
                if pages is not None:
                    assert self.residual[pages[row // self.rows]][row % self.rows] == stored
        return used

    def _finish(self, choose: random.Random) -> None:
        step, output, *_ = self.flying.popleft()
        outputs = self.scheduler.update_from_output(step, output)
        self.finished += sum(one.finish_reason is not None for each in outputs.values() for one in each.outputs)
        if self.drafts and self.flights == 1:
            names = [name for name in output.req_ids if name in self.scheduler.requests]
            draft = [[choose.randrange(VOCABULARY) for _ in range(choose.randint(0, self.drafts))] for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, draft))

    def _watch(self) -> None:
        """Check each eviction, each claim and each preemption."""
        pool, manager, claims = self.pool, self.manager, self.claims
        take, lend, allocate, preempt, claim = (
            pool.get_new_blocks, pool.lend, manager.allocate_slots, self.scheduler._preempt_request, claims.claim
        )  # fmt: skip

        def taken(count: int) -> list[Any]:
            # A cached prefix is evicted only if no residual page can be taken back.
            before, found = len(pool.cached_block_hash_to_block), take(count)
            assert len(pool.cached_block_hash_to_block) == before or not claims.idle
            return list(found)

        def lent(blocks: Sequence[int], kept: int) -> None:
            before = len(pool.cached_block_hash_to_block)
            lend(blocks, kept)
            assert len(pool.cached_block_hash_to_block) == before

        def allocated(request: Any, new: int, *args: Any, **kwargs: Any) -> Any:
            found = allocate(request, new, *args, **kwargs)
            if found is None and request.status == RequestStatus.RUNNING:
                end = min(request.num_computed_tokens + new + kwargs.get("num_lookahead_tokens", 0), 1024)
                managers = manager.coordinator.single_type_managers
                lacking = sum(max(-(-end // BLOCK) - len(m.req_to_blocks[request.request_id]), 0) for m in managers)
                room = pool.free_block_queue.num_free_blocks + pool.count * len(claims.pages)
                # A running request lacks room only if it would lack room without any residual page, too.
                assert self.defers or room < lacking
            return found

        def preempted(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(request, *args, **kwargs)

        def claimed(block: int, request: str) -> None:
            self.revived += pool.blocks[block].block_hash is not None and block in claims.idle
            claim(block, request)

        pool.get_new_blocks, pool.lend, manager.allocate_slots = taken, lent, allocated
        self.scheduler._preempt_request, claims.claim = preempted, claimed


def identities(tokens: Iterable[int]) -> list[int]:
    """Return a number for each token, which depends on all tokens up to it."""
    found, last = [], 1
    for token in tokens:
        last = hash((last, token)) & 0xFFFFFFFF
        found.append(last)
    return found
