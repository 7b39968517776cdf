"""Decode with several query tokens per sequence: each token sees the tokens up to itself, and pages are read once."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recent import Sequences
from rounding import assert_within_rounding

from kvpilot_formats import formats
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Several, Shape
from kvpilot_kernels.reference.attention import decode_reference
from support.gpu_batch import CPU, DIMS, PAST_THE_END, Batch, decode_rows, launch_as

WITH_RESIDUALS = [name for name in formats.own_names() if formats.parse(name).has_residuals]
names, seeds = st.sampled_from(formats.own_names()), st.integers(0, 2**31)
# (length, query tokens) of a sequence. A sequence without tokens is padding.
drafted = st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(n, n + 120), st.just(n)))
steps = st.lists(st.one_of(st.just((0, 0)), drafted), min_size=1, max_size=3).filter(lambda of: any(n for n, _ in of))


def assert_equals_reference(batch: Batch, counts: list[int], padding: int = 0, factor: float = 1.0) -> None:
    heads = batch.kv_heads * batch.ratio
    query = torch.randn(sum(counts) + padding, heads, batch.dim, generator=batch.rng) * factor
    out, at = decode_rows(batch.pages, batch.table, batch.lengths, counts, query, batch.scale), 0
    for i, (n, count) in enumerate(zip(batch.lengths, counts, strict=True)):
        for seen in range(n - count + 1, n + 1):
            key, value = (x[i][:seen] for x in (batch.keys, batch.values))
            stored = [x[:seen] for x in batch.read_back(i)]
            if batch.softcap:
                lens = torch.tensor([seen])
                wanted = batch.cpu.decode(query[at, None], batch.table[i, None], lens, batch.scale, batch.softcap)[0]
            else:
                wanted = decode_reference(query[at], key, value, batch.fmt, batch.scale, batch.factors)
            assert_within_rounding(out[at], wanted, query[at], *stored, batch.factors, batch.scale, batch.softcap)
            at += 1
    assert torch.equal(out[at:], torch.zeros_like(out[at:]))


# test_gpu_decode.py has all pairs of a format and a head_dim. Here, only several query tokens per sequence are new.
@pytest.mark.parametrize(("name", "dim"), zip(itertools.cycle(formats.own_names()), formats.HEAD_DIMS, strict=False))
def test_decode_with_drafts_equals_the_reference_in_every_format_at_every_head_dim(name: str, dim: int) -> None:
    assert_equals_reference(Batch(name, dim, [35, 0, 2], seed=3, ratio=4), [4, 0, 2], padding=2)


@settings(max_examples=16)
@given(
    names, st.sampled_from(DIMS), steps, seeds, st.integers(1, 2), st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
    st.sampled_from([(16, 16), (32, 16), (48, 16), (64, 32), (64, 64)]), st.integers(2, 4), st.integers(1, 4),
    st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_each_draft_token_attends_up_to_itself_for_every_division_into_splits(
    name: str, dim: int, step: list[tuple[int, int]], seed: int, kv_heads: int, ratio: int, cut: tuple[int, int],
    stages: int, wave: int, calibrated: bool, padding: int,
) -> None:  # fmt: skip
    lengths, counts = [n for n, _ in step], [count for _, count in step]
    batch = Batch(name, dim, lengths, seed, kv_heads, ratio, *cut, stages, wave, calibrated=calibrated)
    assert_equals_reference(batch, counts, padding)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0])
def test_soft_caps_apply_to_each_draft_token(softcap: float) -> None:
    assert_equals_reference(Batch("k4v4", 64, [50, 17], seed=5, ratio=2, softcap=softcap), [5, 3], factor=3.0)


@pytest.mark.parametrize("zero", [0.0, 1e-20])
def test_a_draft_token_that_attends_to_no_token_of_a_split_adds_nothing_to_its_result(zero: float) -> None:
    """Let only the last token see the second tile. NaN scales and the largest codes follow the last token."""
    batch = Batch("k2v2", 64, [17], seed=8, ratio=3, wave=8)
    query = torch.randn(4, 6, 64, generator=batch.rng) * zero
    out = decode_rows(batch.pages, batch.table, [17], [4], query, batch.scale)
    for i, seen in enumerate(range(14, 18)):
        wanted = decode_reference(query[i], batch.keys[0][:seen], batch.values[0][:seen], batch.fmt, batch.scale)
        assert ((out[i] - wanted).norm(dim=-1) < 1e-3 * wanted.norm(dim=-1)).all()


def test_a_nan_query_changes_no_other_output() -> None:
    batch = Batch("k4v4", 128, [70], seed=8, ratio=4, tile=32, block_size=32, wave=3)
    query = torch.randn(4, 8, 128, generator=batch.rng)
    whole = decode_rows(batch.pages, batch.table, [70], [4], query, batch.scale)
    query[1, 2, 5] = torch.nan
    out = decode_rows(batch.pages, batch.table, [70], [4], query, batch.scale)
    assert out[1, 2].isnan().all()
    out[1, 2] = whole[1, 2]
    assert torch.equal(out, whole)


def test_more_than_a_thousand_query_tokens_are_split_and_merged() -> None:
    """Use as many sequences as a large engine has, with three tokens each. Most rows are padding."""
    lengths, counts = [20, *[0] * 350, 33], [3, *[0] * 350, 3]
    batch = Batch("k4v4", 64, [20, 33], seed=2, kv_heads=1, ratio=1, wave=4)
    table = torch.full((352, batch.table.shape[1]), PAST_THE_END, dtype=torch.int32)
    table[0], table[351] = batch.table[0], batch.table[1]
    query = torch.randn(1056, 1, 64, generator=batch.rng)
    out = decode_rows(batch.pages, table, lengths, counts, query, batch.scale)
    for at, (i, seen) in enumerate([(0, 18), (0, 19), (0, 20), (1, 31), (1, 32), (1, 33)]):
        wanted = decode_reference(query[at], batch.keys[i][:seen], batch.values[i][:seen], batch.fmt, batch.scale)
        assert ((out[at] - wanted).norm(dim=-1) < 1e-3 * wanted.norm(dim=-1)).all()
    assert not out[6:].any()


@settings(max_examples=12)
@given(
    st.sampled_from(WITH_RESIDUALS), st.sampled_from([64, 96, 128, 256, 512]),
    st.lists(drafted, min_size=1, max_size=3), st.integers(0, 4), st.sampled_from([0.5, 1.0]),
    st.sampled_from([1, 4, 9]), st.sampled_from([(16, 16), (48, 16), (64, 32), (64, 64)]), st.integers(2, 4),
    st.integers(1, 4), st.booleans(), seeds,
)  # fmt: skip
def test_all_tokens_of_a_sequence_read_the_same_newest_blocks_with_residuals(
    name: str, dim: int, step: list[tuple[int, int]], newest: int, mapped: float, ratio: int, cut: tuple[int, int],
    stages: int, wave: int, calibrated: bool, seed: int,
) -> None:  # fmt: skip
    lengths, counts = [n for n, _ in step], [count for _, count in step]
    s = Sequences(name, dim, lengths, newest, seed, 2, ratio, cut[0], calibrated, mapped)
    for i, (n, count) in enumerate(step):
        if count < n:
            s.store(i, 0, n - count)
        s.store(i, n - count, n)
    residual_pages = s.residuals.pages.shape[1]
    shape = Shape(s.fmt, s.dim, s.kv_heads, s.ratio, s.block_size, CPU, residuals=residual_pages)
    pages = GpuPages(s.cache, launch_as(shape, cut[1], stages, wave), s.factors, s.residuals)
    query = torch.randn(sum(counts), s.kv_heads * ratio, dim, generator=s.rng)
    out, at = decode_rows(pages, s.table, lengths, counts, query, s.scale), 0
    for i, (n, count) in enumerate(step):
        for seen in range(n - count + 1, n + 1):
            key, value = s.read_back(i, seen, n)
            wanted = s.wanted(query[at], i, seen, n)
            assert_within_rounding(out[at], wanted, query[at], key, value, s.factors, s.scale)
            at += 1


BAD_ROWS = {
    "first rows of int64": ("starts is torch.int64", {"starts": torch.tensor([0, 2, 4])}),
    "no end of the last sequence": ("starts has 2 rows", {"starts": torch.tensor([0, 2], dtype=torch.int32)}),
    "owners of int64": ("owners is torch.int64", {"owners": torch.zeros(4, dtype=torch.int64)}),
    "more rows than the plan": ("owners has 7 rows", {"owners": torch.zeros(7, dtype=torch.int32)}),
    "more of a sequence than the plan": ("most is 4", {"most": 4}),
    "one of each": ("most is 1", {"most": 1}),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_invalid_rows_of_a_step_are_refused_before_a_launch(what: str) -> None:
    message, wrong = BAD_ROWS[what]
    plan = Plan(Shape(formats.parse("k4v4"), 64, 2, 2, 16, CPU), 2, tokens=3)
    right = {
        "starts": torch.tensor([0, 2, 4], dtype=torch.int32),
        "owners": torch.zeros(4, dtype=torch.int32),
        "most": 2,
    }
    with pytest.raises(BadInputError, match=f"^{message}"):
        plan.update(torch.ones(2, dtype=torch.int32), several=Several(**(right | wrong)))
    assert plan.several is None
