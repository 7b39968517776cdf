"""vLLM's cache manager with a bound: freed pages, admission, prefix hits and capacity."""

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

from kvpilot_runtime.bounded.spec import BoundedSpec

PAGE = 16


def spec(sinks: int, window: int) -> BoundedSpec:
    return BoundedSpec(block_size=PAGE, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=window,
                       sinks=sinks)  # fmt: skip


def manager(of: BoundedSpec, blocks: int, chunk: int, longest: int) -> KVCacheManager:
    init_none_hash(sha256)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], of)])
    return KVCacheManager(config, max_model_len=longest, scheduler_block_size=PAGE, hash_block_size=PAGE,
                          max_in_flight_tokens=chunk, enable_caching=True)  # fmt: skip


def request(name: str, tokens: list[int]) -> Request:
    hasher = get_request_block_hasher(PAGE, sha256)
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=8),
                   pooling_params=None, block_hasher=hasher)  # fmt: skip


def held(kv: KVCacheManager, name: str) -> list[int]:
    """Return the places in a request's table that have a page."""
    (one,) = kv.coordinator.single_type_managers
    return [i for i, block in enumerate(one.req_to_blocks[name]) if not block.is_null]


def compute(kv: KVCacheManager, asked: Request, tokens: int, cached: Any = None, hit: int = 0) -> bool:
    """Run one step of `tokens` for a request. Return True if it fits."""
    found = kv.allocate_slots(asked, tokens, hit, cached)
    if found is None:
        return False
    asked.num_computed_tokens += hit + tokens
    return True


@given(sinks=st.integers(1, 40), window=st.integers(1, 100), chunks=st.lists(st.integers(1, 70), max_size=20))
@settings(deadline=None, max_examples=60)
def test_what_a_request_holds_is_what_its_next_token_attends_to(sinks: int, window: int, chunks: list[int]) -> None:
    kv = manager(of := spec(sinks, window), 200, 70, 2000)
    asked = request("a", list(range(1500)))
    cap = of.max_admission_blocks_per_request(70, 2000)
    for chunk in chunks:
        before = asked.num_computed_tokens
        assert compute(kv, asked, chunk)
        first = max(0, before - window + 1) // PAGE
        last = -(-(before + chunk) // PAGE)
        wanted = {*range(min(-(-sinks // PAGE), last)), *range(first, last)}
        assert held(kv, "a") == sorted(wanted)
        assert len(wanted) <= cap
    kv.free(asked)
    assert kv.block_pool.get_num_free_blocks() == 199


def test_a_stream_goes_on_past_what_the_pool_holds() -> None:
    kv = manager(spec(4, 64), 8, 16, 10_000)  # 7 pages: one for sinks, 6 for the window and a step
    asked = request("a", list(range(9000)))
    for _ in range(9000 // 16):
        assert compute(kv, asked, 16)
    assert asked.num_computed_tokens == 9000 // 16 * 16
    assert len(held(kv, "a")) <= 7


def test_admission_asks_for_the_most_that_a_request_holds_at_a_time() -> None:
    of = spec(4, 64)
    most = of.max_admission_blocks_per_request(16, 10_000)
    assert most == 1 + 6  # the sinks' page, then 63 tokens of the window and 16 in flight at any alignment
    asked = request("a", list(range(9000)))
    assert manager(of, most + 1, 16, 10_000).allocate_slots(asked, 16, full_sequence_must_fit=True) is not None
    assert manager(of, most, 16, 10_000).allocate_slots(asked, 16, full_sequence_must_fit=True) is None
    assert of.max_admission_blocks_per_request(16, 40) == 3  # the context is shorter than the bound


def test_capacity_counts_what_is_kept() -> None:
    of = spec(4, 64)
    config = SimpleNamespace(
        max_in_flight_tokens=16, model_config=SimpleNamespace(max_model_len=10_000),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip
    assert of.max_memory_usage_bytes(config) == 7 * of.page_size_bytes


def test_a_prefix_is_taken_where_its_sinks_and_its_window_are_cached() -> None:
    kv = manager(spec(4, 64), 100, 400, 1000)
    first = request("a", list(range(320)))
    assert compute(kv, first, 320)
    kv.free(first)
    again = request("b", [*range(320), 1000, 1001])
    blocks, hit, _ = kv.get_computed_blocks(again)
    assert hit == 320
    assert [i for i, block in enumerate(blocks.blocks[0]) if not block.is_null] == [0, 16, 17, 18, 19]
    free = kv.block_pool.get_num_free_blocks()
    assert compute(kv, again, 2, blocks, hit)
    assert held(kv, "b") == [0, 16, 17, 18, 19, 20]
    assert kv.block_pool.get_num_free_blocks() == free - 6
    kv.free(again)
    assert kv.block_pool.get_num_free_blocks() == 99


@pytest.mark.parametrize(("gone", "hit"), [(0, 0), (5, 320), (15, 320), (16, 256), (19, 304)])
def test_a_prefix_that_needs_a_page_that_is_gone_is_not_taken(gone: int, hit: int) -> None:
    kv = manager(spec(4, 64), 100, 400, 1000)
    first = request("a", list(range(320)))
    assert compute(kv, first, 320)
    (one,) = kv.coordinator.single_type_managers
    block = one.req_to_blocks["a"][gone]
    kv.free(first)
    assert kv.block_pool._maybe_evict_cached_block(block)
    assert kv.get_computed_blocks(request("b", [*range(320), 1000]))[1] == hit


def test_a_prefix_shorter_than_the_sinks_is_taken_as_far_as_it_goes() -> None:
    kv = manager(spec(40, 64), 100, 400, 1000)
    first = request("a", list(range(320)))
    assert compute(kv, first, 320)
    kv.free(first)
    assert kv.get_computed_blocks(request("b", [*range(32), *range(500, 600)]))[1] == 32
    assert kv.get_computed_blocks(request("c", list(range(500, 600))))[1] == 0


def test_layers_of_another_bound_are_another_group() -> None:
    assert spec(4, 64).is_uniform_with_collection({"a": spec(4, 64)})
    assert not spec(4, 64).is_uniform_with_collection({"a": spec(4, 64), "b": spec(8, 64)})
    assert BoundedSpec.merge([spec(4, 64), spec(4, 64)]) == spec(4, 64)
