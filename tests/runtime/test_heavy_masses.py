"""Attention masses of pages, and the requests that are measured."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_runtime.bounded import heavy
from kvpilot_runtime.bounded.heavy import HeldTables, Step, held_alone, most_pages
from kvpilot_runtime.bounded.heavy_mass import Singles, masses, page_mass, scores
from kvpilot_runtime.bounded.heavy_spec import NOTHING, Kept
from kvpilot_runtime.config.retention import HeavyHitters
from kvpilot_runtime.errors import UnsupportedEngineError, UnsupportedModelError

BOUND = HeavyHitters(4, 32, 128)


def expected(
    query: torch.Tensor, keys: torch.Tensor, page: int, softcap: float, sinks: torch.Tensor | None
) -> list[float]:
    """Compute the masses token by token in float64."""
    rows, heads, dim = query.shape
    total = [0.0] * -(-len(keys) // page)
    for row in range(rows):
        seen = len(keys) - (rows - 1 - row)
        for head in range(heads):
            key = keys[:seen, head // (heads // keys.shape[1])].double()
            scores = key @ query[row, head].double() * dim**-0.5
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            for token, p in enumerate(scores.softmax(0)[:seen].tolist()):
                total[token // page] += p
    return total


@given(rows=st.integers(1, 5), tokens=st.integers(5, 70), repeat=st.sampled_from([1, 3]),
       softcap=st.sampled_from([0, 5]), sinks=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_a_pages_mass_is_the_attention_that_its_tokens_get(
    rows: int, tokens: int, repeat: int, softcap: float, sinks: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    query, keys = torch.randn(rows, 2 * repeat, 64, generator=rng), torch.randn(tokens, 2, 64, generator=rng)
    extra = torch.randn(2 * repeat, generator=rng) if sinks else None
    found = page_mass(query, keys.permute(1, 2, 0), 16, 64**-0.5, softcap, extra)
    wanted = torch.tensor(expected(query, keys, 16, softcap, extra), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    if not sinks:
        assert float(found.sum()) == pytest.approx(rows * 2 * repeat)


@given(lens=st.lists(st.integers(5, 70), min_size=1, max_size=4), rows=st.integers(1, 5), sinks=st.booleans(),
       seed=st.integers(0, 99))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_masses_of_sequences_together_are_those_of_each_whatever_lies_past_their_ends(
    lens: list[int], rows: int, sinks: bool, seed: int
) -> None:
    rng, longest = torch.Generator().manual_seed(seed), -(-max(lens) // 16) * 16
    query = torch.randn(len(lens), rows, 4, 64, generator=rng)
    keys = torch.full((len(lens), 2, 64, longest), torch.nan)
    for key, length in zip(keys, lens, strict=True):
        key[..., :length] = torch.randn(2, 64, length, generator=rng)
    extra = torch.randn(4, generator=rng) if sinks else None
    found = masses(scores(query, keys, 0.125), 16, 5.0, extra, torch.tensor(lens))
    for i, length in enumerate(lens):
        alone = page_mass(query[i], keys[i, ..., :length], 16, 0.125, 5.0, extra)
        torch.testing.assert_close(found[i, : len(alone)], alone, atol=1e-6, rtol=1e-5)
        assert not found[i, len(alone) :].any()


@pytest.mark.parametrize("name", formats.own_names())
def test_keys_are_read_from_packed_pages_as_attention_reads_them(name: str) -> None:
    fmt, rng = formats.parse(name), torch.Generator().manual_seed(5)
    packed = PackedPages(torch.full((9, 2, 16, fmt.row_bytes(64)), 255, dtype=torch.uint8), fmt, 64)
    key, value = (torch.randn(70, 2, 64, generator=rng) for _ in "kv")
    table = torch.tensor([7, 2, 5, 1, 8])
    packed.store(key, value, table[torch.arange(70) // 16] * 16 + torch.arange(70) % 16)
    found = packed.keys(table, 70)
    torch.testing.assert_close(found, round_trip(key, fmt, "key").float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found, packed.read(table, 70)[0], atol=0, rtol=0)


def batch(sequences: list[tuple[int, int]], table: torch.Tensor, **more: Any) -> CommonAttentionMetadata:
    """Return a vLLM batch of pairs (tokens before, new tokens). `table` is int32 [sequences, blocks]."""
    starts = torch.tensor([0, *(n for _, n in sequences)]).cumsum(0).int()
    lens = torch.tensor([context + n for context, n in sequences], dtype=torch.int32)
    return CommonAttentionMetadata(
        **{"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lens, "num_reqs": len(sequences),
           "num_actual_tokens": int(starts[-1]), "max_query_len": max(n for _, n in sequences),
           "max_seq_len": int(lens.max()), "block_table_tensor": table, "causal": True,
           "slot_mapping": torch.full((int(starts[-1]),), -1), **more}
    )  # fmt: skip


def kept(pages: tuple[int, ...], first: int) -> Kept:
    """Return held pages among so many first ones."""
    return np.array(pages), first


def scheduler(ahead: bool) -> SimpleNamespace:
    """Return a configuration with chunks of 50 tokens."""
    return SimpleNamespace(max_num_batched_tokens=50, async_scheduling=ahead)


def test_tables_and_lengths_are_those_of_held_pages_alone() -> None:
    table = torch.arange(1, 37).view(3, 12).int()
    told = {"a": kept((0, 3, 4), 6), "b": NOTHING, "c": kept((0, 1, 6), 7)}
    step = Step(told, True, lambda: "abc")  # pages have 16 tokens: a has 159 tokens, b 64, c 160
    found = held_alone(batch([(158, 1), (0, 64), (159, 1)], table), BOUND, 16, step)
    assert found.block_table_tensor[0, :7].tolist() == [1, 4, 5, 7, 8, 9, 10]
    assert found.block_table_tensor[1, :4].tolist() == [13, 14, 15, 16]
    assert found.block_table_tensor[2, :6].tolist() == [25, 26, 31, 32, 33, 34]
    assert found.seq_lens.tolist() == [159 - 48, 64, 160 - 64]
    assert found.max_seq_len == 111
    assert found.query_start_loc.tolist() == [0, 1, 65, 66]
    # The step measures the last two of the 64 tokens in b's chunk, and each token that decodes.
    assert step.weighing is not None
    assert [(one.request, one.row, one.rows, one.weight) for one in step.weighing.sequences] == [
        ("a", 0, slice(0, 1), 32), ("b", 1, slice(63, 65), 32), ("c", 2, slice(65, 66), 32)
    ]  # fmt: skip
    assert step.weighing.sequences[2].pages == (0, 1, 6, 7, 8, 9)
    assert step.weighing.table[2, :6].tolist() == [25, 26, 31, 32, 33, 34]
    step.weighing.total += 3
    assert step.weighing.masses() == [
        ("a", (0, 3, 4, 6, 7, 8, 9), [3.0] * 7), ("b", (0, 1, 2, 3), [3.0] * 4), ("c", (0, 1, 6, 7, 8, 9), [3.0] * 6)
    ]  # fmt: skip
    step = Step(told, requests=lambda: "abc")
    held_alone(batch([(158, 1), (0, 64), (159, 1)], table), BOUND, 16, step)
    assert step.weighing is not None
    assert [one.request for one in step.weighing.sequences] == ["b"]


def test_what_no_sequence_holds_is_in_no_table() -> None:
    """After a sequence's end the table repeats the sequence's first page, whatever the table held before."""
    table = torch.tensor([[4, -9, 5, 6], [7, 8, -9, -9]], dtype=torch.int32)
    told = {"a": kept((0,), 2), "b": NOTHING}
    found = held_alone(batch([(40, 20), (10, 10)], table), BOUND, 16, Step(told, requests=lambda: "ab"))
    assert found.block_table_tensor.tolist() == [[4, 5, 6], [7, 8, 7]]


def test_layers_of_unlike_shapes_add_to_the_same_masses() -> None:
    step, common = Step({"b": NOTHING}, requests=lambda: "b"), batch([(0, 32)], torch.tensor([[7, 8]]))
    held_alone(common, BOUND, 16, step)
    first = step.weighing
    held_alone(common, BOUND, 16, step)
    assert step.weighing is first is not None


def test_steps_of_one_token_of_each_are_in_buffers_that_stay_where_they_are() -> None:
    buffers = HeldTables(16, most_pages(BOUND, 16, scheduler(False)), 8, torch.device("cpu"))
    places = set()
    for pages, length in (((0, 3, 4), 159), ((0, 2, 4), 160)):
        table = torch.arange(1, 25).view(2, 12).int()
        step = Step({"a": kept(pages, 6), "b": NOTHING}, requests=lambda: "ab")
        found = buffers.put(held_alone(batch([(length - 1, 1), (20, 1)], table), BOUND, 16, step))
        assert found.block_table_tensor[0, :7].tolist() == [*(at + 1 for at in pages), 7, 8, 9, 10]
        assert found.block_table_tensor[1, :2].tolist() == [13, 14]
        assert found.seq_lens.tolist() == [length - 48, 21]
        places.add((found.block_table_tensor.data_ptr(), found.seq_lens.data_ptr()))
    assert len(places) == 1
    # vLLM captures graphs with the whole table, and with lengths for any context.
    longest = batch([(4000, 1)], torch.zeros(1, 300, dtype=torch.int32))
    captured = buffers.put(held_alone(longest, BOUND, 16, Step()))
    assert (captured.max_seq_len, captured.seq_lens.tolist()) == (144, [144])
    assert (captured.block_table_tensor.data_ptr(), captured.seq_lens.data_ptr()) in places


def test_a_step_that_runs_ahead_has_room_for_what_was_in_flight() -> None:
    """vLLM frees pages by the results that are available. These do not include a chunk in flight."""
    assert most_pages(BOUND, 16, scheduler(False)) == 9
    assert most_pages(BOUND, 16, scheduler(True)) == 9 + 4  # chunks have 50 tokens


def test_single_tokens_ahead_of_chunks_are_a_kernels_to_measure_and_a_step_without_is_not_measured() -> None:
    apart = Singles(torch.zeros(1, dtype=torch.int32), torch.full((2, 3, 6), 7.0), 2)
    table, told = torch.arange(1, 10).view(3, 3).int(), {"a": NOTHING, "b": NOTHING, "c": NOTHING}
    step = Step(told, True, lambda: "abc")
    held_alone(batch([(20, 1), (0, 40), (30, 1)], table), BOUND, 16, step, apart)
    assert step.weighing is not None
    assert [one.request for one in step.weighing.sequences] == ["b", "c"]
    assert step.singles == [apart]
    assert apart.wanted.tolist() == [1]
    assert not apart.total.any()
    apart.total[0, 0, :4], apart.total[1, 0, :4] = torch.tensor([1.0, 2, 3, 4]), 10.0
    assert apart.masses() == [("a", (0, 1), [32 * 23.0, 32 * 27.0])]
    for one in (Step(told, False, lambda: "abc"), Step(told, True, lambda: "abc")):
        held_alone(batch([(20, 1), (0, 40), (30, 1)], table), BOUND, 16, one, apart)
        assert apart.wanted.tolist() == [int(one.alone)]
        assert bool(apart.masses()) == one.alone == bool(one.singles)


def test_the_newer_runner_tells_the_order_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heavy, "STEP", Step())
    states = {False: SimpleNamespace(req_ids=["b", "a"]), True: None}
    order = heavy.noting_order(lambda scheduled, dummy_run: (states[dummy_run], 1))
    assert order("step", dummy_run=False) == (states[False], 1)
    assert list(heavy.STEP.requests()) == ["b", "a"]
    assert order("step", dummy_run=True) == (None, 1)
    assert not heavy.STEP.requests()


def test_a_batch_before_the_engine_serves_stays_as_it_is() -> None:
    common = batch([(0, 2)], torch.zeros(1, 4, dtype=torch.int32))
    assert held_alone(common, BOUND, 16, Step()) is common


def test_a_sequence_that_the_scheduler_does_not_tell_of_is_no_guess() -> None:
    for told, requests in (({"b": NOTHING}, "a"), ({"a": NOTHING}, "")):
        with pytest.raises(UnsupportedEngineError, match=r"does not tell .* in row 0.*version of vllm"):
            step = Step(told, requests=partial(str, requests))
            held_alone(batch([(40, 1)], torch.tensor([[1, 2, 3, 4]])), BOUND, 16, step)


def test_a_batch_that_is_not_causal_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"causal=False.*HeavyHitters:4:32:128"):
        held_alone(batch([(0, 2)], torch.zeros(1, 4), causal=False), BOUND, 16, Step({}))
