"""Residual pages in vLLM's scheduler: random requests lose no page, and decode never reads a wrong residual."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import VOCABULARY, Engine

pytestmark = pytest.mark.timeout(1800)

KINDS = {
    "plain": {"dtype": "k4v4", "blocks": 40},
    "two-pages": {"dtype": "k4v2", "blocks": 90},
    "drafts": {"dtype": "k4v4", "blocks": 44, "drafts": 5},
    "no-prefix-cache": {"dtype": "k4v4", "blocks": 44, "caching": False},
    "two-steps-in-flight": {"dtype": "k4v4", "blocks": 40, "flights": 2},
    "drafts-in-flight": {"dtype": "k4v4", "blocks": 44, "flights": 2, "drafts": 3},
    "a-connector-writes-at-once": {"dtype": "k4v4", "blocks": 60, "flights": 2, "defers": True},
    "hybrid": {"dtype": "k4v4", "blocks": 120, "sliding": True},
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
        if live and choose.random() < 0.03:
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
