"""Paged attention on CPU against the float64 reference: ragged lengths, poisoned pages, any order of storing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.reference.attention import decode_reference
from support.gpu_batch import DIMS
from support.gpu_batch import Batch as WithFactors
from support.prefill_reference import prefill_reference

SERVED = ["int8", "k8v4", "k4v4", "k4v2", "k2v2"]


def poisoned(blocks: int, kv_heads: int, block_size: int, fmt: formats.Format, dim: int) -> torch.Tensor:
    """Return a cache whose every byte is 0xFF: codes at their largest, and all scales NaN."""
    return torch.full((blocks, kv_heads, block_size, fmt.row_bytes(dim)), 255, dtype=torch.uint8)


class Batch:
    """Sequences of the given lengths, stored through a shuffled block table."""

    def __init__(self, name: str, dim: int, lengths: list[int], kv_heads: int, block_size: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.fmt, self.lengths, self.rng = formats.parse(name), lengths, rng
        per = -(-max(lengths) // block_size)
        cache = poisoned(per * len(lengths) + 1, kv_heads, block_size, self.fmt, dim)
        self.pages = PackedPages(cache, self.fmt, dim)
        self.table = 1 + torch.randperm(per * len(lengths), generator=rng).view(len(lengths), per)
        self.keys = [torch.randn(n, kv_heads, dim, generator=rng) for n in lengths]
        self.values = [torch.randn(n, kv_heads, dim, generator=rng) for n in lengths]
        for i, n in enumerate(lengths):
            at = torch.arange(n)
            slots = self.table[i][at // block_size] * block_size + at % block_size
            order = torch.randperm(n, generator=rng)  # tokens are stored independently of the tokens before them
            self.pages.store(self.keys[i][order], self.values[i][order], slots[order])
            self.table[i, -(-n // block_size) :] = -(2**30)  # vLLM leaves old entries past a sequence's end.


@settings(max_examples=40)
@given(
    st.sampled_from(SERVED), st.sampled_from(DIMS), st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.integers(1, 3), st.sampled_from([1, 3, 5, 7, 16]), st.sampled_from([16, 32]), st.integers(0, 2**31),
)  # fmt: skip
def test_decode_equals_the_reference_over_ragged_poisoned_pages(
    name: str, dim: int, lengths: list[int], kv_heads: int, ratio: int, block_size: int, seed: int
) -> None:
    batch = Batch(name, dim, lengths, kv_heads, block_size, seed)
    query = torch.randn(len(lengths), kv_heads * ratio, dim, generator=batch.rng)
    out = batch.pages.decode(query, batch.table, torch.tensor(lengths), dim**-0.5)
    for i in range(len(lengths)):
        wanted = decode_reference(query[i], batch.keys[i], batch.values[i], batch.fmt, dim**-0.5)
        assert torch.allclose(out[i].double(), wanted, atol=2e-4, rtol=2e-4)


@settings(max_examples=30)
@given(
    st.sampled_from(SERVED), st.sampled_from(DIMS), st.integers(0, 60), st.integers(2, 40),
    st.sampled_from([1, 3]), st.integers(0, 2**31),
)  # fmt: skip
def test_prefill_reads_the_context_from_pages_and_the_chunk_unquantized(
    name: str, dim: int, context: int, tokens: int, ratio: int, seed: int
) -> None:
    batch = Batch(name, dim, [context + tokens], 2, 16, seed)
    query = torch.randn(tokens, 2 * ratio, dim, generator=batch.rng)
    key, value = batch.keys[0], batch.values[0]
    out = batch.pages.prefill(query, key[context:], value[context:], batch.table[0], context, dim**-0.5)
    wanted = prefill_reference(query, key, value, context, batch.fmt, dim**-0.5)
    assert torch.allclose(out.double(), wanted, atol=2e-4, rtol=2e-4)


@settings(max_examples=25)
@given(
    st.sampled_from(SERVED), st.integers(0, 40), st.integers(2, 20), st.sampled_from([1, 4]), st.booleans(),
    st.sampled_from([0.0, 3.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_soft_caps_and_attention_sinks_equal_the_reference(
    name: str, context: int, tokens: int, ratio: int, sinking: bool, softcap: float, seed: int
) -> None:
    batch = Batch(name, 64, [context + tokens], 2, 16, seed)
    query = torch.randn(tokens, 2 * ratio, 64, generator=batch.rng) * 4
    sinks = torch.randn(2 * ratio, generator=batch.rng) * 3 if sinking else None
    key, value = batch.keys[0], batch.values[0]
    how = {"softcap": softcap, "sinks": sinks}
    out = batch.pages.prefill(query, key[context:], value[context:], batch.table[0], context, 0.125, **how)
    wanted = prefill_reference(query, key, value, context, batch.fmt, 0.125, **how)
    assert torch.allclose(out.double(), wanted, atol=2e-4, rtol=2e-4)
    last = batch.pages.decode(query[-1:], batch.table, torch.tensor([context + tokens]), 0.125, **how)
    wanted = decode_reference(query[-1], key, value, batch.fmt, 0.125, **how)
    assert torch.allclose(last[0].double(), wanted, atol=2e-4, rtol=2e-4)


@settings(max_examples=25)
@given(
    st.sampled_from(SERVED), st.integers(0, 40), st.integers(4, 20), st.booleans(), st.sampled_from([0.0, 3.0]),
    st.lists(st.integers(0, 20), min_size=2, max_size=4, unique=True), st.integers(0, 2**31),
)  # fmt: skip
def test_tokens_of_an_images_span_attend_to_each_other_both_ways(
    name: str, context: int, tokens: int, sinking: bool, softcap: float, cuts: list[int], seed: int
) -> None:
    batch = Batch(name, 64, [context + tokens], 2, 16, seed)
    query = torch.randn(tokens, 4, 64, generator=batch.rng) * 4
    ends = sorted(min(cut, tokens) for cut in cuts)
    how = {
        "softcap": softcap,
        "sinks": torch.randn(4, generator=batch.rng) * 3 if sinking else None,
        "spans": list(zip(ends[::2], ends[1::2], strict=False)),
    }
    key, value = batch.keys[0], batch.values[0]
    out = batch.pages.prefill(query, key[context:], value[context:], batch.table[0], context, 0.125, **how)
    wanted = prefill_reference(query, key, value, context, batch.fmt, 0.125, **how)
    assert torch.allclose(out.double(), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("sinking", [False, True])
def test_soft_caps_and_sinks_apply_to_scores_that_include_the_means(softcap: float, sinking: bool) -> None:
    batch = WithFactors("k4v4", 64, [200, 3], seed=3, ratio=2, calibrated=True)
    query, how = (
        batch.queries(),
        {"softcap": softcap, "sinks": torch.tensor([1.0, -1.0, 3.0, 0.5]) if sinking else None},
    )
    found = batch.cpu.decode(query, batch.table, batch.lens, batch.scale, **how)
    for i in range(2):
        parts = batch.keys[i], batch.values[i], batch.fmt, batch.scale, batch.factors
        assert torch.allclose(found[i].double(), decode_reference(query[i], *parts, **how), atol=2e-4, rtol=2e-4)


def test_a_sink_takes_softmax_weight_but_adds_no_value() -> None:
    batch = Batch("int8", 64, [3], 1, 16, 1)
    args = (torch.zeros(1, 2, 64), batch.table, torch.tensor([3]), 0.125)  # All scores are 0 here.
    without = batch.pages.decode(*args)
    far = batch.pages.decode(*args, sinks=torch.tensor([-50.0, -50.0]))
    torch.testing.assert_close(far, without)
    alike = batch.pages.decode(*args, sinks=torch.zeros(2))  # A fourth token would have the same score.
    torch.testing.assert_close(alike, without * 3 / 4)


@pytest.mark.parametrize("context", [0, 20])
def test_soft_caps_are_the_same_in_decode_and_prefill(context: int) -> None:
    batch = Batch("int8", 64, [context + 8], 2, 16, 5)
    query = torch.randn(8, 4, 64, generator=batch.rng) * 20
    args = (batch.keys[0][context:], batch.values[0][context:], batch.table[0], context, 0.125)
    capped, plain = (batch.pages.prefill(query, *args, softcap=cap) for cap in (3.0, 0.0))
    assert not torch.allclose(capped, plain, atol=1e-2)
    last = batch.pages.decode(query[-1:], batch.table, torch.tensor([context + 8]), 0.125, softcap=3.0)
    assert torch.allclose(last[0], capped[-1].float(), atol=5e-2)


def test_padding_slots_are_not_stored() -> None:
    fmt = formats.parse("k4v4")
    cache = poisoned(2, 1, 16, fmt, 64)
    before = cache.clone()
    PackedPages(cache, fmt, 64).store(torch.ones(3, 1, 64), torch.ones(3, 1, 64), torch.tensor([-1, -1, -1]))
    assert torch.equal(cache, before)


def test_a_token_writes_only_its_own_bytes() -> None:
    fmt = formats.parse("k4v4")
    cache = poisoned(3, 2, 16, fmt, 64)
    PackedPages(cache, fmt, 64).store(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), torch.tensor([16 + 5]))
    layout = fmt.page_layout(64, 16)
    touched = torch.zeros(layout.size, dtype=torch.bool)
    for codes in (layout.key_codes, layout.value_codes):
        touched[codes.offset + 5 * codes.row_bytes : codes.offset + 6 * codes.row_bytes] = True
    for meta in (layout.key_meta, layout.value_meta):
        for group in range(meta.rows):
            at = meta.offset + group * meta.row_bytes + 5 * 2
            touched[at : at + 2] = True
    flat = cache.flatten(2)
    assert (flat[[0, 2]] == 255).all()
    assert (flat[1][:, ~touched] == 255).all()
    assert (flat[1][:, touched] != 255).all()


@pytest.mark.parametrize(
    "cache",
    [torch.zeros(2, 1, 16, 68), torch.zeros(2, 1, 16, 64, dtype=torch.uint8),
     torch.zeros(2, 16, 1, 68, dtype=torch.uint8).transpose(1, 2).expand(2, 2, 16, 68).transpose(1, 2)],
)  # fmt: skip
def test_the_error_for_a_cache_of_another_shape_has_the_right_shape(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"takes uint8 \[blocks, kv_heads, block_size, 68\]"):
        PackedPages(cache, formats.parse("k4v4"), 64)
