"""The offloading worker on a CPU returns bytes unchanged, for any transfer that vLLM describes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvpilot_formats import formats
from kvpilot_runtime.transfer.host_copies import HostCopies, rows

BLOCKS, CHUNKS, HEADS, TOKENS, DIM = 24, 12, 2, 4, 64
NAMES = formats.own_names()


def caches(names: list[str], seed: int) -> list[torch.Tensor]:
    """Return a cache of random packed pages for each name, uint8 [blocks, heads, tokens, row bytes]."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(BLOCKS, HEADS, TOKENS, formats.parse(name).row_bytes(DIM)) for name in names]
    return [torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8) for shape in shapes]


def described(layers: list[torch.Tensor], groups: list[int]) -> Any:
    """Return vLLM's description of these caches: a tensor of pages per layer, and the groups."""
    tensors = [CanonicalKVCacheTensor(cache.view(torch.int8).view(BLOCKS, -1), cache[0].numel()) for cache in layers]
    refs = [CanonicalKVCacheRef(i, cache[0].numel()) for i, cache in enumerate(layers)]
    return CanonicalKVCaches(tensors, [[r for r, g in zip(refs, groups, strict=True) if g == i] for i in (0, 1)])


@st.composite
def transfers(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], int, list[int]]]]:
    """Draw the blocks per chunk, and for each of two groups its blocks, the index of the first one, and its chunks."""
    per_chunk = draw(st.integers(1, 3))
    blocks = draw(st.permutations(range(BLOCKS)))
    chunks = draw(st.permutations(range(CHUNKS)))
    found = []
    for start in (0, 6):
        size, first = draw(st.integers(0, 6)), draw(st.integers(0, 7))
        wanted = -(-(first % per_chunk + size) // per_chunk) if size else 0
        found.append((blocks[start : start + size], first, chunks[start : start + wanted]))
    return per_chunk, found


def specs(groups: list[tuple[list[int], int, list[int]]], moved_to: list[int] | None = None) -> tuple[Any, Any]:
    """Return vLLM's two specs of a transfer, optionally with other blocks of the cache."""
    blocks = [b for own, _, _ in groups for b in own]
    device = GPULoadStoreSpec(moved_to or blocks, [len(own) for own, _, _ in groups], [first for _, first, _ in groups])
    return device, CPULoadStoreSpec([c for _, _, chunks in groups for c in chunks])


@settings(max_examples=200, deadline=None)
@given(transfers(), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), st.data())
def test_stored_blocks_can_be_loaded_into_other_blocks_and_no_other_byte_changes(
    asked: tuple[int, list[tuple[list[int], int, list[int]]]], names: list[str], data: st.DataObject
) -> None:
    per_chunk, groups = asked
    owners = [data.draw(st.integers(0, 1)) for _ in names]
    layers = caches(names, 1)
    before = [cache.clone() for cache in layers]
    worker = HostCopies(described(layers, owners), CHUNKS, per_chunk)
    device, host = specs(groups)
    assert worker.submit_store(1, device, host)
    stored = [b for own, _, _ in groups for b in own]
    for cache in layers:
        cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8))  # Other requests own the blocks now.
    others = [cache.clone() for cache in layers]
    target = data.draw(st.permutations(range(BLOCKS)))[: len(stored)]
    assert worker.submit_load(2, host, specs(groups, target)[0])
    moved: dict[int, dict[int, int]] = {0: {}, 1: {}}
    for group, (own, _, _) in enumerate(groups):
        at = len(groups[0][0]) if group else 0
        moved[group] = dict(zip(target[at : at + len(own)], own, strict=True))
    for cache, was, other, owner in zip(layers, before, others, owners, strict=True):
        for block in range(BLOCKS):
            source = was[moved[owner][block]] if block in moved[owner] else other[block]
            assert torch.equal(cache[block], source)
    done = worker.get_finished()
    assert [(result.job_id, result.success) for result in done] == [(1, True), (2, True)]
    size = sum(len(groups[owner][0]) * cache[0].numel() for cache, owner in zip(layers, owners, strict=True))
    assert [result.transfer_size for result in done] == [size, size]
    assert worker.get_finished() == []


def test_a_group_may_begin_in_the_middle_of_a_chunk() -> None:
    device, host = specs([([5, 6, 7], 4, [2, 0])])
    ((at_cache, at_host),) = rows(device, host, 3)
    assert at_cache.tolist() == [5, 6, 7]
    assert at_host.tolist() == [7, 8, 0]


def test_a_transfer_that_names_too_few_chunks_is_an_error_and_copies_nothing() -> None:
    layers = caches(["k4v4"], 1)
    worker = HostCopies(described(layers, [0]), CHUNKS, 1)
    device, _ = specs([([1, 2, 3], 0, [0, 1, 2]), ([], 0, [])])
    before = layers[0].clone()
    with pytest.raises(IndexError):
        worker.submit_load(1, CPULoadStoreSpec([0, 1]), device)
    assert torch.equal(layers[0], before)
    assert worker.get_finished() == []
