"""The backtest's simulated engine loses no request, never exceeds its blocks, and preempts only if blocks run out."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from kvpilot_cli.backtest.batch import Blocks, Limits, Request
from kvpilot_cli.backtest.costs import BacktestError, Costs, load_profile, parse_profile
from kvpilot_cli.backtest.engine import Engine

BLOCK = 16


def costs(blocks: int) -> Costs:
    return Costs(0.005, 1e-5, 3e-8, 2e-5, 8e-10, blocks * BLOCK, BLOCK)


def requests(seed: int, count: int = 120, rate: float = 20.0) -> list[Request]:
    chance, now, made = random.Random(seed), 0.0, []
    for i in range(count):
        now += chance.expovariate(rate)
        session = chance.choice([-1, chance.randint(0, 20)])
        made.append(Request(i, now, chance.randint(1, 800), chance.randint(1, 300), session))
    return made


def drained(engine: Engine, made: list[Request]) -> Engine:
    for request in made:
        engine.submit(request)
    while len(engine.done) < len(made):
        engine.advance(engine.now + 1.0)
    return engine


class Watched(Engine):
    """Engine that checks after every step that the pool matches the blocks of all requests."""

    def _step(self) -> None:
        super()._step()
        lengths = dict(self.decoding.lengths())
        held = sum(-(-length // BLOCK) for length in lengths.values())
        held += sum(r.blocks for r in self.prefilling.values())
        assert held == self.blocks.used <= self.blocks.total
        assert self.decoding.tokens == sum(lengths.values())
        assert set(self.running.values()) == set(self.prefilling.values()) | set(lengths)
        assert len(self.running) <= self.limits.max_num_seqs


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), blocks=st.sampled_from([70, 200, 2000]), budget=st.sampled_from([64, 512, 8192]),
    caching=st.booleans(), timeout=st.sampled_from([2.0, 1e9]),
)  # fmt: skip
def test_every_request_ends_once_and_blocks_are_never_overdrawn(
    seed: int, blocks: int, budget: int, caching: bool, timeout: float
) -> None:
    made = requests(seed)
    engine = drained(Watched(costs(blocks), Limits(32, budget, caching, timeout)), made)
    assert sorted(r.number for r in engine.done) == list(range(len(made)))
    assert engine.blocks.used == 0
    for r in engine.done:
        assert r.dropped or (r.generated == r.output and r.arrival <= r.first_token <= r.finished)
    flows = engine.scrape().flows
    served = [r for r in made if not r.dropped]
    assert flows.finished == len(served) == flows.ttft.count
    assert flows.generation_tokens == sum(r.output for r in served)
    assert flows.itl.count == sum(r.output - 1 for r in served)
    assert flows.preemptions == sum(r.preempted for r in made)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.sampled_from([70, 200, 2000]), rate=st.sampled_from([0.5, 3.0, 20.0]))
def test_simulating_several_steps_at_once_equals_simulating_each_alone(seed: int, blocks: int, rate: float) -> None:
    class OneByOne(Engine):
        def alike(self, until: float) -> int:
            return 1

    ends = []
    for kind in (Engine, OneByOne):
        made = requests(seed, rate=rate)
        engine = drained(kind(costs(blocks), Limits(32, 512)), made)
        times = [(r.number, round(r.first_token, 6), round(r.finished, 6), r.preempted) for r in engine.done]
        ends.append((times, engine.steps, engine.scrape().flows.itl.count))
    assert ends[0] == ends[1]


def test_a_request_is_preempted_in_the_step_that_finds_no_block() -> None:
    # Each prompt fills one of three blocks. The first request to grow takes the last block. When the other request
    # grows, too, the engine preempts the request that it admitted last.
    engine = Engine(costs(3), Limits(prefix_caching=False, timeout=1e9))
    for i in range(2):
        engine.submit(Request(i, 0.0, BLOCK, 20))
    before = 0
    while not engine.preemptions:
        before = engine.blocks.available
        engine.advance(engine.now + 0.001)
    assert before == 1
    assert [r.number for r in engine.running.values()] == [0]
    assert engine.waiting[0].number == 1
    drained_engine = engine
    while len(drained_engine.done) < 2:
        drained_engine.advance(drained_engine.now + 1.0)
    assert [r.number for r in engine.done] == [0, 1]
    assert [r.preempted for r in engine.done] == [0, 1]


def test_no_request_is_preempted_if_the_longest_contexts_fit_together() -> None:
    made = [Request(i, 0.0, 100, 100) for i in range(10)]
    assert drained(Engine(costs(10 * 13), Limits()), made).preemptions == 0
    assert drained(
        Engine(costs(10 * 13 - 1), Limits(timeout=1e9)), [Request(i, 0.0, 100, 100) for i in range(10)]
    ).preemptions


def test_a_request_larger_than_the_cache_is_refused_and_the_others_continue() -> None:
    made = [Request(0, 0.0, 100 * BLOCK, 10), Request(1, 0.0, 10, 10)]
    engine = drained(Engine(costs(10), Limits()), made)
    assert [r.dropped for r in made] == [True, False]
    assert engine.scrape().flows.finished == 1


def test_a_returning_session_computes_only_what_is_new() -> None:
    engine = Engine(costs(200), Limits())
    drained(engine, [Request(0, 0.0, 800, 10, session=1)])
    engine.done.clear()
    first = engine.scrape().flows.prefix_hits
    engine.submit(Request(1, engine.now + 1, 900, 10, session=1))
    engine.advance(engine.now + 5)
    assert first == 0
    assert engine.scrape().flows.prefix_hits == 809 // BLOCK * BLOCK


def test_a_chunked_prompt_uses_the_token_budget_of_each_step() -> None:
    engine = Engine(costs(200), Limits(max_num_batched_tokens=256))
    drained(engine, [Request(0, 0.0, 1000, 1)])
    assert engine.steps == 4


def test_the_same_requests_give_the_same_samples() -> None:
    def series() -> list[object]:
        engine = Engine(costs(200), Limits())
        for request in requests(7):
            engine.submit(request)
        found: list[object] = []
        for _ in range(20):
            engine.advance(engine.now + 1.0)
            found.append(engine.scrape())
        return found

    assert series() == series()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_pool_counts_every_kv_block_once(data: st.DataObject) -> None:
    pool, held = Blocks(50), 0
    for _ in range(30):
        if data.draw(st.booleans()) and pool.available:
            count = data.draw(st.integers(0, pool.available))
            pool.take(count)
            held += count
        elif held:
            count = data.draw(st.integers(1, held))
            keep = data.draw(st.integers(0, count))
            pool.give(count, data.draw(st.integers(0, 3)), keep)
            held -= count
        assert pool.used == held
        assert pool.available == 50 - held


def test_the_capacity_of_an_unmeasured_dtype_follows_from_its_bits() -> None:
    profile = load_profile()
    assert profile.of("int8").kv_tokens == pytest.approx(profile.of("auto").kv_tokens * 16 / 8.25, rel=0.02)


COSTS = asdict(costs(100))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"costs": {"auto": {}}}, r"profile: .*base.*costs"),
        ({"costs": {"auto": COSTS | {"per_kv_token": -1}}}, r">= 0.*per_kv_token"),
        ({"costs": {"auto": COSTS | {"block_size": 0}}}, r">= 1.*block_size"),
        ({"costs": {"auto": COSTS | {"other": 1}}}, "unknown field `other`"),
        ({"model": {}}, "head_dim"),
        ({"costs": None}, r"`\$\.costs`; give name, gpu"),
    ],
)
def test_a_broken_cost_profile_is_refused_with_the_name_of_the_field(change: dict[str, object], told: str) -> None:
    raw = {"name": "x", "gpu": "NVIDIA-H200", "gpus_per_replica": 1, "costs": {},
           "model": {"head_dim": 128, "kv_heads": 8, "layers": 32, "window_layers": 0}}  # fmt: skip
    with pytest.raises(BacktestError, match=told):
        parse_profile(json.dumps(raw | change).encode())
