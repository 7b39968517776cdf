"""Blocks of a simulated cache that keep their residuals, by order and share, and the memory pool of the residuals."""

import sys
from math import inf
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy.residual_pool import FLOOR, Elastic
from benchmarks.accuracy.residuals import BLOCK, keep, mixed
from kvpilot_cli.backtest.batch import Limits, Request
from kvpilot_cli.backtest.costs import load_profile


def blocks(order, share, floor, query, count=8):
    """Return the blocks whose keys, and those whose values, a query in the block `query` reads at 8 bits."""
    return [side[query].nonzero().flatten().tolist() for side in keep(order, share, floor, count)[0]]


@pytest.mark.parametrize(("order", "share", "floor", "keys", "values"), [
    ("oldest", 0, 1, [7], [7]),
    ("oldest", 0, 2, [6, 7], [6, 7]),
    ("oldest", 0.5, 2, [3, 4, 5, 6, 7], [3, 4, 5, 6, 7]),
    ("values", 0, 2, [6, 7], [6, 7]),
    ("values", 0.25, 2, [3, 4, 5, 6, 7], [6, 7]),
    ("values", 0.5, 2, [0, 1, 2, 3, 4, 5, 6, 7], [6, 7]),
    ("values", 0.75, 2, [0, 1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7]),
    ("values", 1, 2, [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
])  # fmt: skip
def test_residuals_are_freed_in_order_but_never_those_of_the_floor(order, share, floor, keys, values):
    assert blocks(order, share, floor, query=7) == [keys, values]


@pytest.mark.parametrize("order", ["oldest", "values"])
def test_no_query_reads_a_later_block_and_both_orders_keep_the_same_share(order):
    for share in (0, 0.25, 0.5, 1):
        kept, actual = keep(order, share, 2, 41)
        assert not kept.triu(1).any()
        assert actual == pytest.approx(share, abs=0.02)
    assert keep(order, 0.5, 2, 1)[0].all()


def test_attention_reads_keys_and_values_of_a_block_with_the_kept_bits():
    torch.manual_seed(0)
    count, heads = 10, 4
    query = torch.randn(2, heads, count * BLOCK - 7, 16, dtype=torch.float64)
    base, fine = ([torch.randn(2, 2, query.shape[2], 16, dtype=torch.float64) for _ in range(2)] for _ in range(2))
    kept = keep("values", 0.75, 2, count)[0]
    out = mixed(query, tuple(base), tuple(fine), kept, 0.25)
    for at in (0, BLOCK, 511, 512, query.shape[2] - 1):
        block = torch.arange(at + 1) // BLOCK
        for head in range(heads):
            key, value = (
                torch.where(
                    side[at // BLOCK, block][:, None], good[:, head // 2, : at + 1], bad[:, head // 2, : at + 1]
                )
                for side, good, bad in zip(kept, fine, base, strict=True)
            )
            p = ((key @ query[:, head, at, :, None]) * 0.25).softmax(1)
            torch.testing.assert_close(out[:, head, at], (p * value).sum(1))


def pool(idle):
    """Return a simulated engine whose pool is full of the prefixes of four sessions, and the size of one prefix."""
    engine = Elastic(load_profile(), Limits(), idle)
    quarter = engine.blocks.total // 4
    for session in range(4):
        engine.now = 100.0 * session
        engine.blocks.take(quarter)
        engine.blocks.give(quarter, session, quarter)
    engine.now = 400.0
    return engine, quarter


def test_residuals_get_no_pages_once_prefixes_fill_the_pool():
    engine, quarter = pool(inf)
    assert engine.blocks.share < 0.01
    engine.blocks.take(quarter)
    assert engine.blocks.share < 0.01
    assert [engine.blocks.kept(session) >= quarter - 3 for session in range(4)] == [False, True, True, True]


def test_the_oldest_idle_prefixes_are_freed_first_for_residuals():
    engine, quarter = pool(150.0)
    engine.blocks.take(quarter)
    assert engine.blocks.share > 0.3
    assert [engine.blocks.kept(session) > 0 for session in range(4)] == [False, False, False, True]


def test_the_newest_residuals_of_running_requests_are_not_free_pages():
    engine = Elastic(load_profile(), Limits(), inf)
    for number in range(3):
        engine.running[number] = Request(number, 0.0, 64, 64)
    assert engine.blocks.available == engine.blocks.total - 3 * FLOOR
    engine.blocks.take(engine.blocks.available)
    assert engine.blocks.available == 0
    assert engine.blocks.share * (engine.blocks.total - 3 * FLOOR) == pytest.approx(3 * FLOOR)


@pytest.mark.parametrize(("gap", "spared"), [(8.0, True), (2.0, False)])
def test_a_learnt_age_spares_a_prefix_that_is_idle_for_less_than_twice_the_gaps_seen(gap, spared):
    engine, quarter = pool(None)
    for _ in range(8000):
        engine.now += gap
        engine.blocks.reuse(3, quarter // 2)
        engine.blocks.give(quarter // 2, 3, quarter // 2)
    engine.now += 10.0
    engine.blocks.take(3 * quarter)
    assert (engine.blocks.kept(3) > 0) is spared
