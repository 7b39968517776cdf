"""Batches with a bounded cache: the tokens that each new token sees, computed in pieces and by the CPU backend."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from kvpilot_formats import formats
from kvpilot_kernels.cpu import PackedPages
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_runtime.backends.cpu import CpuBackend, CpuBuilder
from kvpilot_runtime.bounded.attention import KeptTables, bounded_backend, kept_alone, pieces
from kvpilot_runtime.config.retention import SinksAndWindow
from kvpilot_runtime.errors import UnsupportedModelError

BOUNDS = st.builds(SinksAndWindow, st.integers(1, 40), st.integers(1, 100))
SEQUENCES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 80)), min_size=1, max_size=5)
"""Numbers of stored and of new tokens."""


def attended(bound: SinksAndWindow, page: int, position: int) -> set[int]:
    """Return the tokens that docs/retention.md defines: sinks and window in whole pages, up to the token itself."""
    sinks = range(-(-bound.sinks // page) * page)
    window = range(max(0, position - bound.window + 1) // page * page, position + 1)
    return {p for p in (*sinks, *window) if p <= position}


def batch(sequences: list[tuple[int, int]], table: torch.Tensor, **more: Any) -> CommonAttentionMetadata:
    """Return a batch of vLLM's; `table`: int32 [sequences, blocks]."""
    new = torch.tensor([n for _, n in sequences])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)]).int()
    lens = torch.tensor([context + n for context, n in sequences], dtype=torch.int32)
    return CommonAttentionMetadata(
        **{"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lens, "num_reqs": len(sequences),
           "num_actual_tokens": int(starts[-1]), "max_query_len": int(new.max()), "max_seq_len": int(lens.max()),
           "block_table_tensor": table, "slot_mapping": torch.full((int(starts[-1]),), -1), "causal": True, **more}
    )  # fmt: skip


@given(BOUNDS, st.sampled_from([16, 32]), SEQUENCES)
def test_each_new_token_attends_to_the_sinks_and_its_window_and_to_nothing_else(
    bound: SinksAndWindow, page: int, sequences: list[tuple[int, int]]
) -> None:
    starts = torch.tensor([0, *torch.tensor([n for _, n in sequences]).cumsum(0).tolist()])
    if not int(starts[-1]):
        return
    cut = pieces(bound, page, starts, torch.tensor([context + n for context, n in sequences]))
    assert cut.starts[0] == 0
    assert cut.starts[-1] == starts[-1]
    for i, owner in enumerate(cut.owner.tolist()):
        rows = range(int(cut.starts[i]), int(cut.starts[i + 1]))
        assert rows
        columns = cut.columns[i].repeat_interleave(page) * page + torch.arange(page).repeat(cut.columns.shape[1])
        for row in rows:
            position = sequences[owner][0] + row - int(starts[owner])
            seen = int(cut.lens[i]) - (rows.stop - 1 - row)
            assert columns[:seen].tolist() == sorted(attended(bound, page, position))


@given(BOUNDS, SEQUENCES)
def test_no_piece_takes_more_blocks_than_a_token_may_keep(
    bound: SinksAndWindow, sequences: list[tuple[int, int]]
) -> None:
    starts = torch.tensor([0, *torch.tensor([n for _, n in sequences]).cumsum(0).tolist()])
    if not int(starts[-1]):
        return
    cut = pieces(bound, 16, starts, torch.tensor([context + n for context, n in sequences]))
    assert int(cut.lens.max()) <= bound.kept(16)
    assert cut.columns.shape[1] * 16 < bound.kept(16) + 16


