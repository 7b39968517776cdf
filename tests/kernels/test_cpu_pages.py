"""Packed pages on a CPU are held to float64 attention over the same quantized keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_kernels import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.reference.attention import decode_reference, prefill_reference

OWN = ("int8", "k8v4", "k4v4", "k4v2")


def filled(fmt_name, dim, kv_heads, block_size, lengths, seed):
    """Pages with NaN bytes wherever nothing was stored, and the block table of each sequence, in shuffled order."""
    fmt = formats.parse(fmt_name)
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 2
    cache = torch.full((blocks, kv_heads, block_size, fmt.row_bytes(dim)), 0xFF, dtype=torch.uint8)
    pages = PackedPages(cache, fmt, dim)
    order = torch.randperm(blocks, generator=generator).tolist()
    table = torch.full((len(lengths), max(needed) + 1), 10**6, dtype=torch.int32)
    for row, length in enumerate(lengths):
        mine = [order.pop() for _ in range(needed[row])]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        slots = torch.tensor([mine[t // block_size] * block_size + t % block_size for t in range(length)])
        key = torch.randn(length, kv_heads, dim, generator=generator)
        value = torch.randn(length, kv_heads, dim, generator=generator)
        pages.store(key, value, slots)
    return pages, table


@given(
    fmt=st.sampled_from(OWN),
    dim=st.sampled_from([64, 96, 128, 256]),
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 3, 5, 7, 16]),
    block_size=st.sampled_from([16, 32]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_decode_equals_float64_attention_whatever_lies_in_unused_slots(
    fmt, dim, kv_heads, ratio, block_size, lengths, seed
):
    pages, table = filled(fmt, dim, kv_heads, block_size, lengths, seed)
    query = torch.randn(len(lengths), kv_heads * ratio, dim, generator=torch.Generator().manual_seed(seed + 1))
    out = pages.decode(query, table, torch.tensor(lengths, dtype=torch.int32), dim**-0.5)
    for row, length in enumerate(lengths):
        keys, values = pages.read(table[row], length)
        expected = decode_reference(query[row], keys, values, dim**-0.5)
        assert torch.allclose(out[row].double(), expected, atol=2e-4)


@given(fmt=st.sampled_from(OWN), context=st.integers(0, 40), chunk=st.integers(1, 20), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_prefill_reads_its_context_from_pages_and_its_chunk_as_it_is(fmt, context, chunk, seed):
    dim, kv_heads, ratio = 64, 2, 3
    pages, table = filled(fmt, dim, kv_heads, 16, [max(context, 1)], seed)
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(chunk, kv_heads * ratio, dim, generator=generator)
    key, value = (torch.randn(chunk, kv_heads, dim, generator=generator) for _ in range(2))
    out = pages.prefill(query, key, value, table[0], context, dim**-0.5)
    old_key, old_value = pages.read(table[0], context)
    expected = prefill_reference(query, torch.cat([old_key, key]), torch.cat([old_value, value]), context, dim**-0.5)
    assert torch.allclose(out.double(), expected, atol=2e-4)


def test_padding_slots_store_nothing():
    pages, _ = filled("k4v4", 64, 1, 16, [1], 0)
    before = pages.key_codes.clone()
    pages.store(torch.randn(2, 1, 64), torch.randn(2, 1, 64), torch.tensor([-1, -1]))
    assert torch.equal(pages.key_codes, before)


def test_a_cache_of_another_format_is_refused_with_the_shape_it_should_have():
    fmt = formats.parse("k4v4")
    with pytest.raises(ValueError, match=r"takes uint8 \[blocks, kv_heads, block_size, 68\]"):
        PackedPages(torch.zeros(2, 1, 16, 100, dtype=torch.uint8), fmt, 64)
