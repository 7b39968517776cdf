"""vLLM's cache manager with heavy hitters: freed and held pages, and requests that end or restart."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvpilot_runtime.bounded.heavy_spec import KEPT, MASSES, NOTHING, HeavyManager, HeavySpec, hear, lightest, tell
from kvpilot_runtime.config.retention import HeavyHitters

PAGE = 16


@st.composite
def bounds(draw: st.DrawFn) -> HeavyHitters:
    sinks, window = draw(st.integers(1, 40)), draw(st.integers(1, 100))
    least = HeavyHitters(sinks, window, 1).least(PAGE)
    return HeavyHitters(sinks, window, draw(st.integers(least, least + 200)))


@given(bounds(), st.integers(0, 900), st.data())
def test_sinks_and_window_stay_and_of_the_others_the_heaviest(bound: HeavyHitters, computed: int, data: Any) -> None:
    pages = -(-computed // PAGE)
    ends = {*range(min(bound.sink_pages(PAGE), pages)), *range(bound.first_page(computed, PAGE), pages)}
    between = sorted(set(range(pages)) - ends)
    held = sorted(ends | set(data.draw(st.lists(st.sampled_from(between), unique=True)) if between else ()))
    masses = data.draw(st.dictionaries(st.integers(0, max(pages - 1, 0)), st.floats(0, 100)))
    light = lightest(bound, PAGE, held, masses, computed)
    left = [at for at in held if at not in light]
    assert len(left) * PAGE <= bound.budget
    assert len(light) == max(len(held) - bound.budget // PAGE, 0)  # frees no more pages than necessary
    assert ends <= set(left)
    stay = [(masses.get(at, 0.0), at) for at in left if at not in ends]
    go = [(masses.get(at, 0.0), at) for at in light]
    assert not stay or not go or max(go) < min(stay)  # of two pages with equal mass the earlier one is freed
    assert light == lightest(bound, PAGE, held, masses, computed)


@given(bounds())
def test_the_least_budget_has_room_for_a_page_wherever_the_window_begins(bound: HeavyHitters) -> None:
    least = HeavyHitters(bound.sinks, bound.window, bound.least(PAGE))
    most = max(-(-n // PAGE) - least.first_page(n, PAGE) for n in range(1000, 1000 + PAGE))
    assert least.sink_pages(PAGE) + most + 1 == least.pages(PAGE)


def spec(bound: HeavyHitters) -> HeavySpec:
    return HeavySpec(block_size=PAGE, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=bound.window,
                     sinks=bound.sinks, budget=bound.budget)  # fmt: skip


def manager(bound: HeavyHitters, blocks: int, chunk: int = 64, longest: int = 4000) -> KVCacheManager:
    init_none_hash(sha256)
    group = KVCacheGroupSpec(["layer"], spec(bound))
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    return KVCacheManager(config, max_model_len=longest, scheduler_block_size=PAGE, hash_block_size=PAGE,
                          max_in_flight_tokens=chunk, enable_caching=True)  # fmt: skip


def heavy(kv: KVCacheManager) -> HeavyManager:
    (one,) = kv.coordinator.single_type_managers
    assert isinstance(one, HeavyManager)
    return one


def request(name: str, tokens: list[int]) -> Request:
    hasher = get_request_block_hasher(PAGE, sha256)
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=8),
                   pooling_params=None, block_hasher=hasher)  # fmt: skip


def held(kv: KVCacheManager, name: str) -> list[int]:
    """Return the places in a request's table that have a page."""
    return [i for i, block in enumerate(heavy(kv).req_to_blocks[name]) if not block.is_null]


def compute(kv: KVCacheManager, asked: Request, tokens: int, cached: Any = None, hit: int = 0) -> bool:
    """Run one step of `tokens` for a request. Return True if it fits."""
    if kv.allocate_slots(asked, tokens, hit, cached) is None:
        return False
    asked.num_computed_tokens += hit + tokens
    return True


BOUND = HeavyHitters(4, 32, 128)