@given(BOUNDS, st.sampled_from([16, 32]), st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 3))
def test_a_token_of_each_sequence_is_served_from_buffers_that_graphs_read_as_its_piece_is(
    bound: SinksAndWindow, page: int, contexts: list[int], padding: int
) -> None:
    rows, blocks = len(contexts) + padding, -(-301 // page)
    table = 1 + torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    kept = KeptTables(bound, page, 9, torch.device("cpu"))
    padded = batch([(context, 1) for context in contexts] + [(0, 0)] * padding, table)
    before = kept.table.data_ptr(), kept.lens.data_ptr()
    found = kept.alone(padded)
    wanted = kept_alone(batch([(context, 1) for context in contexts], table[: len(contexts)]), bound, page)
    assert (found.block_table_tensor.data_ptr(), found.seq_lens.data_ptr()) == before
    assert found.seq_lens.tolist() == [*wanted.seq_lens.tolist(), *[0] * padding]
    assert int(found.seq_lens.max()) <= found.max_seq_len <= bound.kept(page)
    for row, length in enumerate(wanted.seq_lens.tolist()):
        pages = -(-length // page)
        assert found.block_table_tensor[row, :pages].tolist() == wanted.block_table_tensor[row, :pages].tolist()
    assert found.slot_mapping is padded.slot_mapping
    assert found.query_start_loc is padded.query_start_loc


def test_a_batch_of_nobody_stays_as_it_is() -> None:
    common = batch([(0, 0)], torch.zeros(1, 4, dtype=torch.int32))
    assert kept_alone(common, SinksAndWindow(4, 32), 16) is common


def test_a_batch_that_is_not_causal_is_refused_by_name() -> None:
    common = batch([(0, 2)], torch.zeros(1, 4, dtype=torch.int32), causal=False)
    with pytest.raises(UnsupportedModelError, match=r"causal=False.*KVPILOT_RETENTION"):
        kept_alone(common, SinksAndWindow(4, 32), 16)


def test_which_sequences_are_in_their_prompts_and_how_long_they_are_goes_with_the_pieces() -> None:
    lens = torch.tensor([41, 100], dtype=torch.int32)
    common = batch([(40, 1), (60, 40)], torch.arange(14).view(2, 7).int(), is_prefilling=torch.tensor([False, True]),
                   seq_lens_cpu_upper_bound=lens)  # fmt: skip
    found = kept_alone(common, SinksAndWindow(4, 16), 16)
    assert found.num_reqs == len(found.seq_lens) == len(found.seq_lens_cpu_upper_bound) == 5
    assert found.is_prefilling.tolist() == [False, True, True, True, True]
    assert found.seq_lens.tolist() == found.seq_lens_cpu_upper_bound.tolist()
    assert found.max_query_len == 40  # the largest of the whole batch
    assert found.block_table_tensor[:, 0].tolist() == [0, 7, 7, 7, 7]


@pytest.mark.parametrize("name", ["k4v4", "k8v4"])
def test_packed_pages_are_read_as_attention_with_the_mask_says(name: str) -> None:
    """Use the CPU backend's own metadata: decodes beside prompts, with poison in all pages between sinks and window."""
    fmt, dim, page, bound = formats.parse(name), 64, 16, SinksAndWindow(4, 40)
    rng = torch.Generator().manual_seed(3)
    sequences = [(200, 1), (0, 130), (90, 70), (30, 1)]
    table = (1 + torch.randperm(4 * 14, generator=rng).view(4, 14)).int()
    cache = torch.full((60, 2, page, fmt.row_bytes(dim)), 255, dtype=torch.uint8)
    packed = PackedPages(cache, fmt, dim)
    stored = []
    for owner, (context, new) in enumerate(sequences):
        key, value = (torch.randn(context + new, 2, dim, generator=rng) for _ in "kv")
        at = torch.arange(context + new)
        ordinals = torch.arange(1, context + new + 1)
        packed.store(key, value, table[owner].long()[at // page] * page + at % page, ordinals=ordinals)
        stored.append([round_trip(x, fmt, side) for x, side in ((key, "key"), (value, "value"))])
        for block in range(-(-(context + new) // page)):
            gone = block >= 1 and (block + 1) * page <= max(0, context - bound.window + 1) // page * page
            if gone:
                cache[table[owner, block]] = 255
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=name), kv_transfer_config=None)
    builder = bounded_backend(CpuBackend).get_builder_cls()
    assert issubclass(builder, CpuBuilder)
    made = object.__new__(builder)
    made.kv_cache_spec = SimpleNamespace(bound=bound, block_size=page)
    made.kept = KeptTables(bound, page, 8, torch.device("cpu"))
    made.vllm_config = config
    meta = made.build(0, batch(sequences, table))
    query = torch.randn(sum(n for _, n in sequences), 4, dim, generator=rng)
    out = torch.full_like(query, torch.nan)
    rows = meta.decode_rows
    out[rows] = packed.decode(query[rows], meta.block_table[meta.decode_sequences].long(), meta.ordinals[rows], 0.125)
    for p in meta.prefills:
        fresh = [x[p.context :].float() for x in packed.read(meta.block_table[p.sequence], p.context + p.end - p.start)]
        out[p.start : p.end] = packed.prefill(
            query[p.start : p.end], *fresh, meta.block_table[p.sequence], p.context, 0.125
        )
    row = 0
    for (context, new), (key, value) in zip(sequences, stored, strict=True):
        for position in range(context, context + new):
            seen = sorted(attended(bound, page, position))
            keys, values = (x[seen].repeat_interleave(2, 1).double() for x in (key, value))
            p = torch.einsum("hd,thd->ht", query[row].double(), keys).mul(0.125).softmax(-1)
            torch.testing.assert_close(out[row].double(), torch.einsum("ht,thd->hd", p, values), atol=2e-5, rtol=1e-4)
            row += 1


def test_buffers_for_graphs_are_made_where_steps_are_captured_alone() -> None:
    builder = bounded_backend(CpuBackend).get_builder_cls()
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=8),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(cache_dtype="k4v4"),
        kv_transfer_config=None,
    )
    made = builder(SimpleNamespace(bound=SinksAndWindow(4, 40), block_size=16), ["x"], config, torch.device("cpu"))
    assert len(made.kept.table) == 8


def test_only_steps_with_one_token_per_sequence_are_captured_whole() -> None:
    class Whole(CpuBuilder):
        @classmethod
        def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
            return AttentionCGSupport.ALWAYS

    class Stock(CpuBackend):
        @staticmethod
        def get_builder_cls() -> type[Whole]:
            return Whole

    builder = bounded_backend(Stock).get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
