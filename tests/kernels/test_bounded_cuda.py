"""A bounded cache through the CUDA backend's metadata and interpreted kernels, with FlashAttention in plain torch."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backends.fa_utils")

from cuda_engine import BLOCK, DIM, HEADS, KV_HEADS, STEP, Engine

from kvpilot_kernels.reference.attention import round_trip
from kvpilot_runtime.config.retention import SinksAndWindow

BOUND = SinksAndWindow(4, 100)


def first_kept(position: int) -> int:
    """Return the first kept position after the sinks' page."""
    return max(BLOCK, (position - BOUND.window + 1) // BLOCK * BLOCK)


def test_decodes_and_prompts_read_sinks_and_window_alone_whatever_the_pages_between_hold(cuda: Any) -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvpilot_runtime.bounded.attention import KeptTables, bounded_backend

    engine = Engine(cuda, "k4v4", blocks=40, width=8)
    # A token's answer then does not depend on the chunk in which its prompt is computed.
    engine.impl.read_back = engine.builder.read_back = True
    engine.builder.__class__ = bounded_backend(cuda.CudaBackend).get_builder_cls()
    engine.builder.kv_cache_spec = SimpleNamespace(bound=BOUND, block_size=BLOCK)
    engine.builder.kept = KeptTables(BOUND, BLOCK, 8, torch.device("cpu"))
    tables = {sequence: [engine.free.pop() for _ in range(8)] for sequence in "abc"}
    keys, values = ({s: torch.randn(0, KV_HEADS, DIM) for s in "abc"} for _ in "kv")
    for new in (
        {"a": 90, "b": 300},
        {"a": 1, "b": 1, "c": 20},
        {"b": 1, "a": 140},
        {"a": 1, "b": 1, "c": 1},
        {"a": 130},
    ):
        counts = list(new.values())
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        before = {s: len(keys[s]) for s in new}
        query, fresh_k, fresh_v = (
            torch.randn(sum(counts), heads, DIM, generator=engine.rng) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        slots = []
        for i, (s, count) in enumerate(new.items()):
            rows = slice(int(starts[i]), int(starts[i + 1]))
            keys[s], values[s] = torch.cat([keys[s], fresh_k[rows]]), torch.cat([values[s], fresh_v[rows]])
            slots += [tables[s][p // BLOCK] * BLOCK + p % BLOCK for p in range(before[s], before[s] + count)]
            for block in range(1, first_kept(before[s]) // BLOCK):  # the scheduler frees these before the step
                engine.cache[tables[s][block]] = 255
        lens = torch.tensor([len(keys[s]) for s in new], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(new),
            num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=int(lens.max()),
            block_table_tensor=torch.tensor([tables[s] for s in new], dtype=torch.int32),
            slot_mapping=torch.tensor(slots), causal=True, seq_lens_cpu_upper_bound=lens,
        )  # fmt: skip
        out = torch.full((sum(counts), HEADS * DIM), torch.nan)
        STEP.attn_metadata = None
        meta = engine.builder.build(0, common)
        engine.impl.forward(engine.layers[0], query, fresh_k, fresh_v, engine.cache, meta, out.view(query.shape))
        row = 0
        for s, count in new.items():
            stored = [
                round_trip(x[s], engine.fmt, side, engine.factors) for x, side in ((keys, "key"), (values, "value"))
            ]
            for position in range(before[s], before[s] + count):
                seen = [p for p in range(position + 1) if p < BLOCK or p >= first_kept(position)]
                key, value = (x[seen].repeat_interleave(HEADS // KV_HEADS, 1) for x in stored)
                p = torch.einsum("hd,thd->ht", query[row].double(), key.double()).mul(DIM**-0.5).softmax(-1)
                wanted = torch.einsum("ht,thd->hd", p, value.double())
                found = out[row].view(HEADS, DIM).double()
                assert ((found - wanted).norm(dim=-1) < 2e-3 * wanted.norm(dim=-1)).all(), (s, position)
                row += 1


def test_decode_waits_for_the_store_where_two_new_tokens_of_a_sequence_decode_apart(cuda: Any) -> None:
    """The second token of a sequence reads the first one. Tokens of different sequences never read each other."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvpilot_runtime.bounded.attention import KeptTables, bounded_backend

    engine = Engine(cuda, "k4v4", blocks=40, width=8)
    engine.builder.__class__ = bounded_backend(cuda.CudaBackend).get_builder_cls()
    engine.builder.kv_cache_spec = SimpleNamespace(bound=BOUND, block_size=BLOCK)
    engine.builder.kept = KeptTables(BOUND, BLOCK, 8, torch.device("cpu"))
    engine.builder.plan.shape.can_overlap = True  # as on a GPU
    boundary = 3 * BLOCK + BOUND.window - 1  # the window of this position begins at the start of a page
    assert first_kept(boundary) > first_kept(boundary - 1)
    for new, decodes in ((1, 3), (2, 4)):
        counts = torch.tensor([1, new, 1])
        starts = torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32)
        lens = torch.tensor([50, boundary + 1, 200], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=3,
            num_actual_tokens=int(starts[-1]), max_query_len=new, max_seq_len=int(lens.max()),
            block_table_tensor=torch.arange(24, dtype=torch.int32).view(3, 8),
            slot_mapping=torch.arange(int(starts[-1])), causal=True, seq_lens_cpu_upper_bound=lens,
        )  # fmt: skip
        made = engine.builder.build(0, common)
        assert (made.decodes, made.prefills) == (decodes, None)
        assert made.plan.overlap == (new == 1)