def test_a_heavy_page_stays_however_far_the_window_goes_and_light_ones_go() -> None:
    kv = manager(BOUND, 14)  # 13 pages: 8 for a stream of 3,000 tokens, the others for a step
    asked = request("a", list(range(3000)))
    for _ in range(3000 // 50):
        assert compute(kv, asked, 50)
        now = tuple(held(kv, "a"))
        heavy(kv).weigh(("a", now, [100.0 if at in (3, 9) else 1.0 for at in now]))
        assert len(now) <= 8 + -(-50 // PAGE) + 1
    assert {0, 3, 9} <= set(held(kv, "a"))
    assert kv.block_pool.get_num_free_blocks() == 13 - len(held(kv, "a"))
    kv.free(asked)
    assert kv.block_pool.get_num_free_blocks() == 13


@given(bounds(), st.lists(st.tuples(st.integers(1, 70), st.integers(0, 5)), max_size=30), st.randoms())
@settings(deadline=None, max_examples=60)
def test_a_request_holds_its_budget_and_a_step_and_frees_each_page_once(
    bound: HeavyHitters, steps: list[tuple[int, int]], rng: Any
) -> None:
    kv = manager(bound, 400, 70)
    most = spec(bound).max_admission_blocks_per_request(70, 4000)
    asked, times = request("a", list(range(2500))), 0
    for chunk, what in steps:
        if what == 0 and asked.num_computed_tokens:  # preempt it as vLLM does
            kv.free(asked)
            asked.num_computed_tokens, times = 0, times + 1
            assert kv.block_pool.get_num_free_blocks() == 399
            heavy(kv).weigh(("a", (0, 1), [5.0, 5.0]))  # results from before the preemption arrive late
            assert not len(heavy(kv).kept("a")[0])
        before = asked.num_computed_tokens
        assert compute(kv, asked, chunk)
        now = held(kv, "a")
        assert len(now) <= most
        assert len([at for at in now if at < -(-before // PAGE)]) <= bound.pages(PAGE)
        pages, first = heavy(kv).kept("a")
        assert now == [*pages, *range(first, -(-(before + chunk) // PAGE))]
        assert kv.block_pool.get_num_free_blocks() == 399 - len(now)
        heavy(kv).weigh(("a", tuple(now), [rng.random() for _ in now]))
    kv.free(asked)
    kv.free(asked)  # no page is freed twice
    assert kv.block_pool.get_num_free_blocks() == 399
    assert not heavy(kv).masses
    assert heavy(kv).kept("a") is NOTHING


def test_a_page_that_another_request_has_too_stays_with_that_one() -> None:
    kv = manager(BOUND, 60)
    first = request("a", list(range(120)))
    assert compute(kv, first, 120)
    second = request("b", [*range(120), *range(500, 700)])
    blocks, hit, _ = kv.get_computed_blocks(second)
    assert hit == 112
    assert compute(kv, second, 64, blocks, hit)
    shared = heavy(kv).req_to_blocks["a"][3]
    assert shared.ref_cnt == 2
    heavy(kv).weigh(("b", tuple(held(kv, "b")), [0.0 if at == 3 else 1.0 for at in held(kv, "b")]))
    assert compute(kv, second, 64)
    assert 3 not in held(kv, "b")
    assert 3 in held(kv, "a")
    assert shared.ref_cnt == 1
    kv.free(second)
    kv.free(first)
    assert kv.block_pool.get_num_free_blocks() == 59


def test_of_a_cached_prefix_no_more_than_the_budget_is_taken() -> None:
    """Later pages were computed without the freed pages. Up to the budget, any request computes the same pages."""
    kv = manager(BOUND, 100, 400)
    first = request("a", list(range(400)))
    assert compute(kv, first, 400)
    kv.free(first)
    blocks, hit, _ = kv.get_computed_blocks(request("b", [*range(400), 1000]))
    assert hit == 128
    assert not any(block.is_null for block in blocks.blocks[0])
    assert kv.get_computed_blocks(request("c", [*range(40), *range(900, 1000)]))[1] == 32


def test_admission_and_capacity_count_the_budget_and_a_step() -> None:
    most = spec(BOUND).max_admission_blocks_per_request(64, 4000)
    assert most == 8 + 4 + 1
    assert spec(BOUND).max_admission_blocks_per_request(64, 40) == 3  # the context is shorter than the budget
    asked = request("a", list(range(3000)))
    assert manager(BOUND, most + 1).allocate_slots(asked, 16, full_sequence_must_fit=True) is not None
    assert manager(BOUND, most).allocate_slots(asked, 16, full_sequence_must_fit=True) is None
    config = SimpleNamespace(max_in_flight_tokens=64, model_config=SimpleNamespace(max_model_len=4000),
                             parallel_config=SimpleNamespace(decode_context_parallel_size=1))  # fmt: skip
    assert spec(BOUND).max_memory_usage_bytes(config) == most * spec(BOUND).page_size_bytes


def test_a_step_says_which_pages_its_requests_hold_and_its_results_what_they_weigh() -> None:
    kv = manager(BOUND, 60)
    scheduler = SimpleNamespace(kv_cache_manager=kv, requests={name: request(name, [ord(name)] * 500) for name in "ab"})
    for asked in scheduler.requests.values():
        assert compute(kv, asked, 64)
    for _ in range(3):
        assert compute(kv, scheduler.requests["a"], 64)
    output = SimpleNamespace(num_scheduled_tokens={"a": 64, "b": 64})
    tell(scheduler, output)
    told, alone = getattr(output, KEPT)
    assert not alone
    assert list(told) == ["a", "b"]
    assert told["b"] is NOTHING
    pages, first = told["a"]
    assert [*pages, *range(first, 16)] == held(kv, "a")
    hear(scheduler, SimpleNamespace(**{MASSES: [("b", (0, 1), [1.0, 2.0]), ("gone", (0,), [1.0])]}))
    assert dict(heavy(kv).masses["b"]) == {0: 1.0, 1: 2.0}
    assert "gone" not in heavy(kv).masses
    hear(scheduler, SimpleNamespace())  # nothing was measured in this step


def test_one_step_in_32_measures_what_decodes() -> None:
    kv = manager(BOUND, 60)
    scheduler = SimpleNamespace(kv_cache_manager=kv, requests={"a": request("a", list(range(100)))})
    assert compute(kv, scheduler.requests["a"], 64)
    measured = []
    for count in range(100):
        output = SimpleNamespace(num_scheduled_tokens={"a": 1} if count % 5 else {})  # some steps have no work
        tell(scheduler, output)
        measured.append(getattr(output, KEPT)[1] and bool(count % 5))
    assert sum(measured) == 2


def test_layers_of_another_budget_are_another_group() -> None:
    one, other = spec(BOUND), spec(HeavyHitters(4, 32, 144))
    assert one.is_uniform_with_collection({"a": spec(BOUND)})
    assert not one.is_uniform_with_collection({"a": one, "b": other})
    assert pytest.approx(one.page_size_bytes) == other.page_size_bytes
