"""Residual pages in vLLM's scheduler: random requests lose no page, and decode never reads a wrong residual."""

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import VOCABULARY, Engine, configured

from kvpilot_formats import formats
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.recent import residual_scheduler
from kvpilot_runtime.recent.window import VARIABLE

pytestmark = pytest.mark.timeout(1800)

KINDS = {
    "plain": {"dtype": "k4v4", "blocks": 40},
    "two-pages": {"dtype": "k4v2", "blocks": 90},
    "drafts": {"dtype": "k4v4", "blocks": 44, "drafts": 5},
    "no-prefix-cache": {"dtype": "k4v4", "blocks": 44, "caching": False},
    "two-steps-in-flight": {"dtype": "k4v4", "blocks": 40, "flights": 2},
    "drafts-in-flight": {"dtype": "k4v4", "blocks": 44, "flights": 2, "drafts": 3},
    "a-connector-writes-at-once": {"dtype": "k4v4", "blocks": 34, "flights": 2, "defers": True},
    "three-steps-and-a-connector": {"dtype": "k4v4", "blocks": 34, "flights": 3, "defers": True},
    "drafts-and-a-connector": {"dtype": "k4v4", "blocks": 44, "flights": 2, "drafts": 3, "defers": True},
    "offloading": {"dtype": "k4v4", "blocks": 34, "flights": 2, "defers": True, "offloads": True},
    "hybrid": {"dtype": "k4v4", "blocks": 120, "sliding": True},
    "all-blocks": {"dtype": "k4v4", "blocks": 70, "everything": True},
    "all-blocks-hybrid": {"dtype": "k4v2", "blocks": 200, "sliding": True, "everything": True},
    "all-blocks-no-prefix-cache": {"dtype": "k2v2", "blocks": 200, "caching": False, "everything": True},
    "all-blocks-three-steps": {"dtype": "k4v4", "blocks": 34, "flights": 3, "everything": True},
    "all-blocks-drafts-in-flight": {"dtype": "k4v2", "blocks": 150, "flights": 2, "drafts": 3, "everything": True},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_random_requests_lose_no_page_and_read_only_right_residuals(kind: str, seed: int) -> None:
    choose, engine = random.Random(seed), Engine(**KINDS[kind])
    shared = [[choose.randrange(VOCABULARY) for _ in range(160)] for _ in range(2)]
    live, number = [], 0
    for _ in range(120):
        if choose.random() < 0.3 and number < 30:
            prefix = choose.choice(shared)[: choose.randint(0, 160)] if choose.random() < 0.7 else []
            tail = [choose.randrange(VOCABULARY) for _ in range(choose.randint(1, 60))]
            live.append(str(number))
            engine.ask(live[-1], prefix + tail, choose.randint(1, 120))
            number += 1
        if live and choose.random() < (0.15 if engine.defers else 0.03):
            engine.abort(live.pop(choose.randrange(len(live))))
        if choose.random() < 0.02:
            engine.manager.evict_blocks({choose.randrange(1, engine.pool.num_gpu_blocks) for _ in range(3)})
        if choose.random() < 0.01 and engine.flights == 1:
            engine.scheduler.reset_prefix_cache(reset_running_requests=choose.random() < 0.5)
        engine.step(choose)
    engine.drain(choose)
    print(kind, seed, engine.read, engine.refined, engine.preempted, engine.revived, engine.finished)
    assert engine.finished
    assert engine.refined > 0.3 * engine.read > 0
    engine.check_pool()
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not engine.claims.claimed
    assert engine.scheduler.reset_prefix_cache()
    assert not engine.claims.pages
    assert engine.pool.free_block_queue.num_free_blocks == engine.pool.num_gpu_blocks - 1


def run(engine: Engine, name: str, prompt: list[int], count: int) -> None:
    """Let an engine answer one request."""
    engine.ask(name, prompt, count)
    engine.drain(random.Random(0))


def test_a_prefix_hit_claims_the_residual_pages_of_its_newest_blocks_again() -> None:
    engine, prompt = Engine("k4v4", 60), [1] * 80
    run(engine, "first", prompt, 17)
    kept = dict(engine.claims.pages)
    assert set(engine.claims.idle) == set(kept)
    engine.ask("second", [*prompt, 2], 1)
    engine.step(random.Random(0))
    table = engine.manager.get_block_ids("second")[0]
    assert engine.claims.claims_of("second") == set(table[1:])
    assert all(engine.claims.pages[block] == kept[block] for block in table[1:5])


def test_the_pool_takes_back_the_pages_of_the_block_that_was_released_first() -> None:
    engine = Engine("k4v4", 30)
    for name in range(3):
        run(engine, str(name), [name] * 33, 1)
    oldest, idle = next(iter(engine.claims.idle)), set(engine.claims.idle)
    blocks = engine.pool.get_new_blocks(engine.pool.free_block_queue.num_free_blocks - 6 + 1)
    assert idle - set(engine.claims.pages) == {oldest}
    assert all(block.block_hash is None for block in blocks)


def test_a_block_without_its_hash_loses_its_residual_pages_at_the_latest_when_it_is_handed_out() -> None:
    engine = Engine("k4v4", 12)
    run(engine, "first", [1] * 33, 1)
    for block in list(engine.claims.idle):
        engine.pool._remove_cached_block_hashes(engine.pool.blocks[block])
    got = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    assert len(got) == 11
    assert not engine.claims.pages


def test_a_request_waits_for_room_for_its_window_unless_no_other_runs() -> None:
    engine, choose = Engine("k4v4", 18), random.Random(0)
    engine.ask("first", [1] * 60, 30)
    engine.step(choose)
    assert (len(engine.blocks()), len(engine.claims.pages)) == (4, 4)  # 17 blocks, of which 9 are free
    engine.ask("second", [2] * 80, 3)
    engine.step(choose)
    assert [request.request_id for request in engine.scheduler.running] == ["first"]
    engine.drain(choose)
    assert engine.finished == 2
    # Alone, a request gets all blocks, although its window does not fit.
    run(engine, "third", [3] * 260, 1)
    assert engine.finished == 3


def test_a_running_request_takes_claimed_pages_before_another_is_preempted() -> None:
    engine, choose = Engine("k4v4", 20), random.Random(0)
    engine.ask("first", [1] * 60, 100)
    engine.ask("second", [2] * 60, 100)
    while len(engine.blocks()) < 19:
        engine.step(choose)
    assert engine.preempted == 0
    assert not engine.claims.pages
    engine.drain(choose)
    assert engine.preempted == 1


def test_a_connector_cannot_get_residual_pages_that_a_step_in_flight_uses() -> None:
    engine = Engine("k4v4", 60, flights=2, defers=True, chunk=128)
    engine.ask("first", [1] * 128, 60)
    engine.step(random.Random(0))  # While the prompt is computed, the next token begins another block.
    engine.scheduler.schedule()
    table = engine.manager.get_block_ids("first")[0]
    assert engine.claims.claims_of("first") == set(table[4:9])
    assert set(engine.claims.busy) == {table[3]}
    assert engine.pool.get_num_free_blocks() == engine.pool.free_block_queue.num_free_blocks
    engine.scheduler.processed_step_seq += 1
    assert engine.pool.get_num_free_blocks() == engine.pool.free_block_queue.num_free_blocks + 1


def test_an_ended_request_keeps_no_claim_on_a_block_that_another_one_hit() -> None:
    engine, choose = Engine("k4v4", 60, flights=2, defers=True), random.Random(0)
    engine.ask("first", [1] * 33, 60)
    engine.step(choose)
    engine.step(choose)
    engine.abort("first")  # A step in flight still uses its blocks.
    engine.ask("second", [*[1] * 32, *[2] * 90], 60)
    engine.step(choose)
    shared = set(engine.manager.get_block_ids("second")[0][:2])
    assert not engine.scheduler.deferred_frees
    assert shared <= set(engine.claims.pages)
    assert not engine.claims.claims_of("first")


def test_a_step_waits_for_copies_to_host_memory_from_blocks_that_become_residual_pages() -> None:
    engine, choose = Engine("k4v4", 26, offloads=True), random.Random(0)
    for name in range(3):
        run(engine, str(name), [name] * 66, 1)
    engine.ask("last", [3] * 258, 1)
    while not engine.claims.claims_of("last"):
        engine.step(choose)
    assert engine.awaited > 0


@pytest.mark.parametrize(
    ("kind", "requests", "longest", "answer"),
    [
        pytest.param({"dtype": "k4v2", "blocks": 400, "drafts": 3, "caching": False}, 12, 150, 60, id="newest"),
        pytest.param({"dtype": "k4v4", "blocks": 200, "chunk": 96, "everything": True}, 6, 200, 30, id="all"),
    ],
)
def test_with_room_each_block_that_may_have_residuals_is_read_with_them(
    kind: dict[str, Any], requests: int, longest: int, answer: int
) -> None:
    engine, choose = Engine(**kind), random.Random(3)
    for name in range(requests):
        engine.ask(str(name), [choose.randrange(VOCABULARY) for _ in range(choose.randint(1, longest))], answer)
    engine.drain(choose)
    assert engine.refined == engine.read > 1000


def test_with_all_pages_of_the_oldest_blocks_go_first_and_no_cached_prefix_goes_for_them() -> None:
    engine, choose = Engine("k4v4", 40, chunk=160, everything=True), random.Random(0)
    run(engine, "first", [1] * 160, 1)  # 10 blocks, and 10 residual pages
    engine.ask("second", [2] * 160, 5)
    engine.step(choose)
    table = engine.manager.get_block_ids("second")[0]
    assert len(table) == 10
    assert set(table) <= set(engine.claims.pages)
    assert engine.manager.share() == 1
    engine.pool._drop(table[0])
    assert engine.manager.share() == 1 - 1 / len(table)
    engine.drain(choose)
    order, cached = list(engine.claims.idle), len(engine.pool.cached_block_hash_to_block)
    run(engine, "third", [3] * 190, 1)
    lost = [block for block in order if block not in engine.claims.pages]
    assert lost
    assert lost == order[: len(lost)]
    assert len(engine.pool.cached_block_hash_to_block) == cached + 190 // 16


def test_with_all_a_prefix_hit_is_read_with_residuals_and_its_pages_are_taken_back_last() -> None:
    engine, choose = Engine("k4v4", 60, chunk=160, everything=True), random.Random(0)
    run(engine, "first", [1] * 144, 1)
    run(engine, "second", [2] * 144, 1)
    engine.ask("third", [*[1] * 144, 3], 5)
    engine.step(choose)
    table = engine.manager.get_block_ids("third")[0]
    assert len(table) == 10
    assert set(table) <= set(engine.claims.pages)
    engine.drain(choose)
    assert not set(table) & set(list(engine.claims.idle)[:9])


def test_with_all_a_prefix_hit_loses_no_residual_page_to_the_rest_of_its_own_prompt() -> None:
    engine, choose = Engine("k4v4", 56, chunk=400, everything=True), random.Random(0)
    run(engine, "first", [1] * 160, 1)
    engine.ask("second", [2] * 200, 60)
    engine.step(choose)
    engine.ask("third", [*[1] * 160, *[3] * 150], 5)
    engine.step(choose)
    table = engine.manager.get_block_ids("third")[0]
    kept = [block in engine.claims.pages for block in table]
    assert all(kept[:10])
    assert not all(kept)


def test_a_refused_reset_of_the_prefix_cache_takes_no_residual_page() -> None:
    engine = Engine("k4v4", 60, everything=True)
    engine.ask("first", [1] * 160, 20)
    for _ in range(4):
        engine.step(random.Random(0))
    before = dict(engine.claims.pages)
    assert engine.claims.idle
    assert not engine.pool.reset_prefix_cache()
    assert engine.claims.pages == before


def test_all_beside_a_connector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, formats.ALL)
    with pytest.raises(UnsupportedModelError, match=r"not supported with a KV connector.*--recent-tokens to a number"):
        residual_scheduler.extend(SimpleNamespace(vllm_config=configured("k4v4", 0, True, 64, True)))


def test_a_ray_executor_whose_workers_get_no_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.copy(configured("k4v4", 0, True, 64, False))
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.distributed_executor_backend = "ray"
    monkeypatch.setenv(residual_scheduler.RAY_V2, "0")
    with pytest.raises(UnsupportedModelError, match=f"set {residual_scheduler.RAY_V2}=1, or --recent-tokens=0"):
        residual_scheduler.extend(SimpleNamespace(vllm_config=config))
